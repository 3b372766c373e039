"""A file with a secret in it: read, unless everybody on this host may read or write it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvtide.errors import ConfigError

__all__ = ["read_secret"]

_LARGEST = 1 << 20
"""Bytes of a file with secrets: some thousand tokens, and never all of what is no such file."""


def read_secret(setting: str, path: str, harm: str, secret: str) -> bytes:
    """What is in the file that ``setting`` names. ``harm``: what others can do who read it; ``secret``: what it is.

    A link is followed, because Kubernetes mounts secrets as links: the file at its end counts. Raises ConfigError.
    """
    try:
        with Path(path).expanduser().open("rb") as f:
            mode = stat.S_IMODE(os.fstat(f.fileno()).st_mode)
            if mode & (stat.S_IROTH | stat.S_IWOTH):
                raise ConfigError(
                    f"{setting}: everybody on this host may read or write {path} (mode {mode:04o}), and so {harm}: "
                    f"chmod 600 {path} (in Kubernetes: defaultMode 0440 of the secret's volume), and take a new "
                    f"{secret} if others have used this host"
                )
            data = f.read(_LARGEST + 1)
    except OSError as e:
        raise ConfigError(f"{setting}: cannot read {path}: {e.strerror}") from e
    if len(data) > _LARGEST:
        raise ConfigError(f"{setting}: {path} has more than {_LARGEST} bytes, which no file with a {secret} has")
    return data
