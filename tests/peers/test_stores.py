"""What one node has, another reads: every byte is checked, and whatever is not as it should be is a miss."""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtide import Layout, Model, Session, Store
from kvtide.block import BlockKey, Group, Kind
from kvtide.counts import TierCount
from kvtide.errors import ConfigError
from kvtide.peers import server as server_module
from kvtide.peers.server import PeerServer
from kvtide.testing.blocks import aligned, content, identity
from kvtide.testing.caller import CallerAnswer
from kvtide.testing.clock import FakeClock
from kvtide.testing.interface import (
    HYBRID,
    MODEL,
    OTHER_TENANT,
    PADDED,
    PLAIN,
    SIZE,
    data,
    everything,
    held,
    length,
    prompt,
    until,
)
from kvtide.testing.keys import WRAPPING, ring_in
from kvtide.testing.servers import free_ports
from kvtide.tiers.base import Read, ReadResult
from kvtide.tiers.format.reason import Reason
from kvtide.tiers.peers import link
from kvtide.tiers.peers.greeting import ask_in
from kvtide.tiers.peers.protocol import ALL, IDENTITY, ITEM, REQUEST, Operation, pack_identity
from kvtide.tiers.peers.tcp import Tcp
from kvtide.tiers.peers.tier import PeerTier, connections_of
from kvtide.tiers.peers.transport import PeerConnection
from kvtide.tiers.peers.trust import PeerTrust
from tests.node.certificates import Authority
from tests.peers.nodes import Stores, black_hole, silent


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with Stores(tmp_path) as stores:
        yield stores


def keep(session: Session, tokens: list[int]) -> None:
    session.store(tokens, data(PLAIN, tokens))


def name(address: str) -> str:
    return f"peer {address}"


def read_from(store: Store, address: str) -> int:
    """Blocks that a store has read from a node."""
    return store.statistics().counts.get(TierCount.BLOCKS_READ.of(name(address)), 0)


# -- hits -------------------------------------------------------------------------------------------------------


def test_what_one_computed_is_a_hit_on_the_other(stores: Stores) -> None:
    long = prompt(*range(70))
    one, server = stores.serving()
    two = stores.store(server.address)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        keep(first, long)
        assert length(second, long) == len(long)
        assert read_from(two, server.address) == 70
        assert length(second, long) == len(long)
        assert read_from(two, server.address) == 70, "the second time it is in memory"
        assert length(second, prompt(5)) == 0
    assert held(one) == held(two) == 0
    until(lambda: server.statistics().bytes_held == 0)
    assert server.statistics().blocks_sent == 70
    assert server.statistics().bytes_sent == 70 * PLAIN.geometry["full"].footprint


def test_a_prompt_longer_than_one_lookup(stores: Stores) -> None:
    long = prompt(*range(1100))
    settings: dict[str, Any] = {"dram": {"budget": "64MiB", "segment": "4MiB"}}
    one, server = stores.serving(**settings)
    two = stores.store(server.address, **settings)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        keep(first, long)
        until(lambda: second.match(long).tokens == len(long))
        assert server.statistics().requests <= 4, "so many blocks are looked up together"
        assert length(second, long) == len(long)


@pytest.mark.parametrize("layout", [PLAIN, PADDED, HYBRID], ids=["plain", "padded", "hybrid"])
def test_blocks_of_every_shape(stores: Stores, layout: Layout) -> None:
    tokens, model = prompt(*range(6)), Model(layout, "given:shapes")
    one, server = stores.serving()
    two = stores.store(server.address)
    with one.session(model) as first, two.session(model) as second:
        first.store(tokens, everything(layout, tokens))
        assert length(second, tokens) == len(tokens)


