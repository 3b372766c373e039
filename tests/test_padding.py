"""What a slot held before must not leave with the next block: not to the disk, where anybody may read it later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvtide

# Sections of 64 x 3 bytes in pages of 4096: nearly all of a slot is padding.
PADDED = kvtide.Layout.attention(layers=2, heads=1, head_dim=3, dtype="uint8", block_tokens=64)
WHOLE = kvtide.Layout.attention(layers=2, heads=1, head_dim=64, dtype="uint8", block_tokens=64)
SECRET = b"another tenant's"


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_padding_holds_nothing_of_earlier_blocks(tmp_path: Path, codec: str) -> None:
    tokens = np.arange(64, dtype=np.uint32)
    nbytes = WHOLE.geometry["full"].nbytes
    assert nbytes == PADDED.geometry["full"].footprint
    with kvtide.open(
        dram={"budget": "1MiB", "segment": "1MiB"},
        nvme={"path": str(tmp_path / "kv"), "budget": "16MiB", "codec": codec},
    ) as store:
        before = store.session(kvtide.Model(WHOLE, "first"))
        before.store(tokens, [np.frombuffer(SECRET * (nbytes // len(SECRET)), np.uint8)])
        store.flush()
        before.drop(tokens)  # its slot in DRAM is free again; its bytes on disk are erased by name only
        after = store.session(kvtide.Model(PADDED, "second"))
        rng = np.random.default_rng(0)
        after.store(tokens, [rng.integers(0, 256, PADDED.geometry["full"].nbytes, np.uint8)])
        store.flush()
        with after.match(tokens) as match:
            (view,) = after.load(match).wait().blocks
            assert SECRET not in bytes(view)
    (segment,) = (tmp_path / "kv").glob("*.segment")
    data = segment.read_bytes()
    at = data.index(b"KVTIDE\r\n")
    header, payload = 4096, nbytes
    assert SECRET not in data[at : at + header + (payload if codec == "raw" else 4 * 4096)]
