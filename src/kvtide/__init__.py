"""kvtide stores the KV cache of LLM inference, so that it need not be recomputed.

::

    import kvtide

    store = kvtide.open(dram={"budget": "8GiB"}, nvme={"path": "/nvme/kv", "budget": "200GiB"})
    session = store.session(kvtide.Model(layout, weights="my-model@v1"))

    with session.match(tokens) as match:              # how much of this prompt is stored?
        loaded = session.load(match).wait()           # its blocks, as views of memory
    session.store(tokens, blocks)                     # store the computed blocks
"""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from kvtide.version import __version__ as __version__

if TYPE_CHECKING:
    from kvtide.block import Group, Kind, Layout
    from kvtide.events import BlockRemoved, BlockStored, EventsLost
    from kvtide.index.keys import Chain, Extra, Model, Tenant
    from kvtide.index.lease import Reservation
    from kvtide.node.client.client import Client, connect
    from kvtide.node.client.launch import open_anywhere as open  # noqa: A004 - the verb that users expect
    from kvtide.plan.prefill import PrefillCost
    from kvtide.store.explanation import ExplainedBlocks, Explanation, Why
    from kvtide.store.forget import Forgotten
    from kvtide.store.match import Load, Loaded, Match, Persist, Stored
    from kvtide.store.session import Session
    from kvtide.store.store import Statistics, Store
    from kvtide.transfer.write_results import Flushed, Persisted, Unwritten

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "Chain",
    "Client",
    "EventsLost",
    "ExplainedBlocks",
    "Explanation",
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
    "Why",
    "connect",
    "open",
]

_MODULES = {
    "Group": "kvtide.block",
    "Kind": "kvtide.block",
    "Layout": "kvtide.block",
    "BlockRemoved": "kvtide.events",
    "BlockStored": "kvtide.events",
    "EventsLost": "kvtide.events",
    "Chain": "kvtide.index.keys",
    "Extra": "kvtide.index.keys",
    "Model": "kvtide.index.keys",
    "Tenant": "kvtide.index.keys",
    "Reservation": "kvtide.index.lease",
    "Client": "kvtide.node.client.client",
    "connect": "kvtide.node.client.client",
    "open": "kvtide.node.client.launch",
    "PrefillCost": "kvtide.plan.prefill",
    "ExplainedBlocks": "kvtide.store.explanation",
    "Explanation": "kvtide.store.explanation",
    "Why": "kvtide.store.explanation",
    "Forgotten": "kvtide.store.forget",
    "Load": "kvtide.store.match",
    "Loaded": "kvtide.store.match",
    "Match": "kvtide.store.match",
    "Persist": "kvtide.store.match",
    "Stored": "kvtide.store.match",
    "Session": "kvtide.store.session",
    "Statistics": "kvtide.store.store",
    "Store": "kvtide.store.store",
    "Flushed": "kvtide.transfer.write_results",
    "Persisted": "kvtide.transfer.write_results",
    "Unwritten": "kvtide.transfer.write_results",
}
"""Where each public name is defined. It is imported when it is first used (PEP 562), so that ``import kvtide`` itself
costs next to nothing: a store needs NumPy and a hundred modules of ours, a command that prints its help none of them.
"""

if not TYPE_CHECKING:  # a type checker would take every name to exist
    _importing = threading.RLock()
    """Circular imports, such as NumPy's, fail if two threads begin them in different places."""

    def __getattr__(name: str) -> object:
        with _importing:
            if name in _MODULES:
                module = import_module(_MODULES[name])
                found = getattr(module, "open_anywhere" if name == "open" else name)
                globals()[name] = found  # the next use does not come here
                return found
            if not name.startswith("_") and "." not in name:
                # a module of ours, such as kvtide.errors: "import kvtide" is enough to use it
                try:
                    return import_module(f"{__name__}.{name}")
                except ModuleNotFoundError as error:
                    if error.name != f"{__name__}.{name}":
                        raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