def test_blocks_larger_than_the_credit_are_read_one_by_one(stores: Stores) -> None:
    layout = Layout((Group("full", Kind.FULL, 4, 8, 128, "float32", page=SIZE),), block_tokens=1024)
    assert layout.geometry["full"].footprint > 8 << 20
    model, tokens = Model(layout, "given:large"), [1] * 2048
    settings: dict[str, Any] = {"dram": {"budget": "160MiB", "segment": "80MiB"}}
    one, server = stores.serving(**settings)
    two = stores.store(server.address, **settings)
    blocks = [content(bytes([n]), layout.geometry["full"].nbytes) for n in range(2)]
    with one.session(model) as first, two.session(model) as second:
        first.store(tokens, blocks)
        with second.match(tokens, wait=30) as match:
            loaded = second.load(match).wait(60)
            assert loaded.tokens == len(tokens)
            assert all(bytes(view) == bytes(block) for view, block in zip(loaded.views["full"], blocks, strict=True))


def test_blocks_on_the_other_nodes_disk(stores: Stores, tmp_path: Path) -> None:
    tokens = prompt(*range(40))
    disk = {"path": str(tmp_path / "tier"), "budget": "64MiB", "segment": "8MiB", "store": "through"}
    one, server = stores.serving(nvme=disk, dram={"budget": "1MiB", "segment": "1MiB"})
    two = stores.store(server.address)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        for n in range(0, 40, 8):
            keep(first, tokens[: (n + 8) * SIZE])
            assert one.flush(30).complete
        in_dram = one.statistics().tiers["dram"].blocks
        assert in_dram < 40 == one.statistics().tiers["nvme"].blocks
        assert length(second, tokens) == len(tokens)
    assert read_from(two, server.address) == 40
    assert one.statistics().tiers["dram"].blocks == in_dram, "a read for another node evicts nothing here"


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_an_encrypted_or_compressed_disk_is_sent_as_blocks(stores: Stores, tmp_path: Path, codec: str) -> None:
    tokens = prompt(*range(8))
    disk = {"path": str(tmp_path / "tier"), "budget": "64MiB", "segment": "8MiB", "store": "through", "codec": codec}
    with stores.store(nvme=disk) as before, before.session(MODEL) as session:
        keep(session, tokens)
        assert before.flush(30).complete
    one, server = stores.serving(nvme=disk)
    two = stores.store(server.address)
    assert one.statistics().tiers["dram"].blocks == 0
    with two.session(MODEL) as second:
        assert length(second, tokens) == len(tokens)


def test_three_nodes_read_from_each_other(stores: Stores) -> None:
    """Each has every third block of a prompt, and the first part of another."""
    one, first = stores.serving()
    two, second = stores.serving(first.address)
    three = stores.store(first.address, second.address)
    with one.session(MODEL) as a, two.session(MODEL) as b, three.session(MODEL) as c:
        keep(a, prompt(1, 2, 3))
        keep(b, prompt(5, 6))
        assert length(c, prompt(1, 2, 3)) == 3 * SIZE
        assert length(c, prompt(5, 6)) == 2 * SIZE
        assert length(b, prompt(1, 2, 3)) == 3 * SIZE
    counts = three.statistics().counts
    assert counts[TierCount.BLOCKS_READ.of(name(first.address))] == 3
    assert counts[TierCount.BLOCKS_READ.of(name(second.address))] == 2


def test_a_node_answers_from_what_it_has_and_asks_nobody(stores: Stores) -> None:
    """One asks two, which asks one: a question must not go round."""
    proxied, first = stores.serving()
    two, second = stores.serving(first.address)
    one = stores.store(second.address)
    with proxied.session(MODEL) as a, two.session(MODEL) as b, one.session(MODEL) as c:
        keep(a, prompt(1))
        with c.match(prompt(1), wait=30) as match:
            assert (match.tokens, match.pending) == (0, False)
        assert first.statistics().requests == 0
        with b.match(prompt(1), wait=30) as match:  # known to the second, and not loaded
            assert match.tokens == SIZE
        with c.match(prompt(1, 2), wait=30) as match:
            assert match.tokens == 0


