"""Hosts of the pool that vanish or hang: what is sent to them gets no answer."""

from __future__ import annotations

import errno
import itertools
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvtide.testing.blobs import names, value
from kvtide.testing.blocks import aligned
from kvtide.testing.interface import until
from kvtide.tiers.shared.mooncake import Mooncake
from kvtide.tiers.shared.mooncake_connects import end_connects
from tests.mooncake.servers import Holder, MooncakeMaster

_SIZE = 1 << 20
_OWN = "10.79.0.1"
_LONG = 120.0
"""Seconds. Without a limit of ours it takes eight minutes and more."""


class Host:
    """A new address of this host, until it vanishes: then nobody has it, and no packet to it is answered."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self.address = address = f"10.77.0.{next(self._numbers)}"
        _ip(f"addr add {address}/32 dev lo")

    def vanish(self) -> None:
        _ip(f"addr del {self.address}/32 dev lo")
        _ip(f"route add {self.address}/32 dev lo src {_OWN}")

    def come_back(self) -> None:
        _ip(f"route del {self.address}/32 dev lo")
        _ip(f"addr add {self.address}/32 dev lo")


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


@pytest.fixture(scope="module")
def host() -> Iterator[Callable[[], Host]]:
    _ip(f"addr add {_OWN}/32 dev lo")
    yield Host
    _ip(f"addr del {_OWN}/32 dev lo")


def test_only_connects_to_hosts_of_the_pool_that_do_not_answer_are_ended(host: Callable[[], Host]) -> None:
    member, other = host(), host()
    listener = socket.create_server((member.address, 0))
    with (
        closing(listener),
        closing(socket.create_connection(listener.getsockname())) as connected,
        ExitStack() as stack,
    ):
        member.vanish()
        other.vanish()
        failed: list[int] = []
        waiting = [stack.enter_context(closing(socket.socket())) for _ in range(2)]

        def connect(sock: socket.socket, address: str) -> None:
            failed.append(sock.connect_ex((address, 9)))

        threads = [
            threading.Thread(target=connect, args=(sock, where.address), daemon=True)
            for sock, where in zip(waiting, (member, other), strict=True)
        ]
        for thread in threads:
            thread.start()
        until(lambda: end_connects(lambda: [member.address, "no-such-host.invalid"]) == 1)
        threads[0].join()
        assert failed == [errno.ECONNRESET]
        assert end_connects(lambda: [member.address]) == 0
        assert threads[1].is_alive()
        assert connected.getpeername() == listener.getsockname()
        until(lambda: end_connects(lambda: [other.address]) == 1)
        threads[1].join()


@pytest.mark.long
@pytest.mark.parametrize("call", ["headers", "whole", "write"])
@pytest.mark.parametrize("harm", ["vanishes", "hangs"])
def test_a_call_ends_soon(tmp_path: Path, host: Callable[[], Host], harm: str, call: str) -> None:
    """Of a host that vanishes or hangs before the master learns of it."""
    where, blobs = host(), names(16)
    with (
        MooncakeMaster(tmp_path, "--client_ttl=600", "--default_kv_lease_ttl=600000") as server,
        Holder(server, 64 << 20, where.address) as holder,
        closing(Mooncake(server.url)) as mine,
        ThreadPoolExecutor(1) as pool,
    ):
        mine.write([(name, [value(name, _SIZE)]) for name in blobs], 30)
        (where.vanish if harm == "vanishes" else holder.hold)()
        calls: dict[str, Callable[[], object]] = {
            "headers": lambda: mine.read([(name, [aligned(4096)]) for name in blobs], 300),
            "whole": lambda: mine.read([(name, [aligned(_SIZE)]) for name in blobs], 300),
            "write": lambda: mine.write([(name, [value(name, _SIZE)]) for name in names(16)], 300),
        }
        ended = pool.submit(calls[call])
        done, _ = wait([ended], _LONG)
        (where.come_back if harm == "vanishes" else holder.resume)()  # else it would not end now either
        assert done
        with pytest.raises(TimeoutError, match="hangs"):
            ended.result()


@pytest.mark.long
def test_a_call_that_hangs_ends_after_its_client_was_closed(tmp_path: Path, host: Callable[[], Host]) -> None:
    where, (name,) = host(), names(1)
    with (
        MooncakeMaster(tmp_path, "--client_ttl=600", "--default_kv_lease_ttl=600000") as server,
        Holder(server, 64 << 20, where.address),
        ThreadPoolExecutor(1) as pool,
    ):
        mine = Mooncake(server.url)
        mine.write([(name, [value(name, _SIZE)])], 30)
        where.vanish()
        ended = pool.submit(mine.read, [(name, [aligned(4096), aligned(_SIZE)])], 300)
        assert not wait([ended], 2.0).done
        mine.close()
        assert not ended.done(), "it waited for the call"
        done, _ = wait([ended], _LONG)
        where.come_back()
        assert done
