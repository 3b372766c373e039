"""Reads a file with a secret, unless every user of this host may read or write it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvtide.errors import ConfigError

__all__ = ["read_secret"]

_LARGEST = 1 << 20
"""Maximum bytes of a file with secrets: enough for some thousand tokens, and a limit when the path is wrong."""


def read_secret(setting: str, path: str, harm: str, secret: str) -> bytes:
    """The content of the file that ``setting`` names. For the error message, ``harm`` is what other users could do with
    it, and ``secret`` what it is.

    A link is followed, because Kubernetes mounts secrets as links: the mode of its target counts. Raises ConfigError.
    """
    try:
        with Path(path).expanduser().open("rb") as f:
            mode = stat.S_IMODE(os.fstat(f.fileno()).st_mode)
            if mode & (stat.S_IROTH | stat.S_IWOTH):
                raise ConfigError(
                    f"{setting}: every user of this host may read or write {path} (mode {mode:04o}), and so {harm}: "
                    f"chmod 600 {path} (in Kubernetes: defaultMode 0440 of the secret's volume), and take a new "
                    f"{secret} if others have used this host"
                )
            data = f.read(_LARGEST + 1)
    except OSError as e:
        raise ConfigError(f"{setting}: cannot read {path}: {e.strerror}") from e
    if len(data) > _LARGEST:
        raise ConfigError(f"{setting}: {path} has more than {_LARGEST} bytes, which no file with a {secret} has")
    return data