def test_the_same_list_of_addresses_for_all(stores: Stores) -> None:
    """A node that finds its own address in the list does not ask itself."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    both = [stores.store(*addresses, peers={"listen": address}) for address in addresses]
    servers = [PeerServer(store) for store in both]
    try:
        with both[0].session(MODEL) as first, both[1].session(MODEL) as second:
            keep(first, prompt(1, 2))
            assert length(second, prompt(1, 2)) == 2 * SIZE
            assert length(first, prompt(7)) == 0
            assert length(first, prompt(8)) == 0
        assert servers[0].statistics().blocks_sent == 2
        assert all(not server.statistics().closed for server in servers)
        own = next(cold.tier for cold in both[0].main.colds if cold.name == f"peer {addresses[0]}")
        assert isinstance(own, PeerTier)
        until(lambda: own.away)
        assert not own.statistics().away, "that is not to be repaired"
    finally:
        for server in servers:
            server.close()


def test_a_reserved_share_reads_from_no_other_node(stores: Stores) -> None:
    """What it finds must not depend on others. Those without a share do."""
    one, server = stores.serving()
    share = f"{OTHER_TENANT.tag.hex()}:4MiB"
    two = stores.store(server.address, dram={"budget": "16MiB", "segment": "1MiB", "reserved": share})
    for tenants, tokens in (((OTHER_TENANT,), 0), ((), SIZE)):
        with one.session(MODEL, *tenants) as first, two.session(MODEL, *tenants) as second:
            keep(first, prompt(1))
            assert length(second, prompt(1)) == tokens


def test_with_keys_blocks_travel_over_tls_only(stores: Stores, tmp_path: Path) -> None:
    """Records that were encrypted before security.encrypt was turned off are opened and sent, too."""
    ring_in(tmp_path).close()
    key = tmp_path / "wrapping"
    key.write_bytes(WRAPPING)
    key.chmod(0o600)
    security = {"key_source": f"file:{key}", "key_file": str(tmp_path / "keys.json")}
    with pytest.raises(ConfigError, match=r"security\.key_source.*peers\.certificate"):
        stores.store("127.0.0.1:9411", security=security)


def test_a_certificate_that_cannot_be_used_makes_the_node_away(stores: Stores, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    names = ("host7", "host8")
    certificates = [str(authority.issue(name)) for name in names]
    settings = [
        {"certificate": file, "authority": str(authority.file), "names": " ".join(names), "token_file": ""}
        for file in certificates
    ]
    _, server = stores.serving(peers=settings[0])
    two = stores.store(server.address, peers=settings[1], clock=FakeClock())
    Path(certificates[1]).write_text("garbage")
    with two.session(MODEL) as session:
        for n in range(10):
            with session.match(prompt(n), wait=30) as match:
                assert (match.tokens, match.pending) == (0, False)
    assert failures(two, server.address) == 1


def test_equal_reads_of_two_sessions_join(stores: Stores) -> None:
    tokens = prompt(*range(32))
    one, server = stores.serving()
    two = stores.store(server.address)
    with one.session(MODEL) as first, two.session(MODEL) as a, two.session(MODEL) as b:
        keep(first, tokens)
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda session: length(session, tokens), (a, b))) == [len(tokens)] * 2
    assert read_from(two, server.address) == 32


# -- misses -----------------------------------------------------------------------------------------------------


def test_a_prompt_that_no_node_has_is_asked_for_once(stores: Stores) -> None:
    _, server = stores.serving()
    two = stores.store(server.address)
    with two.session(MODEL) as session:
        with session.match(prompt(1), wait=30) as match:
            assert not match.pending
        for _ in range(5):
            with session.match(prompt(1)) as match:
                assert (match.tokens, match.pending) == (0, False)
    assert server.statistics().requests == 1


def test_what_the_other_has_lost_is_a_miss_and_is_computed_again(stores: Stores) -> None:
    one, server = stores.serving()
    two = stores.store(server.address)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        keep(first, prompt(1, 2))
        with second.match(prompt(1, 2), wait=30) as match:
            assert match.tokens == 2 * SIZE
            first.drop(prompt(1, 2))
            assert second.load(match).wait(30).tokens == 0
        keep(second, prompt(1, 2))
        assert length(second, prompt(1, 2)) == 2 * SIZE


def test_a_block_that_a_node_has_is_stored_here_all_the_same(stores: Stores) -> None:
    """An engine that computed it rather than load it wants it here: the other node may go away."""
    one, server = stores.serving()
    two = stores.store(server.address)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        keep(first, prompt(1, 2))
        with second.match(prompt(1, 2), wait=30) as match:
            assert match.tokens == 2 * SIZE
        keep(second, prompt(1, 2))
        assert two.statistics().tiers["dram"].blocks == 2
        server.close()
        assert length(second, prompt(1, 2)) == 2 * SIZE


def test_a_peer_does_not_count_as_written(stores: Stores, tmp_path: Path) -> None:
    """What only another node has is not safe: it is written to this node's own disk as if nobody had it."""
    disk = {"path": str(tmp_path / "tier"), "budget": "64MiB", "segment": "8MiB", "store": "eviction"}
    one, server = stores.serving()
    with one.session(MODEL) as first:
        keep(first, prompt(1, 2))
        with stores.store(server.address, nvme=disk) as two:
            with two.session(MODEL) as second:
                assert length(second, prompt(1, 2)) == 2 * SIZE
            assert two.flush(30).written == 0
        server.close()
    with stores.store(nvme=disk) as again, again.session(MODEL) as session:
        assert length(session, prompt(1, 2)) == 2 * SIZE


