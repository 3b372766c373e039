"""Any sequence of hints loses nothing, corrupts nothing and holds nothing, with a colder tier and several tenants."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide import Store, Tenant, config
from kvtide.index.index import DRAM
from kvtide.plan.usage_tracker import Turn
from kvtide.testing.clock import FakeClock
from tests.plan.small import MODEL, SLOTS, keep, prompt, right

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "load", "expect", "expect", "wait", "drop", "scan"]),
        PATHS,
        st.sampled_from([None, "tool", "end"]),
        st.sampled_from([None, 0.1, 5.0, 60.0, 1e9]),
        st.integers(0, 1),
    ),
    max_size=30,
)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, policy=st.sampled_from(["lru", "reuse", "auto"]))
def test_any_sequence_of_hints_leaves_every_byte_right_and_nothing_held(
    steps: list[tuple[str, tuple[int, ...], Turn | None, float | None, int]], policy: str
) -> None:
    clock, scanned = FakeClock(), 100
    with tempfile.TemporaryDirectory() as folder:
        tier = {"path": str(Path(folder) / "tier"), "budget": "16MiB", "segment": "1MiB", "threads": 2}
        memory = {"budget": "1MiB", "segment": "1MiB", "policy": policy}
        with Store(config.read(env={}, dram=memory, nvme=tier), clock=clock) as store:
            sessions = [store.session(MODEL), store.session(MODEL, Tenant("other", b"0" * 32))]
            for verb, path, turn, returns_in, who in steps:
                session = sessions[who]
                clock.advance(0.5)
                if verb == "store":
                    keep(session, *path)
                elif verb == "load":
                    right(session, *path)
                elif verb == "expect":
                    session.expect(prompt(*path), turn=turn, returns_in=returns_in)
                elif verb == "wait":
                    clock.advance(returns_in or 1.0)
                elif verb == "drop":
                    session.drop(prompt(*path))
                    assert right(session, *path) == 0
                else:
                    for _ in range(SLOTS):
                        scanned += 1
                        keep(session, scanned)
                for one in sessions:
                    keys = one.chain(prompt(*path)).keys(b"full")
                    with store.index.lock:
                        rows = store.index.rows(keys)
                        used = store.index.used[rows[rows > 0]]
                        assert (used[:-1] > used[1:]).all(), "leaf first"
                        for until in [store.index.until[DRAM]] if DRAM in store.index.until else []:
                            terms = until[rows[rows > 0]]
                            assert (terms[:-1] > terms[1:]).all(), "leaf first"
            for session in sessions:
                for number in range(3):
                    right(session, number, 0, 1)
                session.close()
            assert store.statistics().held == 0 or store.flush(30)
            assert store.statistics().held == 0
            assert repr(store.main.prefetcher) == "<Prefetcher 0 expected, 0 under way>"
