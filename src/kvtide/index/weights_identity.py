"""The identity of a model's weights, a part of every namespace: different weights have different keys.

- ``given:NAME``: the caller's own name; the caller guarantees that equal names mean equal weights.
- ``hub:COMMIT``: a snapshot folder of huggingface_hub, whose path has the commit. Used only while its shards are links
  into ``blobs/``, so that a file put in their place is read instead. A blob edited in place is not noticed.
- ``files:HEX``: BLAKE3 over the names and contents of the shard files.
- ``memory:HEX``: samples of parameters that exist only in memory; see ``from_samples``.

Reading every shard takes a while, so digests of files are remembered in a cache file by path, size, mtime, inode and
ctime. The ctime detects a file that was rewritten in place and had its mtime restored: only the kernel sets it. The
cache is optional: if it is missing or damaged, files are read again.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NewType

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtide.errors import ConfigError, LayoutError

__all__ = ["SAMPLES", "SHARDS", "WeightsId", "from_samples", "identify", "places"]

WeightsId = NewType("WeightsId", str)
SHARDS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
SAMPLES = 4096  # elements read from each parameter in memory
_SNAPSHOT = re.compile(r"(/.*/models--[^/]+)/snapshots/([0-9a-f]{40}(?:/.*)?)")
# Two changes within one clock tick have the same stamp, so a recent stamp proves nothing.
_SETTLED_NS = 2_000_000_000
_REMEMBERED = 10_000

_Stamp = tuple[int, int, int, int]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Known = dict[str, tuple[_Stamp, _Digest]]
_log = logging.getLogger(__name__)


def identify(path: str | Path | None = None, weights_id: str | None = None, cache: str | Path | None = "") -> WeightsId:
    """The identity of weights that were given a name, or that are in a folder or a file.

    ``cache`` is the file of known digests; ``""``: in the user's cache folder, ``None``: no file. Raises
    ``ConfigError`` if weights cannot be read, ``LayoutError`` if there are none.
    """
    if weights_id is not None:
        if not weights_id.strip() or not weights_id.isprintable():
            raise ConfigError(f"weights_id is {weights_id!r}; it must be a name in printable text")
        return WeightsId(f"given:{weights_id}")
    if path is None:
        raise ConfigError("these weights have no identity: give their path, or a weights_id")
    try:
        place, shards = _shards(Path(path).expanduser())
        return _from_hub(place, shards) or _from_files(shards, cache)
    except OSError as error:
        raise ConfigError(f"weights at {path} cannot be read: {error}") from error


def from_samples(samples: Iterable[tuple[str, tuple[int, ...], npt.NDArray[np.generic]]]) -> WeightsId:
    """The identity of parameters in memory, in any order: the name and shape of each, and its elements at ``places``.

    It depends on each one's name, dtype, shape and up to ``SAMPLES`` elements: the first, the last and one from each of
    as many equal strides. So training, merging and quantizing are noticed: a change scattered over a share ``f`` of one
    tensor is missed with probability ``(1 - f)**SAMPLES``. A change to few elements of a large tensor (a row of an
    embedding) is likely missed; give such weights a ``weights_id``. Give whole tensors: shards depend on the
    tensor-parallel size.
    """
    digests: dict[bytes, bytes] = {}
    for name, shape, sampled in samples:
        if name.encode() in digests:
            raise LayoutError(f"parameter {name!r} is there twice; give each one its full name")
        form = f"{sampled.dtype} {shape}".encode()
        digests[name.encode()] = blake3(_framed(form, sampled.tobytes())).digest()
    if not digests:
        raise LayoutError("no parameters were given to identify the weights: give them, or a weights_id")
    total = blake3(b"".join(_framed(*item) for item in sorted(digests.items())))
    return WeightsId(f"memory:{total.hexdigest()}")


def places(size: int) -> npt.NDArray[np.int64]:
    """The indices of the elements that are read from a parameter of ``size`` elements."""
    # Each index varies within its stride, by the golden ratio: evenly spaced ones may share a column.
    count = min(size, SAMPLES)
    edges = np.arange(count + 1, dtype=np.int64) * size // max(count, 1)
    wander = np.arange(count, dtype=np.int64) * 40503 % 65536
    found = edges[:-1] + (np.diff(edges) * wander >> 16)
    found[-1:] = size - 1
    return found


def _framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _shards(given: Path) -> tuple[Path, list[tuple[bytes, Path]]]:
    if given.is_file():  # only its folder is resolved: hub files are links out of the snapshot
        place = given.parent.resolve() / given.name
        return place, [(b"", place)]
    if not given.is_dir():
        raise ConfigError(f"no weights at {given}: give a local folder or file, or a weights_id")
    place = given.resolve()
    found = (file for file in _walk(place, set()) if file.suffix.lower() in SHARDS)
    shards = sorted((os.fsencode(file.relative_to(place)), file) for file in found)
    if not shards:
        raise LayoutError(f"no {', '.join(SHARDS)} under {place}: give weights, or a weights_id")
    return place, shards


def _walk(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Every file below, following links to folders, but each folder once."""
    seen.add(folder.resolve())
    for entry in sorted(folder.iterdir()):
        if not entry.is_dir():
            yield entry
        elif entry.resolve() not in seen:
            yield from _walk(entry, seen)