def test_what_is_dropped_here_is_not_fetched_again(stores: Stores) -> None:
    one, server = stores.serving()
    two = stores.store(server.address)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        keep(first, prompt(1, 2))
        assert length(second, prompt(1, 2)) == 2 * SIZE
        second.drop(prompt(1, 2))
        assert length(second, prompt(1, 2)) == 0
        assert length(first, prompt(1, 2)) == 2 * SIZE, "the other node keeps it"
        keep(second, prompt(1, 2))
        assert length(second, prompt(1, 2)) == 2 * SIZE


def small(stores: Stores, *addresses: str, **settings: Any) -> Store:
    """A store that forgets what is not used."""
    return stores.store(*addresses, dram={"budget": "1MiB", "segment": "1MiB"}, **settings)


def evict_all(session: Session) -> None:
    for n in range(9000, 9040):
        keep(session, prompt(n))


def test_what_is_dropped_and_stored_again_is_fetched_again(stores: Stores) -> None:
    one, server = stores.serving()
    two = small(stores, server.address)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        keep(first, prompt(1))
        second.drop(prompt(1))
        assert length(second, prompt(1)) == 0
        keep(second, prompt(1))
        evict_all(second)
        assert read_from(two, server.address) == 0
        assert length(second, prompt(1)) == SIZE
        assert read_from(two, server.address) == 1


def test_an_expiry_set_here_bounds_what_the_other_node_says(stores: Stores) -> None:
    clock = FakeClock()
    one, server = stores.serving(clock=clock)
    two = small(stores, server.address, clock=clock)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        keep(first, prompt(1))
        assert length(second, prompt(1)) == SIZE
        assert second.expire(prompt(1), ttl=100) == 1
        evict_all(second)
        assert length(second, prompt(1)) == SIZE, "until then it is fetched"
        assert read_from(two, server.address) == 2
        clock.advance(101)
        assert length(second, prompt(1)) == 0
        assert length(first, prompt(1)) == SIZE, "the other node keeps it"


def test_a_block_lives_no_longer_than_its_writer_said(stores: Stores) -> None:
    clock = FakeClock()
    one, server = stores.serving(clock=clock)
    two = stores.store(server.address, clock=clock)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        first.store(prompt(1), data(PLAIN, prompt(1)), ttl=100)
        assert length(second, prompt(1)) == SIZE
        clock.advance(101)
        assert length(second, prompt(1)) == 0


