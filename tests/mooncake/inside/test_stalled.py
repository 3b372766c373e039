"""A transfer that stops in the middle, and goes on after Mooncake has given it up."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvtide.testing.blobs import names, value
from kvtide.testing.blocks import aligned
from kvtide.testing.interface import until
from kvtide.tiers.shared.mooncake import Mooncake
from tests.mooncake.servers import Holder, MooncakeMaster

_MIB = 1 << 20


@pytest.mark.long
def test_memory_is_not_written_to_after_a_read_has_ended(tmp_path: Path) -> None:
    """Mooncake gives a transfer up after a minute, and leaves its socket open."""
    (name,) = names(1)
    size = 512 * _MIB
    with (
        MooncakeMaster(tmp_path / "master", "--client_ttl=600", "--default_kv_lease_ttl=600000") as server,
        Holder(server, 640 * _MIB) as holder,
        closing(Mooncake(server.url)) as blobs,
    ):
        blobs.write([(name, [value(name, size)])], 300)
        room = aligned(size)
        marks = np.frombuffer(room, np.uint8)[:: _MIB // 4]
        ended: list[BaseException | list[int]] = []

        def read() -> None:
            try:
                ended.append(blobs.read([(name, [room])], 300))
            except OSError as e:
                ended.append(e)

        thread = threading.Thread(target=read)
        thread.start()
        until(lambda: bool(marks.any()))
        holder.hold()
        thread.join(200)
        assert len(ended) == 1
        assert isinstance(ended[0], OSError), "it was too fast to be stopped in the middle"
        room[:] = bytes(size)
        holder.resume()
        end = time.monotonic() + 5  # nothing is to be awaited: nothing must happen
        while time.monotonic() < end:
            assert not marks.any(), "bytes came after the read had ended"
            time.sleep(0.1)
        until(lambda: _comes(blobs, name, size))  # with a client that was opened anew


def _comes(blobs: Mooncake, name: str, size: int) -> bool:
    room = aligned(size)
    try:
        return blobs.read([(name, [room])], 300) == [size] and room == value(name, size)
    except OSError:
        return False