def _from_hub(place: Path, shards: list[tuple[bytes, Path]]) -> WeightsId | None:
    if (match := _SNAPSHOT.fullmatch(place.as_posix())) is None:
        return None
    blobs = Path(match[1], "blobs")
    linked = all(shard.is_symlink() and shard.resolve().parent == blobs for _, shard in shards)
    return WeightsId(f"hub:{match[2]}") if linked else None


def _from_files(shards: list[tuple[bytes, Path]], cache: str | Path | None) -> WeightsId:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    place = None if cache is None else Path(cache or f"{base}/kvtide/weights.json").expanduser()
    known, fresh, total = _load(place), _Known(), blake3()
    for name, shard in shards:
        key = os.fsencode(shard).decode(errors="backslashreplace")
        stamp, digest = known.get(key, (None, ""))
        if stamp != _stamp(shard.stat()):
            stamp, digest = _read(shard)
            if time.time_ns() - max(stamp[1], stamp[3]) > _SETTLED_NS:
                fresh[key] = stamp, digest
        total.update(_framed(name, bytes.fromhex(digest)))
    if place is not None and fresh:
        _save(place, fresh)
    return WeightsId(f"files:{total.hexdigest()}")


def _stamp(stat: os.stat_result) -> _Stamp:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns


def _read(file: Path) -> tuple[_Stamp, _Digest]:
    # Read, not mapped: truncating a mapped file kills the process with SIGBUS.
    hasher, buffer = blake3(max_threads=blake3.AUTO), memoryview(bytearray(16 << 20))
    with file.open("rb", buffering=0) as source:
        before = _stamp(os.fstat(source.fileno()))
        while count := source.readinto(buffer):
            hasher.update(buffer[:count])
        after = _stamp(os.fstat(source.fileno()))
    if not before == after == _stamp(file.stat()):
        raise ConfigError(f"{file} changed while it was read; try again when it is complete")
    return before, hasher.hexdigest()


def _load(place: Path | None) -> _Known:
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(place.read_bytes(), type=_Known) if place else {}
    return {}


def _save(place: Path, fresh: _Known) -> None:
    # Merged with what others saved meanwhile; an entry lost between two writers is read again.
    kept = dict([*(_load(place) | fresh).items()][-_REMEMBERED:])
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".weights-") as folder:
            new = Path(folder, place.name)
            new.write_bytes(msgspec.json.encode(kept))
            new.replace(place)
    except OSError as error:
        _log.warning("the digests of weights are not kept in %s: %s", place, error)