def test_a_block_that_has_expired_by_this_hosts_clock_is_searched_for_once(stores: Stores) -> None:
    """The other node's clock is behind, so there it is valid."""
    behind, ahead = FakeClock(), FakeClock()
    ahead.advance(100)
    one, server = stores.serving(clock=behind)
    two = stores.store(server.address, clock=ahead)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        first.store(prompt(1, 2), data(PLAIN, prompt(1, 2)), ttl=50)
        for _ in range(3):
            with second.match(prompt(1, 2), wait=5) as match:
                assert (match.tokens, match.pending) == (0, False)
        assert server.statistics().requests == 1


def test_a_block_whose_name_others_use_here_is_not_searched_for(stores: Stores) -> None:
    """It could not be entered, so the search would never end."""
    one, server = stores.serving()
    two = stores.store(server.address)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        keep(first, prompt(1))
        (key,) = first.chain(prompt(1)).keys(PLAIN.groups[0].suffix)
        index = two.main.index
        with index.lock:
            index.identity[index.add(key, bytes(32), 0)] = 4711
        with second.match(prompt(1), wait=5) as match:
            assert (match.tokens, match.pending) == (0, False)
    assert server.statistics().requests == 0


def test_another_model_or_tenant_gets_nothing(stores: Stores) -> None:
    one, server = stores.serving()
    two = stores.store(server.address)
    tokens = prompt(1, 2)
    with one.session(MODEL) as first:
        keep(first, tokens)
        for model, tenant in ((Model(PLAIN, "given:other"), None), (MODEL, OTHER_TENANT)):
            with two.session(model, *([tenant] if tenant else [])) as other:
                assert length(other, tokens) == 0
        with two.session(MODEL) as second:
            assert length(second, tokens) == len(tokens)
    with one.session(MODEL, OTHER_TENANT) as first, two.session(MODEL, OTHER_TENANT) as second:
        first.store(tokens, data(PLAIN, tokens))
        until(lambda: length(second, tokens) == len(tokens))  # that it was absent is remembered for a moment


def test_a_node_that_is_not_there_costs_nothing(stores: Stores) -> None:
    one, server = stores.serving()
    server.close()
    two = stores.store(server.address, peers={"timeout": 30.0}, clock=FakeClock())
    with two.session(MODEL) as session:
        assert length(session, prompt(100)) == 0
        for n in range(20):
            with session.match(prompt(n)) as match:
                assert (match.tokens, match.pending) == (0, False)
        assert failures(two, server.address) == 1, "it is left alone"
    assert not two.statistics().tiers[name(server.address)].failed
    assert one.statistics().held == 0


def failures(store: Store, address: str) -> int:
    return sum(dict(store.statistics().tiers[name(address)].reasons).values())


@pytest.mark.parametrize("where", [silent, black_hole])
def test_a_node_that_never_answers_delays_nobody(stores: Stores, where: Callable[[], Any]) -> None:
    """The first prompt waits for a short deadline, not for ``peers.timeout``; after that nobody waits, and whether the
    node is back is tried without a prompt."""
    clock = FakeClock()
    with where() as address:
        two = stores.store(address, peers={"timeout": 30.0}, clock=clock)
        with two.session(MODEL) as session:
            matches = [session.match(prompt(n)) for n in range(20)]  # they are looked up one after the other
            for n, match in enumerate(matches):
                match.release()
                with session.match(prompt(n), wait=20) as later:
                    assert (later.tokens, later.pending) == (0, False)
            assert failures(two, address) == 1, "those that waited behind the first did not ask"
            for n in range(100, 120):
                clock.advance(0.5)  # greetings begin meanwhile
                with session.match(prompt(n)) as match:
                    assert (match.tokens, match.pending) == (0, False)
            store_and_load(session)


