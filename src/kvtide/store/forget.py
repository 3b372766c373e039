"""Forgets a tenant: destroys its keys first, then its blocks in all tiers, and records that in the audit log."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from kvtide import arguments
from kvtide.errors import KvtideError, LayoutError, TierError, UnknownTenantError
from kvtide.index.absence_log import Absence
from kvtide.security.audit import audit_of
from kvtide.security.key_admin import destroy
from kvtide.security.key_file import KeyFile
from kvtide.security.key_ring import OWN
from kvtide.store.partition import Partition
from kvtide.tiers.shared.tier import Shared
from kvtide.transfer.cold_tier import ColdTier

__all__ = ["Forgotten", "forget", "unknown"]


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The result of forgetting a tenant."""

    blocks: int
    """Blocks that were found, in any tier."""
    held: int = 0
    """Slots in memory that callers still hold. They are zeroed when they are released.

    Also counts slots that could not be zeroed, which the log reports: they are not reused before they are zeroed.
    """

    announced: bool = False
    """Whether neither a key nor a block was found, and only the other users of the shared storage were notified: the
    owner of an unknown blob there cannot be determined."""

    def __str__(self) -> str:
        if self.announced:
            return (
                "but neither a key nor a block of it was found here: the other users of the same storage were told to "
                "forget it, and its blobs there are not served any more. Check its tag if there should have been blocks"
            )
        later = f"; {self.held} slots in memory are held by callers, and are zeroed when they are released" * bool(
            self.held
        )
        return f"{self.blocks} blocks{later}"


def forget(partitions: Sequence[Partition], tenant: bytes, who: str) -> Forgotten:
    """Forget a tenant in all ``partitions`` of a store; see ``Store.forget``."""
    arguments.kind(tenant, bytes, "tenant")
    if len(tenant) != 16 or tenant == OWN:
        raise LayoutError(f"a tenant's tag has 16 bytes, not all zero; this is {tenant.hex()!r}")
    settings, clock, key_ring = partitions[0].config.security, partitions[0].clock, partitions[0].context.key_ring
    audit = audit_of(settings, clock)
    shared_tiers = [found for partition in partitions for found in partition.shared_tiers]
    mine: set[bytes] = set()
    result = "failed"
    if audit is not None:
        audit.record("forget", "begun", who, tenant=tenant.hex())  # an action that cannot be recorded is not done
    try:
        with contextlib.ExitStack() as refused:
            # First: blocks that enter after the search for the tenant's blocks would stay.
            for partition in partitions:
                refused.enter_context(partition.pipeline.forgetting(tenant))
                refused.enter_context(partition.outgoing.forgetting(tenant))
            if key_ring is not None:
                refused.enter_context(key_ring.forgetting(tenant))
            known = [set(partition.pipeline.keys_of(tenant)) for partition in partitions]
            here = any(known)
            file = KeyFile(Path(settings.key_file).expanduser()) if settings.key_file else None
            if file is not None:
                destroy(file, tenant, clock, known=here)
                mine = {bytes.fromhex(e.id) for e in file.read().keys if e.tenant == tenant.hex()}
            if key_ring is not None:
                key_ring.revoke(tenant)
            context = partitions[0].context
            context.known_models.forget(tenant)
            context.recent_requests.forget(tenant)
            found, held, errors = 0, 0, []
            traces = False
            # In all partitions: a share may have been reserved when the tenant already had blocks elsewhere.
            for partition, before in zip(partitions, known, strict=True):
                try:
                    keys = partition.shred(tenant, mine)
                    traces |= bool(keys)  # of free slots too: data was erased though no block was found
                    # the key ring may have dropped them already
                    found += partition.drop(keys, notify_others=False, absence=Absence.FORGOTTEN)
                    found += len(before.difference(keys))
                except KvtideError as e:
                    errors.append(e)  # the other partitions forget the tenant all the same
                held += partition.zero_traces(tenant)
            if traces and not mine and not here and file is not None:
                destroy(file, tenant, clock)  # only the disk knew of it; other processes must be told as well
            errors += _tell_others(shared_tiers, tenant)
            if errors:
                raise errors[0]
            if key_ring is not None and file is not None:
                key_ring.forgotten(tenant, file.read())
        # Unencrypted blobs in shared storage are now forgotten by all its users, whether or not there were any.
        nothing = not (found or traces or mine)
        if nothing and (settings.encrypt or not shared_tiers):
            raise UnknownTenantError(unknown(tenant))
        forgotten = Forgotten(found, held, announced=nothing)
        result = f"done: {forgotten}"
        return forgotten
    except KvtideError as e:
        result = f"{type(e).__name__}: {e}"
        raise
    finally:
        if audit is not None:
            audit.record("forget", result, who, tenant=tenant.hex())


def _tell_others(shared_tiers: Sequence[tuple[ColdTier, Shared]], tenant: bytes) -> list[KvtideError]:
    """Tell all users of the same storage to forget a tenant; returns the errors."""
    errors: list[KvtideError] = []
    for cold, tier in shared_tiers:
        ended: SimpleQueue[Sequence[bool]] = SimpleQueue()
        tier.forget(tenant, ended.put)
        try:
            told = all(ended.get(timeout=cold.patience))
        except Empty:
            told = False
        if not told:
            errors.append(
                TierError(
                    f"other users of the storage of {cold.name} could not be notified that {tenant.hex()} is "
                    "forgotten, and may still have its blocks: see the statistics for the storage's error, then "
                    "forget it again"
                )
            )
    return errors


def unknown(tenant: bytes) -> str:
    """The error message for an unknown tenant."""
    return (
        f"there is no tenant {tenant.hex()}: neither a key nor a block of it is known here. "
        "Check its tag, security.key_file and nvme.path, and name the nodes that may have its blocks in memory. The "
        "owner of a block in shared storage cannot be determined without a key"
    )
