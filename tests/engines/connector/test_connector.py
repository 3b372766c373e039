"""The scheduler and the workers of a connector over a real node: what is loaded, what is stored, and for whom.

The toy engine compares every byte that a request has with what it should be."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtide.block import Group, Kind, Layout
from kvtide.engines.connector import node_thread, scheduler, sessions, store_planner, worker
from kvtide.engines.connector.request import Prompt
from kvtide.engines.connector.request_options import RequestOptions, read_options
from kvtide.engines.connector.scheduler import Scheduler
from kvtide.engines.connector.store_planner import StorePlanner
from kvtide.engines.paged import packing
from kvtide.errors import ConfigError
from kvtide.index.keys import DEFAULT_TENANT, Model, Tenant
from kvtide.node import protocol as p
from kvtide.node.client.client import Client
from kvtide.node.client.link import NodeLink
from kvtide.plan.prefill import PrefillCost
from kvtide.store.session import Session
from tests.engines.connector.conftest import Engines, windows
from tests.engines.connector.toy import Request, Toy
from tests.node.serving import Process, eventually

BLOCK = 64


def prompt(name: object, tokens: int = 300) -> list[int]:
    return random.Random(repr(name)).choices(range(50_000), k=tokens)


def tenant(number: int) -> Tenant:
    return Tenant(f"tenant {number}", bytes([number]) * 32)


def serve(toy: Toy, name: str, tokens: list[int], options: RequestOptions | None = None) -> Request:
    """Serve one request, and let the store have what it computed."""
    request = Request(name, list(tokens), options=options or RequestOptions())
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


def test_the_first_request_waits_for_no_session_to_be_opened(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a starved machine that took half of the time that a first lookup may take."""
    opened: list[p.Operation] = []
    ask = NodeLink.ask_one

    def spy(self: NodeLink, operation: p.Operation) -> Any:
        answer = ask(self, operation)
        if isinstance(operation, p.Open | p.Invite):
            opened.append(operation)
        return answer

    monkeypatch.setattr(NodeLink, "ask_one", spy)
    toy = engines()
    eventually(lambda: any(isinstance(operation, p.Open) for operation in opened))
    toy.flush()
    before = list(opened)
    serve(toy, "first", prompt(1))
    assert opened == before


def test_after_a_restart_of_the_node_it_comes_from_disk(node: Process, engines: Engines) -> None:
    toy = engines()
    serve(toy, "first", prompt(1))
    with Client(node.path) as client:
        assert client.flush(60)
    node.stop()
    node.start()
    again: list[Request] = []

    def hit() -> bool:
        again.append(serve(toy, "again", prompt(1), RequestOptions(no_store=True)))
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
        serve(toy, "part", whole[: own + 1], RequestOptions(no_load=True, no_store=True))
        found = serve(toy, "rest", whole)
        assert (found.own, found.cached) == (own, 256 - own)