def test_a_node_that_hangs_does_not_delay_what_shared_storage_or_another_node_has(
    stores: Stores, tmp_path: Path
) -> None:
    files = {"path": str(tmp_path / "shared"), "budget": "256MiB"}
    settings: dict[str, Any] = {"dram": {"budget": "64MiB", "segment": "4MiB"}}
    long = prompt(*range(1100))  # more than one lookup
    one, server = stores.serving(**settings)
    writer = stores.store(files=files)
    with one.session(MODEL) as first, writer.session(MODEL) as other, silent() as address:
        keep(first, long)
        # A new folder takes no writes until its budget has been counted.
        until(lambda: other.store(prompt(5000), data(PLAIN, prompt(5000)), durable=True).wait(30).durable == 1)
        two = stores.store(address, server.address, files=files, peers={"timeout": 30.0}, **settings)
        with two.session(MODEL) as second:
            with second.match(prompt(5000), wait=20) as match:
                assert match.tokens == SIZE
            with second.match(long, wait=20) as match:
                assert match.tokens == len(long)


def test_a_node_that_was_restarted_is_read_at_once(stores: Stores) -> None:
    """Its end has closed all connections; that is known, and costs no prompt anything."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    one = stores.store(listen=True, peers={"listen": address})
    two = stores.store(address)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        for number in range(3):
            with closing(PeerServer(one)) as server:
                tokens = prompt(*range(100 * number, 100 * number + 80))  # for all connections
                keep(first, tokens)
                assert length(second, tokens) == len(tokens)
                assert server.statistics().connections == 1 + connections_of(two.config.peers)
    assert two.statistics().tiers[name(address)].reasons == ()


# -- a proxy that does harm -------------------------------------------------------------------------------------


def whole(session: Session, tokens: list[int]) -> bool:
    return length(session, tokens) == len(tokens)


@pytest.mark.parametrize("then", ["cut", "flip", "freeze"])
def test_harm_at_any_byte_is_a_miss_and_never_wrong_bytes(stores: Stores, then: str) -> None:
    """The answer to a lookup, then records: the harm comes at a byte of the head, of headers, and of payloads."""
    one, server = stores.serving()
    footprint = PLAIN.geometry["full"].footprint
    # in the greeting, the answer to the lookup, the head of the answer to the read, a header and two payloads
    places = [5, 115, 140, 500, 4400 + footprint, 3 * footprint]
    for n, place in enumerate(places):
        tokens = prompt(*range(100 * n, 100 * n + 4))
        proxy = stores.proxy(server)
        with one.session(MODEL) as first, stores.store(proxy.address, peers={"timeout": 0.3}) as two:
            keep(first, tokens)
            with two.session(MODEL) as second:
                proxy.harm(place, then)
                began = time.monotonic()
                length(second, tokens)
                assert time.monotonic() - began < 20
                proxy.cut()
                proxy.harm(1 << 60, "pass")
                until(functools.partial(whole, second, tokens))
            assert held(two) == 0
    assert held(one) == 0
    until(lambda: server.statistics().bytes_held == 0)


def test_a_flipped_bit_in_a_block_is_counted(stores: Stores) -> None:
    one, server = stores.serving()
    proxy = stores.proxy(server)
    two = stores.store(proxy.address)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        keep(first, prompt(1))
        with second.match(prompt(1), wait=30) as match:
            assert match.tokens == SIZE
            proxy.harm(112 + 32 + 4096 + 10_000, "flip")
            assert second.load(match).wait(30).tokens == 0
        reasons = dict(two.statistics().tiers[name(proxy.address)].reasons)
        assert reasons == {Reason.CORRUPT_PAYLOAD.value: 1}


def test_a_slow_node_is_slow_and_right(stores: Stores) -> None:
    one, server = stores.serving()
    proxy = stores.proxy(server)
    proxy.slow(20_000, 0.002)
    two = stores.store(proxy.address, peers={"timeout": 30.0})
    with one.session(MODEL) as first, two.session(MODEL) as second:
        keep(first, prompt(1, 2, 3))
        assert length(second, prompt(1, 2, 3)) == 3 * SIZE


def test_a_block_may_take_longer_than_the_timeout_while_it_arrives(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that sends on is waited for, however large the block; one that stops costs the timeout."""
    for part in (link, server_module):
        monkeypatch.setattr(part, "SLOWEST", 1 << 20)
    large = Layout((Group("full", Kind.FULL, 16, 8, 128, "float32", page=SIZE),), block_tokens=256)  # 32 MiB
    model, tokens = Model(large, "given:large"), [7] * 256
    memory = {"budget": "80MiB", "segment": "16MiB"}
    one, server = stores.serving(dram=memory, peers={"timeout": 1.0})
    proxy = stores.proxy(server)
    proxy.slow(1 << 20, 0.05)
    two = stores.store(proxy.address, dram=memory, peers={"timeout": 1.0})
    with one.session(model) as first, two.session(model) as second:
        first.store(tokens, [content(b"x", large.geometry["full"].nbytes)])
        with second.match(tokens, wait=30) as match:
            assert match.tokens == 256
            began = time.monotonic()
            assert second.load(match).wait(120).tokens == 256
            assert time.monotonic() - began > 1.0, "else it was no test"


