"""All checks of a vLLM deployment, ordered so that each can use the results of those before it.

Nothing is changed and nothing is started; to measure a disk, a quarter of a GiB is written beside the tier and removed.
vLLM and torch need not be installed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtide.config import Config
from kvtide.doctor import disk, engine, flags, gain, host, model, node
from kvtide.doctor.advice import AdviceRequest, Progress, advise
from kvtide.doctor.advice_findings import findings
from kvtide.doctor.finding import Finding, error, ok, warning
from kvtide.errors import KvtideError
from kvtide.formatting import size
from kvtide.store.node_statistics import Status

__all__ = ["Deployment", "examine"]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The known properties of a deployment. See ``kvtide doctor vllm --help``."""

    model: str
    url: str = ""
    transfer: str = ""
    """vLLM's --kv-transfer-config."""
    ranks: int = 1
    dtype: str = "auto"
    kv_dtype: str = "auto"
    prefill: float | None = None
    """Tokens per second; None: take the running engine's."""
    disk_speed: int | None = None
    """Bytes per second; None: measure it."""
    record: Path | None = None
    """A recording of the node's requests; None: the one that it writes."""
    seconds: float = 120.0
    """How long to replay recorded requests, about."""


def examine(given: Deployment, progress: Progress = lambda _: lambda _: None) -> Iterator[Finding]:
    """Run all checks that are possible."""
    running = None
    if given.url:
        try:
            running = engine.ask(given.url)
        except KvtideError as e:
            yield error("engine", str(e), "see whether it runs; leave --url out to look at a plan")
    yield from engine.check(running)
    try:
        config = flags.settings(given.transfer)
    except KvtideError as e:
        yield error("flags", str(e), "mend it; a KvtideTier under OffloadingConnector is not looked at here")
        return
    if not given.transfer:
        yield ok(
            "flags", "no --kv-transfer-config given: looking at the settings in force here", f"vLLM wants {flags.FLAG}"
        )
    status, found = node.ask(config)
    yield found
    if status is not None:
        yield from node.check(config, status)
    yield from node.domains(config, status)
    remote = status is not None or bool(config.engine.address)
    yield from host.check(config, given.ranks, here=not remote)
    layout = None
    try:
        folder = model.folder_of(given.model)
        kv_dtype = given.kv_dtype if running is None else running.cache.get("cache_dtype", given.kv_dtype)
        layout = model.layout_of(folder, given.dtype, kv_dtype)
        if running is not None and status is not None and given.dtype == kv_dtype == "auto":
            # vLLM does not tell its --dtype over HTTP, and the node knows it from the engine's requests
            layout = model.layout_of(folder, node.dtype_in_use(status, layout) or "auto", kv_dtype)
        yield from model.check(folder, layout, given.ranks, config.engine.weights_id)
    except KvtideError as e:
        yield error("model", str(e), "serve this one without kvtide, or give --model a folder with its config.json")
    if layout is not None and status is not None:
        yield from node.sharing(status, layout)
    if layout is not None and running is not None and running.pool:
        dram = status.store.tiers["dram"].budget if status is not None else config.dram.budget
        yield gain.storing(config, layout, running.pool, dram)
    speed = yield from _disk(given, config, status)
    if layout is not None and speed is not None:
        yield from gain.check(layout, speed, _prefill(given, running) or config.plan.prefill_tokens_per_second or None)
    yield from _changes(given, running, status, progress)


def _prefill(given: Deployment, running: engine.Running | None) -> float | None:
    return given.prefill or (running.prefill if running is not None else None)


def _changes(
    given: Deployment, running: engine.Running | None, status: Status | None, progress: Progress
) -> Iterator[Finding]:
    """The changes of the node's settings that would bring most, if its requests are recorded."""
    if status is None:
        if given.record is not None:
            yield warning("changes", "no node is running, and they depend on its settings", "start it, and look again")
        return
    if status.store.recorder is None and given.record is None:
        return
    how = f"kvtide node --socket {status.node.path} --record FILE"
    wanted = AdviceRequest(record=given.record, prefill=_prefill(given, running) or 0.0, seconds=given.seconds, how=how)
    try:
        yield from findings(advise(status, wanted, progress))
    except KvtideError as e:
        yield warning("changes", str(e), "run kvtide doctor node for them alone")


def _disk(given: Deployment, config: Config, status: Status | None) -> Generator[Finding, None, float | None]:
    """Returns the read speed in bytes per second, if known."""
    nvme = config.nvme
    lane = status.store.lanes.get("nvme") if status is not None else None
    if lane is None and (status is not None or not nvme.path):
        yield warning(
            "disk",
            "there is none: blocks evicted from DRAM are lost, and all blocks when the node stops",
            "set nvme.path",
        )
        return given.disk_speed
    if status is None and not config.engine.address:
        yield from disk.check(nvme)
    speed: float
    if given.disk_speed is not None:
        speed, how = given.disk_speed, "as given"
    elif lane is not None and lane.read_speed.measured:
        speed, how = lane.read_speed.bytes_per_second, "as the node has measured"
    elif not nvme.path:
        yield warning("disk speed", "not known: the node has read nothing yet", "give --disk-speed, or its nvme.path")
        return None
    else:
        try:
            speed, how = disk.measure(nvme), "by direct I/O, just now"
        except OSError as e:
            yield warning("disk speed", f"cannot be measured ({e.strerror})", "give --disk-speed")
            return None
    yield ok("disk speed", f"reads {size(speed)} a second, {how}")
    return speed
