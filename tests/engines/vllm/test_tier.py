"""A kvtide store under vLLM's CPU tier, when all is well and when it is not: what cannot be had is a miss, no byte is
wrong, and vLLM goes on."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvtide
from kvtide.errors import ConfigError
from kvtide.node.client.launch import open_node
from kvtide.testing.blocks import content
from tests.engines.vllm.scheduler import ROW, LookupResult, Scheduler, configured, keys, tier
from tests.node.serving import Process, eventually

SETTINGS = {"KVTIDE_NVME_STORE": "through", "KVTIDE_DRAM_BUDGET": "4MiB", "KVTIDE_DRAM_SEGMENT": "1MiB"}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Process]:
    node = Process(tmp_path, **SETTINGS)
    yield node
    node.kill()


def at(node: Process) -> dict[str, Any]:
    return {"engine": {"address": f"unix:{node.path}", "weights_id": "w"}}


@pytest.fixture
def vllm(node: Process) -> Iterator[Scheduler]:
    with Scheduler(configured(at(node))) as scheduler:
        yield scheduler


def flush(node: Process) -> None:
    with kvtide.connect(f"unix:{node.path}") as client:
        assert client.flush(60)


# -- when all is well -------------------------------------------------------------------------------------


def test_what_vllm_dropped_comes_back(vllm: Scheduler) -> None:
    vllm.keep(keys(4))
    vllm.settle()
    vllm.forget()
    assert vllm.fetch(keys(6)) == [True] * 4 + [False] * 2
    assert (vllm.failures("cascade"), vllm.failures("promotion")) == (0, 0)


def test_more_than_any_memory_holds_comes_back_after_a_restart_of_both(node: Process) -> None:
    with Scheduler(configured(at(node))) as vllm:
        for first in range(0, 64, 8):
            vllm.keep(keys(8, first))
            vllm.settle()
            flush(node)
    node.stop()
    node.start()
    with Scheduler(configured(at(node))) as vllm:
        for first in range(0, 64, 8):
            assert vllm.fetch(keys(8, first)) == [True] * 8


def test_without_an_address_a_node_is_started_and_found_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tier, "open_node", functools.partial(open_node, idle=0.5))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    settings = {"dram": {"budget": "16MiB", "segment": "2MiB"}, "node": {"client_share": 0.5}}
    start = functools.partial(configured, settings, name=str(tmp_path))
    with Scheduler(start()) as one, Scheduler(start()) as two:
        one.keep(keys(2))
        one.settle()
        assert two.fetch(keys(2)) == [True, True]
    weights.write_bytes(b"other weights")
    with Scheduler(start()) as three:
        assert three.fetch(keys(2)) == [False, False]
    eventually(lambda: not list(tmp_path.glob("kvtide-*/*.sock")))


# -- whose bytes ------------------------------------------------------------------------------------------

OTHERS: list[dict[str, Any]] = [
    {"name": "another"},
    {"dtype": "float16"},
    {"layer_names": ("0", "2")},
    {"tokens_per_block": 32},
    {"tokens_per_hash": 8},
    {"blocks_per_chunk": 2, "worker_kv_bytes_per_block": ROW // 2},
    {"kv_cache_layout": "LBNHC"},
    {"canonical_layout": True},
    {"replicated_layout": True},
    {"tp_size": 2, "world_size": 2, "worker_kv_bytes_per_block": ROW // 2},
    {"pp_size": 2, "world_size": 2, "worker_kv_bytes_per_block": ROW // 2},
]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_chunks_of_another_deployment_are_misses(node: Process, vllm: Scheduler, change: dict[str, Any]) -> None:
    vllm.keep(keys(2))
    vllm.settle()
    with Scheduler(configured(at(node), **change)) as other:
        assert other.fetch(keys(2)) == [False, False]
        other.keep(keys(2))
        other.settle()
        other.forget()
        assert other.fetch(keys(2)) == [True, True]


def test_chunks_of_other_weights_or_another_vllm_are_misses(
    node: Process, vllm: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.keep(keys(1))
    vllm.settle()
    weights = {"engine.weights_id": "v"}
    with Scheduler(configured(at(node) | weights)) as other:
        assert other.fetch(keys(1)) == [False]
    monkeypatch.setattr("vllm.__version__", "0.0")
    with Scheduler(configured(at(node))) as other:
        assert other.fetch(keys(1)) == [False]


@pytest.mark.parametrize("portable", ["is_parallelism_agnostic", "replicated_layout"])
def test_what_vllm_says_is_the_same_for_all_ranks_is_shared(node: Process, portable: str) -> None:
    copies = 1 if portable == "replicated_layout" else 2
    split = {"tp_size": 2, "world_size": 2, "worker_kv_bytes_per_block": ROW // copies}
    with (
        Scheduler(configured(at(node), **{portable: True})) as one,
        Scheduler(configured(at(node), **{portable: True}, **split)) as two,
    ):
        one.keep(keys(2))
        one.settle()
        assert two.fetch(keys(2)) == [True, True]


# -- when it is not well ----------------------------------------------------------------------------------


def test_a_node_that_was_killed_is_a_miss_until_there_is_one_again(node: Process, vllm: Scheduler) -> None:
    vllm.keep(keys(4))
    vllm.settle()
    flush(node)
    vllm.forget()
    node.kill()
    assert vllm.fetch(keys(4)) == [False] * 4
    vllm.keep(keys(2, 4))
    vllm.settle()
    assert vllm.failures("cascade") == 1
    node.start()
    eventually(lambda: vllm.fetch(keys(4)) == [True] * 4)


def test_a_node_that_hangs_keeps_nobody_waiting(node: Process, vllm: Scheduler) -> None:
    vllm.keep(keys(4))
    vllm.settle()
    vllm.forget()
    node.signal(signal.SIGSTOP)
    request = vllm.begin()
    assert vllm.manager.lookup(keys(1)[0], request) is LookupResult.RETRY, "it did not wait for the answer"
    assert vllm.fetch(keys(4)) == [False] * 4
    vllm.manager.on_request_finished(request)
    vllm.keep(keys(2, 4))
    vllm.forget()  # waits for the stores, which fail
    assert vllm.failures("cascade") == 1
    node.signal(signal.SIGCONT)
    eventually(lambda: vllm.fetch(keys(4)) == [True] * 4)


def test_a_node_that_hangs_between_the_answer_and_the_load_is_a_miss(node: Process, vllm: Scheduler) -> None:
    vllm.keep(keys(2))
    vllm.settle()
    vllm.forget()
    request = vllm.begin()

    def found() -> bool:
        results = [vllm.manager.lookup(key, request) for key in keys(2)]
        if LookupResult.RETRY in results:
            vllm.step()
        return LookupResult.RETRY not in results

    eventually(found)
    node.signal(signal.SIGSTOP)
    vllm.settle()  # the loads begin at the end of this step
    assert [vllm.manager.lookup(key, request) for key in keys(2)] == [LookupResult.MISS] * 2
    assert vllm.failures("promotion") == 1


def test_a_chunk_that_rotted_on_disk_is_a_miss_and_the_others_are_not(node: Process, vllm: Scheduler) -> None:
    vllm.keep(keys(4))
    vllm.settle()
    node.stop()
    vllm.forget()
    rotten = content(keys(4)[2], ROW).tobytes()
    for file in (node.folder / "tier").glob("*.segment"):
        data = bytearray(file.read_bytes())
        if (place := data.find(rotten)) >= 0:
            data[place + ROW // 2] ^= 1
            file.write_bytes(data)
    node.start()
    eventually(lambda: vllm.tier._store._session_host.connected)
    assert vllm.fetch(keys(4)) == [True, True, False, True]
    assert vllm.failures("promotion") == 1
    vllm.keep(keys(1, 2))  # computed again, and kept
    vllm.settle()
    vllm.forget()
    assert vllm.fetch(keys(4)) == [True] * 4


def test_a_full_store_fails_the_job_and_nothing_else(tmp_path: Path) -> None:
    node = Process(tmp_path, **SETTINGS, KVTIDE_NODE_CLIENT_SHARE="1")
    with Scheduler(configured(at(node))) as vllm, kvtide.connect(f"unix:{node.path}") as client:
        vllm.keep(keys(16))
        vllm.settle()
        other = client.session(vllm.tier._store.chunks._session.model)
        held = other.match(vllm.tier._store.chunks.prompt(keys(16)))  # all memory that there is
        assert (held.ready, held.blocks) == (True, 16)
        vllm.keep(keys(2, 100))
        vllm.settle()
        assert vllm.failures("cascade") == 1
        held.release()
        eventually(lambda: client.statistics().held == 0)
        vllm.keep(keys(2, 200))
        vllm.settle()
        assert vllm.failures("cascade") == 0
        vllm.forget()
        assert vllm.fetch(keys(2, 100) + keys(2, 200)) == [False, False, True, True]
    node.kill()


def test_a_node_that_comes_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "_OPENING", 0.01)
    engine = {"address": f"unix:{tmp_path / 'node.sock'}", "weights_id": "w"}
    with Scheduler(configured({"engine": engine})) as vllm:
        assert vllm.fetch(keys(2)) == [False, False]
        vllm.keep(keys(2))
        vllm.settle()
        assert vllm.failures("cascade") == 1
        node = Process(tmp_path, **SETTINGS)
        eventually(lambda: vllm.tier._store.chunks)
        vllm.forget()
        vllm.keep(keys(2))
        vllm.settle()
        vllm.forget()
        assert vllm.fetch(keys(2)) == [True, True]
    node.kill()


def test_the_end_waits_for_no_node_and_lets_go_of_all(node: Process) -> None:
    with Scheduler(configured(at(node))) as vllm:
        node.signal(signal.SIGSTOP)
        for first in range(0, 16, 2):
            vllm.keep(keys(2, first))
        vllm.manager.lookup(keys(1, 100)[0], vllm.begin())
        vllm.step()
    # It let go of vLLM's memory as well, or vLLM's own end would have failed.
    assert not [thread for thread in threading.enumerate() if "vllm" in thread.name]


# -- what its settings say --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"nvem": {"path": "/kv"}}, "did you mean 'nvme'"),
        ({"engine": {"adress": "unix:/kv.sock"}}, "did you mean 'address'"),
        ({"engine": {"address": "unix:/kv.sock"}}, "which weights 'model' are"),
    ],
    ids=str,
)
def test_a_mistake_in_the_settings_is_told_at_the_start(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Scheduler(configured(settings))