def test_blocks_that_arrived_before_a_connection_ended_count(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    one, server = stores.serving()
    proxy = stores.proxy(server)
    trust = PeerTrust(one.config.peers, one.config.security)
    geometry = PLAIN.geometry["full"]
    with one.session(MODEL) as first:
        tokens = prompt(*range(8))
        keep(first, tokens)
        who = identity(PLAIN, weights="given:contract")
        keys = [BlockKey(bytes(digest) + who.group) for digest in first.chain(tokens).digests]
        memory = aligned(8 * geometry.footprint)
        spans = [memory[i : i + geometry.footprint] for i in range(0, len(memory), geometry.footprint)]
        for size in ("_SMALL_PIECE", "_LARGE_PIECE"):
            monkeypatch.setattr(link, size, geometry.footprint)
        with closing(PeerTier(proxy.address, trust, connections=1, timeout=5.0)) as tier:
            answer: CallerAnswer[ReadResult] = CallerAnswer(8)
            proxy.harm(112 + 16 + 8 * 16 + 5 * (4096 + geometry.footprint) + 100, "cut")
            tier.read([Read(key, who, 0, span) for key, span in zip(keys, spans, strict=True)], answer)
            results = answer.wait()
    assert results[:4] == [True] * 4
    assert True not in results[5:]


def test_a_hung_node_costs_one_deadline(stores: Stores) -> None:
    one, server = stores.serving()
    proxy = stores.proxy(server)
    two = stores.store(proxy.address, peers={"timeout": 0.5})
    tokens = prompt(*range(64))
    with one.session(MODEL) as first, two.session(MODEL) as second:
        keep(first, tokens)
        with second.match(tokens, wait=30) as match:
            assert match.tokens == len(tokens)
            proxy.harm(0, "freeze")
            began = time.monotonic()
            second.load(match).wait(60)
            assert time.monotonic() - began < 10
        for n in range(100, 200):  # while it hangs nobody waits for it
            with second.match(prompt(n)) as match:
                assert (match.tokens, match.pending) == (0, False)
        store_and_load(second)
    assert held(two) == 0


def promised(session: Session, tokens: list[int]) -> int:
    with session.match(tokens) as match:
        return match.tokens


@pytest.mark.parametrize("number", [errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN])
def test_a_host_that_is_down_is_left_alone(stores: Stores, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Whatever the network says of it."""
    asked = []

    def refuse(self: Tcp, address: str, timeout: float) -> PeerConnection:
        asked.append(address)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Tcp, "connect", refuse)
    store = stores.store("127.0.0.1:9")
    with store.session(MODEL) as session:
        assert length(session, prompt(1)) == 0
        for cold in store.main.colds:
            until(lambda cold=cold: cold.tier.away)  # type: ignore[misc]
    assert asked


def test_what_was_found_at_a_node_that_is_away_is_not_promised(stores: Stores) -> None:
    """Nor are its blocks tried one after the other; they are found again when it is back."""
    clock = FakeClock()
    one, server = stores.serving()
    proxy = stores.proxy(server)
    two = stores.store(proxy.address, clock=clock)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        for n in range(4):
            keep(first, prompt(n))
            until(lambda n=n: promised(second, prompt(n)) == SIZE)  # type: ignore[misc]
        proxy.harm(0, "cut")
        with second.match(prompt(0)) as match:
            assert second.load(match).wait(30).tokens == 0
        until(lambda: not any(promised(second, prompt(n)) for n in range(4)))
        proxy.harm(1 << 60, "pass")

        def back() -> bool:
            clock.advance(1)
            return promised(second, prompt(3)) == SIZE

        until(back)
        assert length(second, prompt(3)) == SIZE


def store_and_load(session: Session) -> None:
    """The store itself works."""
    keep(session, prompt(1000, 1001))
    assert length(session, prompt(1000, 1001)) == 2 * SIZE


# -- a reader that does harm ------------------------------------------------------------------------------------


def test_a_reader_that_stops_reading_loses_its_lease(stores: Stores) -> None:
    """It asks for more than the kernel's buffers hold, and takes nothing."""
    layout = Layout((Group("full", Kind.FULL, 4, 8, 128, "float32", page=SIZE),), block_tokens=512)
    model, tokens = Model(layout, "given:large"), [1] * 512 * 4
    one, server = stores.serving(dram={"budget": "256MiB", "segment": "64MiB"}, peers={"timeout": 0.5})
    nbytes = layout.geometry["full"].nbytes
    with one.session(model) as first:
        first.store(tokens, [content(bytes([n]), nbytes) for n in range(4)])
        who = identity(layout, weights="given:large")
        digests = first.chain(tokens).digests
        trust = PeerTrust(one.config.peers, one.config.security)
        connections = []
        for number in range(4):
            connection = trust.transport.connect(server.address, 5)
            connections.append(connection)
            connection.begin()
            ask_in(connection, trust.secret())
            body = pack_identity(who) + ITEM.pack(digests[number], 0, ALL)
            assert len(body) == IDENTITY.size + ITEM.size
            connection.send([REQUEST.pack(Operation.READ, 0, 1, len(body), 1), body])
        until(lambda: server.statistics().bytes_held > 0)
        assert one.statistics().held > 0
        assert server.statistics().bytes_held <= 32 << 20, "an eighth of the budget, whatever others ask for"
        until(lambda: server.statistics().closed.get("too slow", 0) + server.statistics().blocks_refused >= 4)
        until(lambda: one.statistics().held == server.statistics().bytes_held == 0)
        for connection in connections:
            connection.close()
        assert first.drop(tokens) == 4
        until(lambda: server.statistics().connections == 0)


def test_serving_ends_at_once_whatever_askers_do(stores: Stores) -> None:
    threads = threading.active_count()
    one, server = stores.serving(peers={"timeout": 30.0})
    two = stores.store(server.address)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        keep(first, prompt(1))
        assert length(second, prompt(1)) == SIZE
        began = time.monotonic()
        server.close()
        server.close()
        assert time.monotonic() - began < 10
        assert length(second, prompt(2)) == 0
    two.close()
    one.close()
    until(lambda: threading.active_count() == threads)


def test_a_prompt_waits_for_others_no_longer_than_it_would_take_to_compute_it(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node is slow to say that it has nothing; what it has after all is found for those who ask later."""
    other, server = stores.serving()
    with other.session(MODEL) as session:
        keep(session, prompt(1))
    clock = FakeClock()
    reader = stores.store(server.address, clock=clock)
    locate, go = link.PeerLink.locate, threading.Event()

    def slow(*given: Any) -> Any:
        assert go.wait(60)
        return locate(*given)

    monkeypatch.setattr(link.PeerLink, "locate", slow)
    seconds = 4.0
    speed = len(prompt(1)) / seconds
    with reader.session(MODEL) as session:

        def pending(prefill: float) -> bool:
            with session.match(prompt(1), prefill=prefill) as match:
                assert not match.tokens
                return match.pending

        assert pending(speed)
        clock.advance(0.9 * seconds)
        assert pending(speed)
        assert not pending(2 * speed)
        clock.advance(0.2 * seconds)
        assert not pending(speed)
        assert pending(0), "how long it would take is not known"
        go.set()
        until(lambda: length(session, prompt(1)) == len(prompt(1)))
