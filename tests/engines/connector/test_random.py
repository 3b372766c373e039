"""Requests come, are preempted, end and are aborted in any order, while the node answers at once, late, or not at all.

Every byte that a request has is right (the toy engine looks), every request ends, and in the end nothing is held: no
page of the engine's, no block of the node's.
"""

from __future__ import annotations

import math
import random
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvtide.block import Layout
from kvtide.engines.connector import node_thread
from kvtide.engines.connector.request_options import RequestOptions
from kvtide.index.keys import DEFAULT_TENANT, Tenant
from kvtide.node.client.client import Client
from tests.engines.connector.conftest import windows
from tests.engines.connector.toy import LAYOUT, Request, Toy
from tests.node.serving import Thread, eventually

TEXTS = [random.Random(i).choices(range(50_000), k=400) for i in range(3)]
TENANTS = [DEFAULT_TENANT, Tenant("other", b"2" * 32)]


class Engine(RuleBasedStateMachine):
    """One engine and its node."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "node.sock"
        self._moment = node_thread._MOMENT
        self._count = 0
        self._node: Thread | None = None
        self.start()

    @initialize(
        ranks=st.sampled_from([1, 2]),
        prefix_cache=st.booleans(),
        pool=st.sampled_from([0, math.inf]),
        keep=st.sampled_from([0, 40]),
        layout=st.sampled_from([LAYOUT, windows(40), windows(20, 100)]),
    )
    def begin(self, layout: Layout, **options: Any) -> None:
        pages = 48 * len(layout.groups)
        self.toy = Toy(lambda: Client(self._path), pages=pages, chunk=70, idle=0.01, layout=layout, **options)

    @rule(
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 400),
        new=st.integers(0, 80),
        tenant=st.sampled_from(TENANTS),
        options=st.sampled_from(
            [
                RequestOptions(),
                RequestOptions(),
                RequestOptions(no_store=True),
                RequestOptions(no_load=True),
                RequestOptions(max_load_ms=0),
            ]
        ),
    )
    def arrive(self, text: list[int], length: int, new: int, tenant: Tenant, options: RequestOptions) -> None:
        self._count += 1
        more = text[length : length + new]
        self.toy.add(Request(f"r{self._count}", text[:length], new=more, tenant=tenant, options=options))

    @rule(count=st.integers(1, 10))
    def work(self, count: int) -> None:
        for _ in range(count):
            self.toy.step()

    # No preconditions: what runs now depends on when the node answered.

    @rule(number=st.integers(0, 10))
    def preempt(self, number: int) -> None:
        if running := self.toy.running:
            self.toy.preempt(running[number % len(running)])

    @rule(number=st.integers(0, 10))
    def abort(self, number: int) -> None:
        if requests := sorted(self.toy.requests, key=lambda r: not r.loading):
            self.toy.abort(requests[number % len(requests)])

    @rule()
    def lose_what_is_cached(self) -> None:
        self.toy.forget()

    @rule(seconds=st.sampled_from([0.02, 0.2, 5.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.toy.clock.advance(seconds)

    @rule(seconds=st.sampled_from([0.0, 0.0005, 60.0]))
    def wait_for_answers(self, seconds: float) -> None:
        """For so long at most, from now on."""
        node_thread._MOMENT = seconds

    @rule()
    def catch_up(self) -> None:
        self.toy.flush()

    @precondition(lambda self: self._node is None)
    @rule()
    def start(self) -> None:
        dram, nvme = {"budget": "2MiB", "segment": "1MiB", "prefault": True}, {"budget": "16MiB", "segment": "1MiB"}
        self._node = Thread(self._path, dram=dram, nvme={"path": f"{self._folder.name}/tier", **nvme})
        self._node.store.dram.wait_prefault()  # what is stored must not depend on when memory is taken

    @precondition(lambda self: self._node is not None)
    @rule()
    def die(self) -> None:
        assert self._node is not None
        self._node.close()
        self._node = None

    def teardown(self) -> None:
        try:
            if hasattr(self, "toy"):
                self._end()
        finally:
            node_thread._MOMENT = self._moment
            if self._node is not None:
                self._node.close()
            self._folder.cleanup()

    def _end(self) -> None:
        self.toy.run()
        while self.toy.kept:
            self.toy.step()
        self.toy.at_rest()
        if self._node is None:
            self.start()
        with Client(self._path) as client:
            eventually(lambda: client.statistics().held == 0)
        self.toy.close()


Engine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngine = Engine.TestCase
