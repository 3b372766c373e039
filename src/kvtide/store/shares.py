"""How tenants divide a store: what is reserved for some, and what is left for the others.

A tenant with a *reserved share* lives in it alone. Its share is a store of its own, with an index, memory, threads and
a folder on the disk that nobody else uses, opened from the settings that are made here. So nothing that others do can
change what it finds, nor the other way round: there is nothing between the two that one could fill and the other feel,
but the speed of the machine. For the same reason it uses no shared storage: what leaves that is everybody's doing.

All others live together in what is left, with fair shares under pressure (``kvtide.plan.evict``), and none with more
than its *quota* (``kvtide.plan.quota``). Of shared storage a node can only limit what it writes itself: names there do
not say whose a block is.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from msgspec.structs import replace

from kvtide.config import Config, Files, MiB, Objects, Valkey
from kvtide.errors import ConfigError
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.units import format_size, parse_shares

__all__ = ["RESERVED", "Shares", "divide"]

RESERVED = "reserved"
"""The folder of reserved shares, beside the segments of all others."""
_LEAST = {"dram": MiB, "nvme": 16 * MiB}
"""What a tier cannot do without."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Settings for each part of a store."""

    rest: Config
    """For all who have nothing reserved."""
    reserved: dict[bytes, Config]
    """By the tags of those who have."""
    tenants: dict[bytes, int]
    """Numbers from 1 on of those that have quotas, by tag."""
    quotas: dict[str, dict[int, int]]
    """By tier, and by these numbers: bytes."""

    def clear(self) -> None:
        """Remove shares on disk that are nobody's any more: their bytes are in the others' budget again."""
        if self.rest.nvme.path:
            for folder in (Path(self.rest.nvme.path).expanduser() / RESERVED).glob("*"):
                if str(folder) not in {c.nvme.path for c in self.reserved.values()}:
                    shutil.rmtree(folder)


def divide(config: Config) -> Shares:
    """Divide a store. Raises ConfigError where more is promised than there is."""
    quotas = {tier: _quotas(config, tier) for tier in ("dram", "nvme", "valkey", "files", "objects")}
    dram, nvme = _reserved(config, "dram", quotas["dram"]), _reserved(config, "nvme", quotas["nvme"])
    if nvme and not config.nvme.path:
        raise ConfigError(f"nvme.reserved is {config.nvme.reserved!r}, but there is no disk: set nvme.path")
    if homeless := sorted(nvme.keys() - dram.keys()):
        raise ConfigError(
            f"nvme.reserved has a share for tenant {homeless[0]}, and dram.reserved has none: whoever has a share "
            "lives in it alone, and blocks pass through DRAM. Reserve some of that too"
        )
    rest = replace(
        config,
        dram=replace(config.dram, budget=config.dram.budget - sum(dram.values()), reserved=""),
        nvme=replace(config.nvme, budget=config.nvme.budget - sum(nvme.values()), reserved=""),
    )
    tenants = {name: number for number, name in enumerate(sorted({n for q in quotas.values() for n in q}), 1)}
    return Shares(
        rest,
        {_tag(name): _share(rest, name, size, nvme.get(name, 0)) for name, size in dram.items()},
        {_tag(name): number for name, number in tenants.items()},
        {tier: {tenants[name]: nbytes for name, nbytes in q.items()} for tier, q in quotas.items() if q},
    )


def _quotas(config: Config, tier: str) -> dict[str, int]:
    """By tenant, what it may have of a tier at most."""
    section = getattr(config, tier)
    if "%" in section.quotas and not section.budget:
        raise ConfigError(f"{tier}.quotas is {section.quotas!r}, but there is no {tier}.budget to part: give sizes")
    return parse_shares(section.quotas, section.budget)


def _reserved(config: Config, tier: str, quotas: dict[str, int]) -> dict[str, int]:
    """By tenant, what of a tier is set aside."""
    section, least = getattr(config, tier), _LEAST[tier]
    found = parse_shares(section.reserved, section.budget)
    for name, nbytes in found.items():
        if nbytes < least:
            raise ConfigError(
                f"{tier}.reserved sets {format_size(nbytes)} aside for tenant {name}; it must be {format_size(least)} "
                "or more"
            )
        if nbytes > quotas.get(name, nbytes):
            raise ConfigError(
                f"{tier}.reserved sets {format_size(nbytes)} aside for tenant {name}, and {tier}.quotas allows it "
                f"{format_size(quotas[name])}; reserve no more than that"
            )
    if (total := sum(found.values())) > section.budget - least:
        raise ConfigError(
            f"{tier}.reserved sets {format_size(total)} aside for {len(found)} tenants, of a {tier}.budget of "
            f"{format_size(section.budget)}; {format_size(least)} or more must be left for the others"
        )
    return found


def _share(rest: Config, name: str, dram: int, nvme: int) -> Config:
    """The settings of a reserved share: the same as the others', in its own room, and no storage that others use."""
    # The folder must not say whose it is to who knows tenants by their tags.
    folder = blake3(_tag(name), derive_key_context="kvtide 1 reserved").hexdigest(16)
    path = str(Path(rest.nvme.path).expanduser() / RESERVED / folder) if nvme else ""
    return replace(
        rest,
        dram=replace(rest.dram, budget=dram, quotas=""),
        nvme=replace(rest.nvme, path=path, budget=nvme or rest.nvme.budget, quotas=""),
        valkey=Valkey(),
        files=Files(),
        objects=Objects(),
    )


def _tag(name: str) -> bytes:
    return DEFAULT_TENANT.tag if name == "default" else bytes.fromhex(name)