def test_a_step_of_more_blocks_than_the_node_reserves_at_a_time_is_stored_whole(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    reserve = StorePlanner._named

    def spy(self: StorePlanner, wanted: Any) -> Any:
        asked.append(wanted.stop - wanted.start)
        return reserve(self, wanted)

    monkeypatch.setattr(StorePlanner, "_named", spy)
    monkeypatch.setattr(store_planner, "RESERVED", 3)
    toy = engines(chunk=1000)
    serve(toy, "first", prompt(1, 10 * BLOCK + 1))
    assert serve(engines(), "same", prompt(1, 10 * BLOCK + 1)).cached == 10 * BLOCK
    assert asked == [3, 3, 3, 1]


def test_generated_tokens_are_stored_too(engines: Engines) -> None:
    toy = engines()
    request = Request("first", prompt(1, 70), new=prompt(2, 80))
    toy.run(request)
    toy.flush()
    assert serve(toy, "next turn", prompt(1, 70) + prompt(2, 80) + prompt(3)).cached == 128


def test_where_the_node_has_less_memory_a_block_is_stored_when_the_engine_has_used_it_again(
    node: Process, engines: Engines
) -> None:
    with Client(node.path) as client:
        budget = client.statistics().tiers["dram"].budget
    toy, other = engines(pool=budget, prefix_cache=True), engines(pool=budget - 1)
    serve(toy, "first", prompt(1))
    assert serve(other, "early", prompt(1), RequestOptions(no_store=True)).cached == 0
    serve(toy, "second", prompt(1, 256) + prompt(2))
    assert serve(other, "late", prompt(1)).cached == 256
    serve(other, "once", prompt(3))
    assert serve(other, "again", prompt(3)).cached == 256, "this one's own pool is smaller than the node's"


def test_a_preempted_request_is_resumed_from_the_store(engines: Engines) -> None:
    toy = engines(chunk=64)
    request = Request("preempted", prompt(1), options=RequestOptions(explain=True))
    toy.add(request)
    while request.computed < 192:
        toy.step()
    toy.flush()
    toy.preempt(request)
    toy.run()
    assert request.cached >= 128
    # of the lookup after the preemption: the first one found nothing
    assert request.explanation is not None
    assert request.explanation["hits"] == {"dram": request.cached // BLOCK}
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


def test_a_prompt_that_is_nowhere_is_looked_up_with_two_requests(
    node: Process, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many packings the engine can read: it waits for each request."""
    layouts = [
        Layout.attention(layers=2, heads=2, head_dim=32, block_tokens=BLOCK, packing=name) for name in packing.names()
    ]
    toy = engines(layout=layouts[0], others=layouts[1:])
    serve(toy, "which opens the sessions", prompt(1))
    sent = requests_of(monkeypatch)
    serve(toy, "new", prompt(2))
    assert [[type(operation) for operation in some] for some in sent] == [[p.Match], [p.Find] * (len(layouts) - 1)]
    with Client(node.path) as client:
        assert client.statistics().planner.prompts == 2


def requests_of(monkeypatch: pytest.MonkeyPatch) -> list[list[p.Operation]]:
    """The lookups and searches that are sent from now on, as they are sent together."""
    sent: list[list[p.Operation]] = []
    ask = NodeLink.ask

    def noted(link: NodeLink, operations: list[p.Operation]) -> list[p.Answer]:
        if any(isinstance(operation, p.Match | p.Find | p.Absent) for operation in operations):
            sent.append(list(operations))
        return ask(link, operations)

    monkeypatch.setattr(NodeLink, "ask", noted)
    return sent


def test_prompts_that_arrive_together_are_searched_for_together(
    node: Process, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine waits for one request, whatever their number; those that are not found are counted too."""
    plain, vec = (
        Layout.attention(layers=2, heads=2, head_dim=32, block_tokens=BLOCK, packing=name) for name in ("plain", "vec")
    )
    serve(engines(layout=vec), "of another packing", prompt("vec"))
    toy = engines(layout=plain, others=[vec], pages=128)
    serve(toy, "of its own", prompt("plain"))
    sent = requests_of(monkeypatch)
    many = {name: Request(name, prompt(name)) for name in ("plain", "vec", "a", "b", "c")}
    toy.run(*many.values(), Request("shorter than a block", prompt(1, BLOCK - 1)))
    toy.flush()
    cached = {name: request.cached for name, request in many.items()}
    assert cached == {"plain": 256, "vec": 256, "a": 0, "b": 0, "c": 0}
    assert [type(operation) for operation in sent[0]] == [p.Absent] * 2 * len(many)
    matches = [operation for some in sent for operation in some if isinstance(operation, p.Match)]
    assert len(matches) == 3, "of the one that is in its own packing, and of the other in both"
    with Client(node.path) as client:
        planned = client.statistics().planner
    assert planned.prompts == 2 + len(many) + 1, "one is counted in both packings"
    assert (planned.blocks["dram"], planned.blocks["missed"]) == (8, 2 * 4 + 3 * 4 + 4)
    again = [Request(f"{name} again", prompt(name)) for name in many]
    toy.run(*again)
    assert [request.cached for request in again] == [256] * len(many)


def test_one_request_alone_is_looked_up_at_once(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = engines()
    serve(toy, "writer", prompt(1))
    sent = requests_of(monkeypatch)
    assert serve(toy, "reader", prompt(1)).cached == 256
    assert [type(operation) for some in sent for operation in some] == [p.Match]


def test_a_search_is_of_few_tokens_and_of_one_tenant_and_valid_for_a_moment(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = engines(pages=256)
    serve(toy, "which opens the sessions", prompt("any"))
    monkeypatch.setattr(scheduler, "_SEARCH_TOKENS", 2 * 300 + 1)
    sent = requests_of(monkeypatch)
    toy.add(Request("0", prompt(0)))
    toy.add(Request("of another", prompt(0), tenant=tenant(1)))
    for i in range(1, 4):
        toy.add(Request(f"{i}", prompt(i)))
    eventually(lambda: toy.scheduler.matched("0", 0) == 0)
    assert [len(some) for some in sent] == [2], "the third would be too many"
    assert toy.scheduler.matched("1", 0) == 0, "it was searched for with the first"
    eventually(lambda: toy.scheduler.matched("2", 0) == 0)
    assert [len(some) for some in sent] == [2, 2]
    serve(engines(), "of another engine", prompt(3))
    toy.clock.advance(1)
    last = toy.requests[-1]
    toy.run()
    assert last.cached == 256, "it was stored after the search"
    assert sum(isinstance(operation, p.Absent) for some in sent for operation in some) == 4, "none is repeated"


def test_answers_that_are_late_are_used_however_long_a_step_takes(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search and the lookup each have the request's time limit."""
    toy = engines(pages=128)
    for i in range(4):
        serve(toy, f"writer {i}", prompt(i))
    monkeypatch.setattr(node_thread, "_MOMENT", 0.0)
    monkeypatch.setattr(Scheduler, "prefill", PrefillCost(1e-6, 0.0))
    many = [Request(f"{i}", prompt(i)) for i in range(4)]
    for request in many:
        toy.add(request)
    while toy.requests:
        toy.step()
        for r in toy.scheduler._requests.values():
            for answer in (r.searched, r.asked):
                if answer is not None:
                    answer.result(60)
        toy.clock.advance(0.25)  # longer than the limit of 0.2 s
    assert [request.cached for request in many] == [256] * 4


def test_what_was_absent_is_counted_once_though_its_request_is_preempted(node: Process, engines: Engines) -> None:
    toy = engines(pages=128, chunk=BLOCK)
    many = [Request(f"{i}", prompt(i)) for i in range(2)]
    for request in many:
        toy.add(request)
    while many[0].computed < 3 * BLOCK:
        toy.step()
    toy.flush()
    toy.preempt(many[0])
    toy.run()
    assert many[0].cached >= 2 * BLOCK
    with Client(node.path) as client:
        planned = client.statistics().planner
    assert (planned.prompts, planned.blocks["missed"]) == (3, 8 + 4 - many[0].cached // BLOCK)
    assert planned.blocks["dram"] == many[0].cached // BLOCK


def test_a_request_whose_adapter_must_be_read_keeps_no_other_waiting(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = engines()
    serve(toy, "writer", prompt(1))
    sent = requests_of(monkeypatch)
    slow = Prompt("slow", prompt(2), list, DEFAULT_TENANT, RequestOptions(), slow_extras=True)
    toy.scheduler.arrived(slow)
    assert serve(toy, "reader", prompt(1)).cached == 256
    assert [type(operation) for some in sent for operation in some] == [p.Match]
    toy.scheduler.finished("slow")


def test_blocks_that_are_just_being_written_are_waited_for_by_prompts_that_arrive_together(
    node: Process, engines: Engines
) -> None:
    toy = engines()
    with Client(node.path) as client, client.session(Model(toy.layout, "given:toy")) as session:
        reservation = session.reserve(prompt(1))
        waits, new = Request("waits", prompt(1)), Request("new", prompt(2))
        for request in (waits, new):
            toy.add(request)
        while new in toy.requests:
            toy.step()
        assert waits in toy.requests
        assert not waits.pages
        reservation.abort()
        toy.run()
    assert (waits.cached, new.cached) == (0, 0)


def test_a_node_that_knows_no_search_is_asked_for_each_prompt(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p, "ABSENT", "which this node does not announce")
    toy = engines()
    serve(toy, "writer", prompt(1))
    sent = requests_of(monkeypatch)
    many = [Request(f"{i}", prompt(i)) for i in range(3)]
    toy.run(*many)
    assert [request.cached for request in many] == [0, 256, 0]
    assert {type(operation) for some in sent for operation in some} == {p.Match}


@pytest.mark.parametrize(("own", "other"), [(0, 1), (0, 4), (1, 4), (3, 4), (4, 1), (4, 4)])
def test_the_longest_prefix_of_all_packings_is_loaded(engines: Engines, own: int, other: int) -> None:
    plain, vec = (
        Layout.attention(layers=2, heads=2, head_dim=32, block_tokens=BLOCK, packing=name) for name in ("plain", "vec")
    )
    for layout, blocks in ((plain, own), (vec, other)):
        serve(engines(layout=layout), f"writer of {blocks}", prompt(1)[: blocks * BLOCK + 1])
    assert serve(engines(layout=plain, others=[vec]), "reader", prompt(1)).cached == BLOCK * max(own, other)


def test_another_packing_is_searched_for_in_shared_storage(tmp_path: Path) -> None:
    plain, vec = (
        Layout.attention(layers=2, heads=2, head_dim=32, block_tokens=BLOCK, packing=name) for name in ("plain", "vec")
    )
    nodes = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        nodes.append(Process(tmp_path / name, KVTIDE_NVME_PATH="", KVTIDE_FILES_PATH=str(tmp_path / "shared")))
    one, other = nodes
    writer = Toy(lambda: Client(one.path), layout=vec)
    serve(writer, "writer", prompt(1))
    with Client(one.path) as client:
        assert client.flush(60)
    reader = Toy(lambda: Client(other.path), layout=plain, others=[vec])
    found: list[int] = []

    def hit() -> bool:
        found.append(serve(reader, f"reader {len(found)}", prompt(1), RequestOptions(no_store=True)).cached)
        return found[-1] > 0

    eventually(hit)
    assert found[-1] == 256, "one search finds all of it"
    for toy in (writer, reader):
        toy.close()
    for node in nodes:
        node.kill()


def test_a_window_in_another_packing_is_found_without_its_first_blocks(node: Process, engines: Engines) -> None:
    plain, vec = (
        Layout((Group("window", Kind.WINDOW, 2, 4, 32, "bfloat16", window=40, packing=name),), BLOCK)
        for name in ("plain", "vec")
    )
    serve(engines(layout=vec), "writer", prompt(1))
    with Client(node.path) as client:
        session = client.session(Model(vec, "given:toy"))
        session.drop(prompt(1)[:BLOCK])
        assert session.find(prompt(1)) == [False, True, True, True]
    assert serve(engines(layout=plain, others=[vec]), "reader", prompt(1)).cached == 256


def test_a_converted_prefix_is_stored_again_only_for_what_follows_it(node: Process, engines: Engines) -> None:
    layouts = [
        Layout.attention(layers=2, heads=2, head_dim=32, block_tokens=BLOCK, packing=name) for name in ("plain", "vec")
    ]
    serve(engines(layout=layouts[0]), "writer", prompt(1))
    toy = engines(layout=layouts[1], others=layouts[:1])
    with Client(node.path) as client:
        before = client.statistics().tiers["dram"].blocks
        assert [serve(toy, f"reader {i}", prompt(1)).cached for i in range(2)] == [256, 256]
        assert client.statistics().tiers["dram"].blocks == before
    assert serve(toy, "next turn", prompt(1) + prompt(2)).cached == 256
    assert serve(toy, "turn after it", prompt(1) + prompt(2) + prompt(3)).cached == 576


def test_a_packing_that_cannot_be_converted_is_a_miss(engines: Engines) -> None:
    layouts = [
        Layout.attention(layers=2, heads=2, head_dim=32, block_tokens=BLOCK, packing=name) for name in ("plain", "vec")
    ]
    serve(engines(layout=layouts[-1]), "writer", prompt(1))
    assert serve(engines(layout=layouts[0]), "reader that cannot convert", prompt(1)).cached == 0


# -- what a prefix needs --------------------------------------------------------------------------------------


WINDOWS = {
    "a few tokens": windows(10),
    "a page and one": windows(17),
    "less than a block": windows(48),
    "a block": windows(64),
    "more than a block": windows(100),
    "several": windows(20, 130),
    "no full attention": Layout((Group("window", Kind.WINDOW, 2, 4, 8, "bfloat16", window=40),), BLOCK),
}


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("chunk", [50, 300])
def test_a_window_is_there_wherever_a_later_prompt_may_branch_off(engines: Engines, kind: str, chunk: int) -> None:
    """However the first prompt was computed, its generated tokens too."""
    toy = engines(layout=WINDOWS[kind], chunk=chunk)
    toy.run(Request("first", prompt(1, 200), new=prompt(2, 130)))
    toy.flush()
    said = prompt(1, 200) + prompt(2, 130)
    for same in range(60, 330, 30):
        later = serve(toy, f"{same}", said[:same] + prompt(same, 30), RequestOptions(no_store=True))
        assert later.cached == same // BLOCK * BLOCK


def test_of_a_prompt_that_is_all_there_a_window_leaves_the_last_block(engines: Engines) -> None:
    """Its last token is computed, and may see one that the window after it does not."""
    toy = engines(layout=windows(17))
    serve(toy, "first", prompt(1, 256))
    assert serve(toy, "same", prompt(1, 256)).cached == 192
    assert serve(toy, "longer", [*prompt(1, 256), 1]).cached == 256


@pytest.mark.parametrize(("reused", "kept"), [(256, 320), (208, 256), (144, 192)])
def test_a_window_that_the_engine_has_used_again_is_stored_at_the_next_border(
    engines: Engines, reused: int, kept: int
) -> None:
    """It has passed over the pages before the border that came first."""
    toy, other = engines(layout=windows(100), pool=math.inf, prefix_cache=True), engines(layout=windows(100))
    serve(toy, "first", prompt(1))
    assert serve(other, "early", prompt(1), RequestOptions(no_store=True)).cached == 0
    second = serve(toy, "second", prompt(1, reused) + prompt(2, 100))
    assert second.own == reused
    assert serve(other, "late", prompt(1, reused) + prompt(2, 100)).cached == kept


def test_what_a_window_has_passed_over_is_stored_as_zeros(node: Process, engines: Engines) -> None:
    """And not as what some other block left in its slot."""
    layout = windows(10)
    serve(engines(layout=layout, chunk=16), "first", prompt(1, 70))
    with (
        Client(node.path) as client,
        client.session(Model(layout, "given:toy")) as session,
        session.match(prompt(1, 70)) as match,
    ):
        (block,) = session.load(match).wait().views["window10"]
        sections = np.frombuffer(block, np.int16).reshape(2, 4, BLOCK // 16, -1)  # of 4 heads, without padding
        assert not sections[:, :, :2].any()
        assert sections[:, :, 2:].all()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_latent_is_written_by_one_rank_and_read_by_all(engines: Engines, ranks: int) -> None:
    layout = Layout((Group("mla", Kind.MLA, 3, 1, 36, "bfloat16"),), BLOCK)
    serve(engines(layout=layout, ranks=ranks), "writer", prompt(1))
    for readers in (1, 2, 4):
        found = serve(
            engines(layout=layout, ranks=readers), "reader", prompt(1) + prompt(2), RequestOptions(no_store=True)
        )
        assert found.cached == 256


# -- tenants --------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(sessions, "_TENANTS", 2)
    monkeypatch.setattr(worker, "_GROUPS", 2)
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


def test_tenants_with_pins_make_room_at_last(
    node: Process, engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions, "_TENANTS", 1)
    monkeypatch.setattr(sessions, "_MOST", 2)
    toy = engines(pages=200)
    for i in range(4):
        toy.run(Request(f"r{i}", prompt(1), tenant=tenant(i), options=RequestOptions(pin=True)))
        toy.flush()
    with Client(node.path) as client:
        eventually(lambda: sum(c.sessions for c in client.status().node.clients) == 2)
    assert caplog.text.count("unpins the blocks of the least recently used tenant") == 2


# -- options of requests ---------------------------------------------------------------------------------------


def test_a_request_may_ask_to_leave_no_trace_or_to_be_computed(engines: Engines) -> None:
    toy = engines()
    serve(toy, "secret", prompt(1), RequestOptions(no_store=True))
    assert serve(toy, "after it", prompt(1)).cached == 0
    assert serve(toy, "computed", prompt(1), RequestOptions(no_load=True)).cached == 0
    assert serve(toy, "loaded", prompt(1)).cached == 256


def test_what_a_request_says_of_its_next_use_reaches_the_node_at_its_end(node: Process, engines: Engines) -> None:
    toy = engines()
    serve(toy, "agent", prompt(1), RequestOptions(turn="tool", returns_in=18))
    serve(toy, "user", prompt(2), RequestOptions(turn="end"))
    serve(toy, "nobody knows", prompt(3))
    with Client(node.path) as client:

        def hints() -> list[int]:
            counts = client.statistics().counts
            names = ("hints: the turn ended in a tool", "hints: the turn ended", "hints: expected back")
            return [counts.get(name, 0) for name in names]

        eventually(lambda: hints() == [1, 1, 1])
    assert serve(toy, "back", prompt(1)).cached == 256


@pytest.mark.parametrize("wrong", [{"turn": "tools"}, {"turn": 7}, {"returns_in": 0}, {"returns_in": "18"}])
def test_a_hint_that_cannot_be_costs_nothing_but_a_warning(
    wrong: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    assert read_options({"ttl": 5, "turn": "tool", "returns_in": 18}) == RequestOptions(
        ttl=5, turn="tool", returns_in=18
    )
    assert not caplog.messages
    assert read_options({"ttl": 5, **wrong}) == RequestOptions(ttl=5)
    (said,) = caplog.messages
    assert "is ignored" in said
    with pytest.raises(ConfigError, match="returns_inn"):
        read_options({"returns_inn": 5})


def test_blocks_live_no_longer_than_asked_for(engines: Engines) -> None:
    toy = engines()
    serve(toy, "short", prompt(1), RequestOptions(ttl=0.01))
    eventually(lambda: serve(toy, "later", prompt(1), RequestOptions(no_store=True)).cached == 0)


@pytest.mark.parametrize(
    ("options", "kept"), [(RequestOptions(), 0), (RequestOptions(priority=50), 256), (RequestOptions(pin=True), 256)]
)
def test_what_is_wanted_more_outlasts_the_rest(tmp_path: Path, options: RequestOptions, kept: int) -> None:
    node = Process(tmp_path, KVTIDE_DRAM_BUDGET="2MiB", KVTIDE_DRAM_SEGMENT="1MiB", KVTIDE_NVME_PATH="")
    toy = Toy(lambda: Client(node.path))
    serve(toy, "wanted", prompt("wanted"), options)
    for i in range(60):
        serve(toy, f"flood {i}", prompt(i))
    assert serve(toy, "again", prompt("wanted")).cached == kept
    toy.close()
    node.kill()


def test_pins_leave_most_of_the_memory_to_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Process(tmp_path, KVTIDE_DRAM_BUDGET="2MiB", KVTIDE_DRAM_SEGMENT="1MiB", KVTIDE_NVME_PATH="")
    toy = Toy(lambda: Client(node.path))
    most = (2 << 20) // 4 // toy.layout.geometry["full"].footprint
    for i in range(most // 4):
        serve(toy, f"pinned {i}", prompt(i), RequestOptions(pin=True))
        serve(toy, f"again {i}", prompt(i), RequestOptions(pin=True))
    assert "pins" not in caplog.text, "who pins twice takes no more"
    with Client(node.path) as client:
        assert client.statistics().pinned == most
        longer = prompt(0)[:256] + prompt("more")
        serve(toy, "too much", longer, RequestOptions(pin=True))
        assert f"pins 4 of the {len(longer) // BLOCK} blocks of request too much" in caplog.text
        assert client.statistics().pinned == most
    toy.close()
    node.kill()


# -- speed ----------------------------------------------------------------------------------------------------


def test_the_speed_of_the_engine_is_that_of_its_large_steps(engines: Engines) -> None:
    toy = engines()
    half: Scheduler = toy.scheduler
    speeds = [half.prefill]
    assert half.step([], [(0, 50), (700, 750)]).number == 0, "a small step takes as long as one token"
    first, second = half.step([], [(0, 1000)]).number, half.step([], [(0, 500), (0, 500)]).number
    toy.clock.advance(2)
    half.computed(0)  # of a step without a number, which came first
    speeds.append(half.prefill)
    assert speeds == [None, None]
    half.computed(second)
    half.computed(first)
    half.computed(first)
    assert half.prefill is not None
    assert half.prefill.speed(0, 1000) == pytest.approx(500)


def test_an_engine_that_plans_ahead_is_not_taken_for_a_slow_one(engines: Engines) -> None:
    toy = engines()
    half: Scheduler = toy.scheduler
    numbers = [half.step([], [(i * 1000, i * 1000 + 1000)]).number for i in range(2)]
    for _ in range(20):  # the next one is planned when the one before has only begun
        toy.clock.advance(2)
        half.computed(numbers.pop(0))
        numbers.append(half.step([], [(0, 1000)]).number)
    assert half.prefill is not None
    assert half.prefill.speed(0, 1000) == pytest.approx(500)


def test_the_end_of_a_long_prompt_is_known_to_cost_more_than_its_beginning(engines: Engines) -> None:
    toy, truth = engines(), PrefillCost(1e-4, 1e-8)
    half: Scheduler = toy.scheduler
    for start in range(0, 64_000, 2000):
        number = half.step([], [(start, start + 2000)]).number
        toy.clock.advance(truth.seconds(start, start + 2000))
        half.computed(number)
    assert half.prefill is not None
    assert half.prefill.seconds(0, 128_000) == pytest.approx(truth.seconds(0, 128_000), rel=0.01)


def test_after_other_weights_nothing_of_before_answers(engines: Engines) -> None:
    toy = engines()
    serve(toy, "before", prompt(1))
    toy.scheduler.forget()
    assert serve(toy, "after", prompt(1)).cached == 0
    assert serve(toy, "again", prompt(1)).cached == 256


def test_a_request_that_asks_is_told_why_its_blocks_were_hits_or_misses(engines: Engines) -> None:
    toy, ask = engines(), RequestOptions(explain=True)
    assert serve(toy, "silent", prompt(1)).explanation is None
    told = serve(toy, "both-1", prompt(1) + prompt(2), ask).explanation
    assert told is not None
    assert (told["request"], told["hits"], told["tokens"]) == ("both-1", {"dram": 4}, 600)
    # the last block of a prompt need not be whole
    (missed,) = list(told["misses"].values())  # type: ignore[attr-defined]
    assert missed == 600 // BLOCK - 4
    at_once = [Request(f"new {i}", prompt(i, 200), options=ask) for i in (7, 8)]
    toy.run(*at_once)  # these are searched for together
    assert [list((r.explanation or {})["hits"]) for r in at_once] == [[], []]  # type: ignore[call-overload]
    assert read_options({"explain": True}).explain


def test_an_explanation_that_fails_costs_no_hit_and_delays_no_load(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, ask, asked = engines(), RequestOptions(explain=True), list[int]()
    serve(toy, "first", prompt(1))

    def fails(session: Session, request: str) -> None:
        asked.append(len(session._rights))
        raise ValueError("of a newer node")

    monkeypatch.setattr(Session, "explain_request", fails)
    served = serve(toy, "second", prompt(1), ask)
    assert (served.cached, served.explanation) == (256, None)
    serve(toy, "third", prompt(9), ask)
    assert asked[0] > 0, "the offer is in use when the node is asked"
