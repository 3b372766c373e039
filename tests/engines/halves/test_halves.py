"""Both halves of a connector over a real node: what is loaded, what is stored, and for whom. The toy engine compares
every byte that a request has with what it should be."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvtide.block import Layout
from kvtide.engines import packing
from kvtide.engines.halves import tenancy, worker
from kvtide.engines.halves.scheduler import Scheduler
from kvtide.engines.halves.wishes import Wishes
from kvtide.index.keys import Tenant
from kvtide.node.client import Client
from tests.engines.halves.conftest import Engines
from tests.engines.halves.toy import Request, Toy
from tests.node.serving import Process, eventually

BLOCK = 64


def prompt(name: object, tokens: int = 300) -> list[int]:
    return random.Random(repr(name)).choices(range(50_000), k=tokens)


def tenant(number: int) -> Tenant:
    return Tenant(f"tenant {number}", bytes([number]) * 32)


def serve(toy: Toy, name: str, tokens: list[int], wishes: Wishes | None = None) -> Request:
    """Serve one request, and let the store have what it computed."""
    request = Request(name, list(tokens), wishes=wishes or Wishes())
    toy.run(request)
    toy.flush()
    return request


def test_what_one_request_computed_the_next_one_loads(engines: Engines) -> None:
    toy = engines()
    first = serve(toy, "first", prompt(1))
    assert (first.cached, first.source.dram, first.source.disk) == (0, 0, 0)
    second = serve(toy, "second", prompt(1) + prompt(2))
    assert (second.cached, second.source.dram, second.source.disk) == (256, 256, 0)
    assert serve(engines(), "of another engine", prompt(1) + prompt(2)).cached == 576


def test_after_a_restart_of_the_node_it_comes_from_disk(node: Process, engines: Engines) -> None:
    toy = engines()
    serve(toy, "first", prompt(1))
    with Client(node.path) as client:
        assert client.flush(60)
    node.stop()
    node.start()
    again: list[Request] = []

    def hit() -> bool:
        again.append(serve(toy, "again", prompt(1), Wishes(no_store=True)))
        return again[-1].cached > 0

    eventually(hit)
    assert (again[-1].source.dram, again[-1].source.disk) == (0, 256)
    other = serve(engines(), "other", prompt(1))
    assert (other.source.dram, other.source.disk) == (256, 0), "now it is in memory"


def test_borders_of_pages_and_blocks(engines: Engines) -> None:
    toy = engines()
    for tokens in (1, 15, 16, 17, 63, 64, 65, 79, 80, 81, 127, 128, 129):
        mine = prompt(tokens, tokens)
        serve(toy, "first", mine)
        assert serve(toy, "same", mine).cached == tokens // BLOCK * BLOCK
        assert serve(toy, "longer", mine + prompt(2, 70)).cached == tokens // BLOCK * BLOCK


def test_a_load_begins_where_the_engine_ends(engines: Engines) -> None:
    whole = prompt(1)
    serve(engines(), "whole", whole)
    for own in (16, 64, 80, 112, 240):
        toy = engines(prefix_cache=True)
        serve(toy, "part", whole[: own + 1], Wishes(no_load=True, no_store=True))
        found = serve(toy, "rest", whole)
        assert (found.own, found.cached) == (own, 256 - own)


def test_generated_tokens_are_stored_too(engines: Engines) -> None:
    toy = engines()
    request = Request("first", prompt(1, 70), new=prompt(2, 80))
    toy.run(request)
    toy.flush()
    assert serve(toy, "next turn", prompt(1, 70) + prompt(2, 80) + prompt(3)).cached == 128


def test_otherwise_a_block_is_stored_when_the_engine_has_used_it_again(engines: Engines) -> None:
    toy, other = engines(through=False, prefix_cache=True), engines()
    serve(toy, "first", prompt(1))
    assert serve(other, "early", prompt(1), Wishes(no_store=True)).cached == 0
    serve(toy, "second", prompt(1, 256) + prompt(2))
    assert serve(other, "late", prompt(1)).cached == 256


def test_a_preempted_request_is_resumed_from_the_store(engines: Engines) -> None:
    toy = engines(chunk=64)
    request = Request("preempted", prompt(1))
    toy.add(request)
    while request.computed < 192:
        toy.step()
    toy.flush()
    toy.preempt(request)
    toy.run()
    assert request.cached >= 128
    toy.flush()
    assert serve(toy, "next", prompt(1)).cached == 256


def test_an_engine_without_room_for_all_preempts_and_ends_all(engines: Engines) -> None:
    toy = engines(pages=40, prefix_cache=True)
    many = [Request(f"r{i}", prompt(1, 150) + prompt(i, 20), new=prompt(i, 100)) for i in range(6)]
    toy.run(*many)
    assert all(not r.new for r in many)


def test_a_prefix_on_its_way_is_loaded_once(engines: Engines) -> None:
    first = engines()
    for i in range(3):
        serve(first, f"{i}", prompt(0, 256) + prompt(i + 1, 200))
    toy = engines(prefix_cache=True)
    many = [Request(f"r{i}", prompt(0, 256) + prompt(i + 1, 200)) for i in range(3)]
    toy.run(*many)
    assert sorted(r.cached for r in many) == [192, 192, 448], "the others wait for the one, and load the rest"
    moved = toy.workers[0].take()
    assert (moved.loads, moved.failed) == (3, 0)


def test_ranks_of_any_number_share_a_cache(engines: Engines) -> None:
    """The last have more ranks than there are heads."""
    sizes = (1, 2, 4, 8)
    for ranks in sizes:
        serve(engines(ranks=ranks), "writer", prompt(ranks))
    for ranks in sizes:
        toy = engines(ranks=ranks)
        assert [serve(toy, f"reader of {n}", prompt(n)).cached for n in sizes] == [256] * 4


def test_packings_are_converted_on_load(engines: Engines) -> None:
    layouts = [
        Layout.attention(layers=2, heads=2, head_dim=32, block_tokens=BLOCK, packing=name) for name in packing.names()
    ]
    assert len(layouts) > 3
    for layout in layouts:
        serve(engines(layout=layout), "writer", prompt(layout.group("full").packing))
    for layout in layouts:
        toy = engines(layout=layout, others=[other for other in layouts if other != layout], ranks=2)
        assert [serve(toy, f"of {name}", prompt(name)).cached for name in packing.names()] == [256] * len(layouts)
    serve(engines(layout=layouts[-1]), "writer", prompt(1))
    assert serve(engines(layout=layouts[0]), "reader that cannot convert", prompt(1)).cached == 0


def test_tenants_never_share(engines: Engines) -> None:
    toy = engines()
    one, two, again = (Request(f"r{i}", prompt(1), tenant=tenant(n)) for i, n in enumerate((1, 2, 1)))
    toy.run(one)
    toy.run(two)
    toy.flush()
    toy.run(again)
    assert (two.cached, again.cached) == (0, 256)
    assert serve(toy, "of the default tenant", prompt(1)).cached == 0


def test_tenants_that_are_not_in_use_make_room(
    node: Process, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenancy, "_TENANTS", 2)
    monkeypatch.setattr(worker, "_CREWS", 2)
    toy = engines(pages=200)
    for turn in range(2):
        for i in range(5):
            request = Request(f"r{turn} {i}", prompt(1), tenant=tenant(i))
            toy.run(request)
            toy.flush()
            assert request.cached == 256 * turn
    with Client(node.path) as client:
        eventually(lambda: sum(c.sessions for c in client.status().node.clients) == 2)
    assert len(toy.workers[0]._workers) == 2
    together = [Request(f"together {i}", prompt(1), tenant=tenant(i)) for i in range(5)]
    toy.run(*together)
    assert [r.cached for r in together] == [256] * 5, "those that are in use all stay"


# -- wishes ---------------------------------------------------------------------------------------------------


def test_a_request_may_ask_to_leave_no_trace_or_to_be_computed(engines: Engines) -> None:
    toy = engines()
    serve(toy, "secret", prompt(1), Wishes(no_store=True))
    assert serve(toy, "after it", prompt(1)).cached == 0
    assert serve(toy, "computed", prompt(1), Wishes(no_load=True)).cached == 0
    assert serve(toy, "loaded", prompt(1)).cached == 256


def test_blocks_live_no_longer_than_asked_for(engines: Engines) -> None:
    toy = engines()
    serve(toy, "short", prompt(1), Wishes(ttl=0.01))
    eventually(lambda: serve(toy, "later", prompt(1), Wishes(no_store=True)).cached == 0)


@pytest.mark.parametrize(("wishes", "kept"), [(Wishes(), 0), (Wishes(priority=50), 256), (Wishes(pin=True), 256)])
def test_what_is_wanted_more_outlasts_the_rest(tmp_path: Path, wishes: Wishes, kept: int) -> None:
    node = Process(tmp_path, KVTIDE_DRAM_BUDGET="2MiB", KVTIDE_DRAM_SEGMENT="1MiB", KVTIDE_NVME_PATH="")
    toy = Toy(lambda: Client(node.path))
    serve(toy, "wanted", prompt("wanted"), wishes)
    for i in range(60):
        serve(toy, f"flood {i}", prompt(i))
    assert serve(toy, "again", prompt("wanted")).cached == kept
    toy.close()
    node.kill()


# -- speed ----------------------------------------------------------------------------------------------------


def test_the_speed_of_the_engine_is_that_of_its_large_steps(engines: Engines) -> None:
    toy = engines()
    half: Scheduler = toy.scheduler
    assert half.speed is None
    assert half.step([], 100).number == 0, "a small step takes as long as one token"
    first, second = half.step([], 1000).number, half.step([], 1000).number
    toy.clock.advance(2)
    half.computed(0)  # of a step without a number, which came first
    assert half.speed is None
    half.computed(second)
    half.computed(first)
    half.computed(first)
    assert half.speed == pytest.approx(500)


def test_after_other_weights_nothing_of_before_answers(engines: Engines) -> None:
    toy = engines()
    serve(toy, "before", prompt(1))
    toy.scheduler.forget()
    assert serve(toy, "after", prompt(1)).cached == 0
    assert serve(toy, "again", prompt(1)).cached == 256
