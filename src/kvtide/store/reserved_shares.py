"""Divides a store between tenants: reserved shares for some, the remainder for the others.

A tenant with a *reserved share* uses it alone. The share is a partition (``kvtide.store.partition``) with its own
index, memory, threads and folder on the disk, opened from the settings made here. So other tenants cannot change what
it finds, nor can it affect them: they have nothing in common that one could fill and the other notice, except the speed
of the machine. For the same reason it uses no shared storage, where evictions depend on all users, and reads from no
other node.

All other tenants share the remainder, with fair shares under pressure (``kvtide.plan.evict``), and none beyond its
*quota* (``kvtide.plan.quota``). In shared storage a node can limit only its own writes, because names there do not
identify the owner of a block.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from msgspec.structs import replace

from kvtide.config import Config, Files, MiB, Mooncake, Objects, Peers, Valkey
from kvtide.errors import ConfigError
from kvtide.index.keys import parse_tag
from kvtide.plan.quota import TenantQuotas
from kvtide.units import format_size, parse_shares

__all__ = ["RESERVED", "Shares", "divide"]

RESERVED = "reserved"
"""The folder of reserved shares, next to the segments of all other tenants."""
_LEAST = {"dram": MiB, "nvme": 16 * MiB}
"""The minimum size of a tier, in bytes."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Settings for each partition of a store."""

    rest: Config
    """For all tenants without a reserved share."""
    reserved: dict[bytes, Config]
    """For reserved shares, by the tenant's tag."""
    quotas: TenantQuotas
    """Of tenants without a reserved share."""

    def clear(self) -> None:
        """Remove shares on disk that are no longer configured: their bytes belong to the remainder again."""
        if self.rest.nvme.path:
            for folder in (Path(self.rest.nvme.path).expanduser() / RESERVED).glob("*"):
                if str(folder) not in {c.nvme.path for c in self.reserved.values()}:
                    shutil.rmtree(folder)


def divide(config: Config) -> Shares:
    """Divide a store. Raises ConfigError if more is promised than there is."""
    quotas = {tier: _quotas(config, tier) for tier in ("dram", "nvme", "mooncake", "valkey", "files", "objects")}
    dram, nvme = _reserved(config, "dram", quotas["dram"]), _reserved(config, "nvme", quotas["nvme"])
    if nvme and not config.nvme.path:
        raise ConfigError(f"nvme.reserved is {config.nvme.reserved!r}, but there is no disk: set nvme.path")
    if homeless := sorted(nvme.keys() - dram.keys()):
        raise ConfigError(
            f"nvme.reserved has a share for tenant {homeless[0]}, and dram.reserved has none: a tenant with a "
            "share uses no other space, and blocks pass through DRAM. Reserve a part of dram for it too"
        )
    rest = replace(
        config,
        dram=replace(config.dram, budget=config.dram.budget - sum(dram.values()), reserved=""),
        nvme=replace(config.nvme, budget=config.nvme.budget - sum(nvme.values()), reserved=""),
    )
    tenants = {name: number for number, name in enumerate(sorted({n for q in quotas.values() for n in q}), 1)}
    return Shares(
        rest,
        {parse_tag(name): _share(rest, name, size, nvme.get(name, 0)) for name, size in dram.items()},
        TenantQuotas(
            {parse_tag(name): number for name, number in tenants.items()},
            {tier: {tenants[name]: nbytes for name, nbytes in q.items()} for tier, q in quotas.items() if q},
        ),
    )


def _quotas(config: Config, tier: str) -> dict[str, int]:
    """The most bytes that each tenant may use in a tier."""
    section = getattr(config, tier)
    if "%" in section.quotas and not section.budget:
        raise ConfigError(
            f"{tier}.quotas is {section.quotas!r}, but there is no {tier}.budget for percentages: give sizes"
        )
    return parse_shares(section.quotas, section.budget)


def _reserved(config: Config, tier: str, quotas: dict[str, int]) -> dict[str, int]:
    """The bytes of a tier set aside for each tenant."""
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
    """The settings of a reserved share: those of the remainder, with its own budgets, without shared storage and other
    nodes."""
    # The folder's name must not reveal the tenant to a reader who knows tenants' tags.
    folder = blake3(parse_tag(name), derive_key_context="kvtide 1 reserved").hexdigest(16)
    path = str(Path(rest.nvme.path).expanduser() / RESERVED / folder) if nvme else ""
    return replace(
        rest,
        dram=replace(rest.dram, budget=dram, quotas=""),
        nvme=replace(rest.nvme, path=path, budget=nvme or rest.nvme.budget, quotas=""),
        valkey=Valkey(),
        mooncake=Mooncake(),
        files=Files(),
        objects=Objects(),
        peers=Peers(),
    )
