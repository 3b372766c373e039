"""Common settings of the store's benchmarks: how much to measure, where, and compared with what."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

import kvtide
from kvtide import config as configuration
from kvtide.benchmarks.record import Contestant
from kvtide.block import BLOCK_TOKENS
from kvtide.errors import ConfigError
from kvtide.tiers.syscalls import Disk

__all__ = [
    "MIB",
    "SMALL",
    "TINY",
    "TOKENS",
    "NoPeers",
    "Peers",
    "Settings",
    "block_sources",
    "check_free_space",
    "chosen",
    "configured",
    "environment",
    "into",
    "layout_of",
    "own_store",
    "size_name",
]

MIB = 1 << 20
TOKENS = 131_072

TINY = kvtide.Layout.attention(layers=1, heads=1, head_dim=1, dtype="uint8", block_tokens=16)
"""Blocks of one page, to measure the cost of a block without that of its bytes."""
SMALL = kvtide.Layout.attention(layers=1, heads=1, head_dim=8)
"""The same for blocks of as many tokens as an engine's."""


F = TypeVar("F")


class Peers(Protocol):
    """Other systems, each as contestants for the same tasks."""

    def match(self) -> Mapping[str, Contestant]: ...

    def dram(self, block: int, count: int) -> Mapping[str, Contestant]: ...

    def disk(self, block: int, count: int, folder: Path) -> Mapping[str, Contestant]: ...

    def server_match(self) -> Mapping[str, Contestant]:
        """Through the other system's server; CPU time is that of both processes."""

    def server_copies(self, clients: int, block: int, count: int) -> Mapping[str, Contestant]:
        """Through the other system's server: ``count`` blocks for each of that many clients."""


class NoPeers:
    """No other systems: only kvtide and the hardware."""

    def match(self) -> Mapping[str, Contestant]:
        return {}

    def dram(self, block: int, count: int) -> Mapping[str, Contestant]:
        return {}

    def disk(self, block: int, count: int, folder: Path) -> Mapping[str, Contestant]:
        return {}

    def server_match(self) -> Mapping[str, Contestant]:
        return {}

    def server_copies(self, clients: int, block: int, count: int) -> Mapping[str, Contestant]:
        return {}


@dataclass(frozen=True)
class Settings:
    """How much to measure, where, and how to report progress."""

    quick: bool
    folder: Path
    """On the disk that is to be measured."""
    command: str
    progress: Callable[[str], None]
    peers: Peers

    def rounds(self, full: int, quick: int) -> int:
        return quick if self.quick else full


def chosen(figures: Mapping[str, F], only: Sequence[str]) -> list[F]:
    """The figures of these names, or all. Raises ConfigError for an unknown name."""
    for name in only:
        if name not in figures:
            raise ConfigError(f"there is no figure {name!r}; choose of {', '.join(figures)}")
    return [figures[name] for name in only or figures]


def check_free_space(settings: Settings) -> None:
    """Raises ConfigError if the folder has less free space than the largest benchmark may write."""
    free, needed = shutil.disk_usage(settings.folder).free, (4 if settings.quick else 16) * 1024 * MIB
    if free < needed:
        raise ConfigError(
            f"{settings.folder} has only {free // MIB} MiB free, and benchmarks may need {needed // MIB}; choose a "
            "folder on a disk with more (--path of kvtide bench, or the environment variable TMPDIR)"
        )


def configured(**sections: Any) -> configuration.Config:
    """These settings, and the defaults for the rest, whatever ``kvtide.toml`` and the environment say.

    The store that a user has configured has contents, which a benchmark would evict. So all stores of benchmarks are
    configured by this function, and have their folders in ``Settings.folder`` or another temporary one.
    """
    return configuration.read(os.devnull, env={}, **sections)


def own_store(mapped: bool = False, disk: Disk | None = None, **sections: Any) -> kvtide.Store:
    """A separate store for the benchmark, with these settings alone."""
    return kvtide.Store(configured(**sections), disk=disk, mapped=mapped)


def environment(**variables: str) -> dict[str, str]:
    """The environment of a benchmark's process: without the user's settings, with these variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")} | variables


def layout_of(nbytes: int) -> kvtide.Layout:
    """32 layers of 8 heads, as in Llama-3-8B, with heads as wide as makes a block ``nbytes`` long."""
    per_dim = 32 * 2 * 8 * BLOCK_TOKENS * 2
    return kvtide.Layout.attention(layers=32, heads=8, head_dim=nbytes // per_dim)


def block_sources(nbytes: int) -> list[npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, nbytes, np.uint8) for _ in range(4)]


def size_name(nbytes: int) -> str:
    return f"{nbytes // MIB}mib" if nbytes >= MIB else f"{nbytes >> 10}kib"


def into(found: list[Any], work: Callable[..., Any]) -> Callable[..., None]:
    """``work`` with its result put into ``found``."""
    return lambda *arguments: found.append(work(*arguments))
