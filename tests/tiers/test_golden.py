"""Records and journals of every version there was, read forever. The files beside this were made once, and stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from blake3 import blake3

from kvtide.block import BlockKey
from kvtide.security.key_file import KeyFile
from kvtide.security.key_ring import KeyRing
from kvtide.security.wrapping import LocalWrapper
from kvtide.testing.blocks import content, floats, keys
from kvtide.testing.keys import WRAPPING
from kvtide.testing.tier import Caller, shaped
from kvtide.tiers.format.encryption import Encryption
from kvtide.tiers.nvme.tier import Nvme

GOLDEN = Path(__file__).with_name("golden")
TINY = shaped(2, 8200)
MANY = keys(2)


def opened(path: Path, compression: str, sealed: bool) -> Caller:
    """A tier in ``path``, sealed with the golden keys, or in the open."""
    key_ring = KeyRing(KeyFile(path.parent / "keys.json"), LocalWrapper(WRAPPING)) if sealed else None
    tier = Nvme(path, 16 << 20, segment=64 << 10, threads=1, compression=compression, encryption=Encryption(key_ring))
    return Caller(tier, floats if compression == "zstd" else content)


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("compression", ["raw", "zstd"])
def test_a_directory_of_version_1_is_read(tmp_path: Path, compression: str, sealed: bool, journal: bool) -> None:
    name = f"v1-{compression}{'-sealed' if sealed else ''}"
    shutil.copytree(GOLDEN / name, tmp_path / name)
    shutil.copy(GOLDEN / "keys.json", tmp_path / "keys.json")
    if not journal:
        (tmp_path / name / "journal").unlink()
    caller = opened(tmp_path / name, compression, sealed)
    (held,) = caller.tier.scan()
    found: dict[BlockKey, int] = dict(zip(held.keys, held.places.tolist(), strict=True))
    assert set(found) == set(MANY)
    assert caller.finds(MANY, TINY, [found[k] for k in MANY]) == [True] * len(MANY)
    caller.close()


def test_golden_files_are_as_they_were_written() -> None:
    """Editors and scripts that replace words in all files must not reach them."""
    names = sorted(p for p in GOLDEN.rglob("*") if p.is_file())
    digest = blake3()
    for path in names:
        digest.update(str(path.relative_to(GOLDEN)).encode() + blake3(path.read_bytes()).digest())
    assert digest.hexdigest() == "26b227b28b2d14418f3b14c5530aefc3e67b60834ef4cb9753fe08100c38b163"


def write_golden() -> None:
    """How they were made, with ``python -m tests.tiers.test_golden``. For a new version, into new folders."""
    for sealed in (False, True):
        for compression in ("raw", "zstd"):
            caller = opened(GOLDEN / f"v1-{compression}{'-sealed' if sealed else ''}", compression, sealed)
            caller.write(MANY, TINY)
            caller.close()


if __name__ == "__main__":
    write_golden()
