"""kvtide stores the KV cache of LLM inference, so that it need not be recomputed.

::

    import kvtide

    store = kvtide.open(dram={"budget": "8GiB"}, nvme={"path": "/nvme/kv", "budget": "200GiB"})
    session = store.session(kvtide.Model(layout, weights="my-model@v1"))

    with session.match(tokens) as match:              # how much of this prompt is stored?
        loaded = session.load(match).wait()           # its blocks, as views of memory
    session.store(tokens, blocks)                     # store the computed blocks
"""

from kvtide.block import Group, Kind, Layout
from kvtide.events import BlockRemoved, BlockStored, EventsLost
from kvtide.index.keys import Chain, Extra, Model, Tenant
from kvtide.index.lease import Reservation
from kvtide.node.client.client import Client, connect
from kvtide.node.client.launch import open_anywhere as open  # noqa: A004 - the verb that users expect
from kvtide.plan.prefill import PrefillCost
from kvtide.store.forget import Forgotten
from kvtide.store.match import Load, Loaded, Match, Persist, Stored
from kvtide.store.session import Session
from kvtide.store.store import Statistics, Store
from kvtide.transfer.write_results import Flushed, Persisted, Unwritten
from kvtide.version import __version__ as __version__

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "Chain",
    "Client",
    "EventsLost",
    "Extra",
    "Flushed",
    "Forgotten",
    "Group",
    "Kind",
    "Layout",
    "Load",
    "Loaded",
    "Match",
    "Model",
    "Persist",
    "Persisted",
    "PrefillCost",
    "Reservation",
    "Session",
    "Statistics",
    "Store",
    "Stored",
    "Tenant",
    "Unwritten",
    "connect",
    "open",
]
