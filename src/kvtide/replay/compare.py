"""Replays the same tiers with every other policy for DRAM, to compare them with the configured one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import inspect, structs

from kvtide.config import Config, Dram
from kvtide.replay.run import Compared, replay
from kvtide.replay.trace import Trace

__all__ = ["compare", "policies", "with_policy"]


def policies() -> tuple[str, ...]:
    """All values of ``dram.policy``."""
    (kind,) = (field.type for field in structs.fields(Dram) if field.name == "policy")
    known: Any = inspect.type_info(kind)
    names: tuple[str, ...] = known.type.values
    return names


def with_policy(config: Config, name: str) -> Config:
    """The same configuration with that policy for DRAM."""
    return structs.replace(config, dram=structs.replace(config.dram, policy=name))


def compare(
    trace: Trace, config: Config, block: int, warm: float, progress: Callable[[str], Callable[[int], None]]
) -> Iterator[Compared]:
    """Replay, without bytes, with each policy for DRAM except the configured one.

    ``progress`` is called with a policy's name when its replay begins, and returns a callback for request numbers.
    """
    for name in policies():
        if name != config.dram.policy:
            found = replay(trace, with_policy(config, name), block, warm, best=False, progress=progress(name))
            yield Compared(name, found.hits, found.hit_rate)
