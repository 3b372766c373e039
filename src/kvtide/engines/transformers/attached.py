"""Keep the KV of ``generate`` calls: attach a store to a Hugging Face model, so that known prompts are not computed
again.

::

    import kvtide.engines.transformers

    kvtide.engines.transformers.attach(model)     # a store by kvtide.toml and the environment
    model.generate(**inputs, max_new_tokens=100)  # as before

*On entry* the longest stored prefix of the prompts is loaded into a ``DynamicCache``, which is passed to ``generate``
as if the caller had kept it from the last turn: only the missing tokens are computed. A GPU waits for the load on its
stream while ``generate`` prepares on the host; the blocks are leased until the first token. At least one token is
computed, because its logits are needed. *On exit* a background thread copies the new full blocks, of the prompt and of
the generated text, into the store. The last token is not among them: its KV was never computed.

A batch is rectangular: prompts are padded on the left to one length, and a cache has one length for all rows. So the
row with the shortest stored prefix determines how much is reused of each row; that may end inside a block. Positions
are counted from a row's first real token, and padding is masked, so the KV of a prompt is the same with padding as
without.

If loading would take longer than computing, as measured for both, the prefix is computed (``prefill.py``); if neither
is clearly faster, the front of a prompt is computed while the rest is loaded (``overlap.py``). An error with a block
makes the prefix shorter, and an error of the store makes it empty: the output is the same, computed.

The identity of the model is determined at every call (``engines/identity.py``). A call whose KV does not follow from
its tokens alone is passed to the original ``generate`` unchanged (``engines/transformers/prompts.py``).
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

import kvtide
from kvtide import forks
from kvtide.block import BLOCK_TOKENS, LOSSY
from kvtide.call_guard import CallGuard
from kvtide.engines.bounded_executor import BoundedExecutor
from kvtide.engines.identity import Moment, Weights, adapters, settings
from kvtide.engines.paged.choose_mover import mover
from kvtide.engines.paged.mover import Mover
from kvtide.engines.transformers.dynamic_cache import fill, layout_of, sections_of, store_row
from kvtide.engines.transformers.overlap import Overlap, chosen, sizes
from kvtide.engines.transformers.prefill import Prefill
from kvtide.engines.transformers.prompts import Call, PromptRefused, Prompts, arguments, read
from kvtide.errors import ClosedError, LayoutError, RightError
from kvtide.index.keys import DEFAULT_TENANT, EXACT, Chain, Model, Tenant
from kvtide.plan.usage_tracker import Turn
from kvtide.store.explanation import Explanation
from kvtide.store.match import Loaded
from kvtide.store.session import Session, SessionHost, hints

__all__ = ["Answer", "Attached", "AttachedStatistics", "CallReport", "attach"]

log = logging.getLogger("kvtide.transformers")

_WAITING = 4
"""Maximum outputs whose KV waits to be stored. They keep it in the model's memory."""
_PATIENCE = 5.0
"""Seconds that a call waits for the KV of earlier calls to be stored."""
_WAIT = 0.25
"""Seconds that a lookup waits for blocks that others are writing, or have just written."""
_SLOWER, _OVERDUE = 4.0, 10.0
"""After so many times the seconds that a load is expected to take, the seconds that computing would take, and so many
more, the load is given up, and what has not arrived is computed: a disk that hangs must not hang ``generate``."""
_SESSIONS = 64
"""Sessions kept open, one per model (by its weights) and tenant."""


class CallReport(NamedTuple):
    """What one call of ``generate`` had to compute."""

    prompt: tuple[int, ...]
    """Tokens of each prompt, without padding. Empty if nothing was looked up."""
    cached: tuple[int, ...]
    """How many of them were loaded from the store."""
    reason: str = ""
    """Why nothing was looked up, if so."""


class Answer(NamedTuple):
    """The output of ``generate``, and a report of the call."""

    output: Any
    report: CallReport


@dataclass(slots=True)
class AttachedStatistics:
    """Counters since the store was attached."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    stored_blocks: int = 0
    dropped_blocks: int = 0
    """Blocks that were not stored: there was no space for them, or too many outputs were waiting to be stored."""
    passed_on: Counter[str] = field(default_factory=Counter)
    """Calls without reuse, by reason."""
    last: CallReport = field(default_factory=lambda: CallReport((), ()))
    """Report of the call that ended last, in any thread."""


def attach(
    model: PreTrainedModel,
    store: SessionHost | str | None = None,
    *,
    block_tokens: int = BLOCK_TOKENS,
    fidelity: str = EXACT,
) -> Attached:
    """Keep the KV of this model's ``generate`` calls in a store, until ``detach``.

    ``store`` is a store or the client of a node, the address of a node (``"unix:/run/kvtide.sock"``), or None to open
    one from the configuration; that one is closed by ``detach`` or at the end of the process. ``fidelity`` may be a
    lossy form ("fp8", "k8v4", "r4"): smaller, and outputs then differ a little. Raises LayoutError for a model whose
    layers do not keep keys and values of every token.
    """
    if fidelity != EXACT and fidelity not in LOSSY:
        raise LayoutError(f"there is no fidelity {fidelity!r}; choose of {', '.join([EXACT, *LOSSY])}")
    if isinstance(getattr(model.generate, "__self__", None), Attached):
        raise RightError("this model has a store already; detach that first")
    layout, weights = layout_of(model, block_tokens, fidelity), Weights(model)
    known = Model(layout, weights.name(), settings(model.config), fidelity=fidelity)
    if isinstance(store, SessionHost):
        return Attached(model, store, weights, known, owned=False)
    return Attached(model, kvtide.connect(store) if store else kvtide.open(), weights, known, owned=True)


class Attached:
    """A store attached to a model. End it with ``detach``, or use it in a ``with``. Thread-safe."""

    def __init__(
        self, model: PreTrainedModel, store: SessionHost, weights: Weights, known: Model, *, owned: bool
    ) -> None:
        """``known``: the model's last known identity. ``owned``: ``detach`` closes the store."""
        self.model = model
        self.store = store
        self._owned = owned
        self._weights = weights
        self._known = known
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._movers: dict[torch.device, Mover] = {}
        self._used: Counter[bytes] = Counter()
        """Number of calls that use each session."""
        self._guard = CallGuard("this model was detached from its store")
        self._lock = threading.Lock()
        self._statistics = AttachedStatistics()
        self.prefill = Prefill()
        self._background = BoundedExecutor("kvtide-transformers", _WAITING)
        self._original = cast(Callable[..., Any], model.generate)
        self._shadowed = vars(model).get("generate")
        vars(model)["generate"] = self._generate
        if owned:
            atexit.register(self.detach)

    def __repr__(self) -> str:
        return f"<Attached {type(self.model).__name__} to {self.store}>"

    # -- the call -----------------------------------------------------------------------------------------

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.generate(*args, **kwargs).output

    def generate(
        self,
        *args: Any,
        tenant: Tenant = DEFAULT_TENANT,
        turn: Turn | None = None,
        returns_in: float | None = None,
        request: str = "",
        **kwargs: Any,
    ) -> Answer:
        """``model.generate`` for one tenant, with a report of the reuse. ``turn`` and ``returns_in`` are hints about
        the next use of the prompt and its output: see ``Session.expect``. ``request`` is a name for
        ``explain_request``."""
        turn, returns_in = hints(turn, returns_in)
        call = arguments(args, kwargs)
        prompts = self._prompts(call)
        if isinstance(prompts, PromptRefused):
            return Answer(self._original(**call), self._passed_on(prompts.reason))
        with ExitStack() as use:
            try:
                with self._guard:
                    session, chains, found = self._reuse(tenant, prompts, use, request)
            except Exception as error:  # noqa: BLE001 - no such error, like a GPU out of memory, concerns the caller
                failure = f"{type(error).__name__}: {error}"
            else:
                expected = partial(session.expect, turn=turn, returns_in=returns_in)
                return self._generate_from(found, session, chains, call, prompts, expected)
        # Here the memory of the cache that was to be filled is free again.
        return Answer(self._original(**call), self._passed_on(failure))

    def explain_request(self, request: str, tenant: Tenant = DEFAULT_TENANT) -> Explanation | None:
        """Why blocks of a prompt were hits or misses, given the ``request`` of its ``generate``: see
        ``Session.explain_request``."""
        with self._guard, self._session(self._known, tenant) as session:
            return session.explain_request(request)

    def _generate_from(
        self,
        found: _Found,
        session: Session,
        chains: list[Chain],
        call: Call,
        prompts: Prompts,
        expected: Callable[[Chain], None],
    ) -> Answer:
        """Generate with the loaded cache, and store the new KV; ``expected`` passes on the hints about its next use."""
        _with_our_cache(call, self.model.generation_config)
        watch = self.prefill.watch(call, found.loads.close)
        output = self._original(**call | {"past_key_values": found.cache})
        self.prefill.seen(watch, len(chains), found.border, prompts.length)
        try:
            self._keep(session, chains, prompts, found.cache, output, expected)
        except Exception:  # the output is complete even if its KV cannot be stored
            log.exception("what was generated is not stored")
        return Answer(output, self._reused(CallReport(tuple(map(len, prompts.rows)), found.cached)))

    def _prompts(self, call: Call) -> Prompts | PromptRefused:
        if self.model.training:
            return PromptRefused("the model is in training mode; call model.eval()")
        if torch.is_autocast_enabled(self.model.device.type):
            return PromptRefused("autocast is on")
        if "prepare_inputs_for_generation" in vars(self.model):
            return PromptRefused("something else prepares the model's inputs, as prompt tuning does")
        return read(call, self.model.generation_config)

    def _passed_on(self, reason: str) -> CallReport:
        report = CallReport((), (), reason)
        with self._lock:
            if reason not in self._statistics.passed_on:
                log.warning("generate goes on without reuse: %s", reason)
            self._statistics.calls += 1
            self._statistics.passed_on[reason] += 1
            self._statistics.last = report
        return report

    def _reused(self, report: CallReport) -> CallReport:
        with self._lock:
            self._statistics.calls += 1
            self._statistics.prompt_tokens += sum(report.prompt)
            self._statistics.cached_tokens += sum(report.cached)
            self._statistics.last = report
        return report

    # -- identity -----------------------------------------------------------------------------------------

    def identity(self, after: Moment | None = None) -> Model:
        """The model's current identity, without waiting for what streams do ``after`` a moment."""
        name = self._weights.name(after)
        config, adapter = settings(self.model.config), adapters(self.model)
        with self._lock:
            known, layout = self._known, self._known.layout
            if name != known.weights:  # the new weights may have another dtype
                layout = layout_of(self.model, layout.block_tokens, known.fidelity)
            self._known = replace(known, layout=layout, weights=name, config=config, adapter=adapter)
            return self._known

    @contextmanager
    def _session(self, model: Model, tenant: Tenant) -> Iterator[Session]:
        """A session for a model with the given identity. It is not closed while in use."""
        name = model.namespace(tenant)
        with self._lock:
            if name not in self._sessions:
                self._sessions[name] = self.store.session(model, tenant)
            self._sessions.move_to_end(name)
            self._used[name] += 1
            session = self._sessions[name]
        try:
            yield session
        finally:
            with self._lock:
                self._used[name] -= 1
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Close the oldest unused session, after the stores queued for it. Requires the lock."""
        oldest = next((name for name in self._sessions if not self._used[name]), None)
        if oldest is None or len(self._sessions) <= _SESSIONS:
            return
        if self._background.put(self._sessions[oldest].close):
            del self._sessions[oldest], self._used[oldest]

    def _mover(self, device: torch.device) -> Mover:
        with self._lock:
            if device not in self._movers:
                self._movers[device] = mover(device)
            return self._movers[device]

    # -- KV in and out ------------------------------------------------------------------------------------

    def _reuse(
        self, tenant: Tenant, prompts: Prompts, use: ExitStack, request: str
    ) -> tuple[Session, list[Chain], _Found]:
        """The session for the model's current identity, the prompts as chains, and the prefix found for them.

        Determining the identity takes a while. Usually it has not changed, so loading begins with the last known
        identity meanwhile; if it has changed, that load is released.
        """
        moment = self._weights.moment()
        expected, now = None, self._known
        while now != expected:
            use.close()
            expected = now
            session = use.enter_context(self._session(expected, tenant))
            self._background.flush(_PATIENCE)  # so that a turn finds the KV of the one before
            chains = [session.chain(row) for row in prompts.rows]
            found = self._load(session, chains, prompts, request)
            use.enter_context(found if isinstance(found, Overlap) else found.loads)
            now = self.identity(moment)
        if isinstance(found, Overlap):
            tokens = torch.from_numpy(prompts.rows[0].astype(np.int64))[None]
            cache, border, loaded = found.run(self.model, tokens.to(self.model.device))
            found = _Found(cache, border, (loaded,), ExitStack())
        return session, chains, found

    def _load(self, session: Session, chains: Sequence[Chain], prompts: Prompts, request: str) -> _Found | Overlap:
        """A cache with the first tokens of every row, or an Overlap that is going to load and compute them."""

        def border(found: Sequence[kvtide.Match | Loaded]) -> int:
            return min(prompts.length - 1, *(pad + f.tokens for pad, f in zip(prompts.pads, found, strict=True)))

        with ExitStack() as held:
            matches = [
                held.enter_context(session.match(chain, prefill=self.prefill.cost, wait=_WAIT, request=request))
                for chain in chains
            ]
            if prompts.pads == [0] and (both := self._overlap(session, matches[0])) is not None:
                return both
            if border(matches) > min(prompts.pads):
                loads = [session.load(match) for match in matches]
                overdue = time.monotonic() + max(map(self._patience, matches))
                found = [load.wait(max(0.0, overdue - time.monotonic())) for load in loads]
                if (length := border(found)) > min(prompts.pads):
                    device = self.model.device
                    check = held.enter_context(ExitStack())  # before the copies, so that it follows their end
                    check.callback(_check_open, session)
                    cache, copies = fill(self._mover(device), session.layout, device, found, prompts.pads, length)
                    held.enter_context(copies)
                    # Else a measurement would include the load. On a CPU they have ended already.
                    if device.type == "cpu" or self.prefill.tells(len(chains) * (prompts.length - length)):
                        copies.close()
                        check.close()
                    cached = tuple(max(0, length - pad) for pad in prompts.pads)
                    return _Found(cache, length, cached, held.pop_all())
        return _Found(DynamicCache(), 0, (0,) * len(chains), ExitStack())

    def _patience(self, match: kvtide.Match) -> float:
        """Seconds after which a load is given up."""
        return _SLOWER * match.plan.load_seconds + (self.prefill.seconds(0, match.tokens) or 0.0) + _OVERDUE

    def _overlap(self, session: Session, match: kvtide.Match) -> Overlap | None:
        """Begin to load and compute a prompt's prefix at the same time, if neither alone is clearly faster."""
        size, plan, chain = session.layout.block_tokens, match.plan, match.chain
        if self.prefill.cost is None or (match.ready and not plan.slower):
            return None
        if plan.slower:  # also count the blocks that were left out as too slow
            with session.match(chain, prefill=0, again=True) as whole:
                plan = whole.plan
        held = match.held_tokens // size
        load, compute = plan.load_seconds, self.prefill.seconds(held * size, plan.blocks * size) or 0.0
        if plan.blocks - held < 2 or not chosen(load, compute):
            return None
        match.release()
        nbytes = session.layout.geometry[session.layout.groups[0].name].footprint
        steps = sizes(plan.blocks - held, size, nbytes, load, compute)
        device = self.model.device
        return Overlap(session, chain, self._mover(device), device, plan.blocks, held, steps, self.prefill.seconds)

    def _keep(
        self,
        session: Session,
        chains: list[Chain],
        prompts: Prompts,
        cache: DynamicCache,
        output: Any,
        expected: Callable[[Chain], None],
    ) -> None:
        """Queue the new blocks to be stored in the background."""
        returned = not isinstance(output, torch.Tensor)
        sequences = output.sequences if returned else output
        if cache.get_seq_length() != sequences.shape[1] - 1:
            log.warning("what was generated is not stored: the cache does not hold the prompt and its answer alone")
            return
        new = sequences[:, prompts.length : cache.get_seq_length()].cpu().numpy().astype(np.uint32)
        sections = sections_of(cache)
        job = self._background.put(partial(self._store, session, chains, prompts.pads, new, sections, expected))
        if job is None:
            self._stored(0, sum(chain.blocks for chain in chains))
        elif returned:
            job.result()  # the caller gets the cache, and may change it

    def _store(
        self,
        session: Session,
        chains: Sequence[Chain],
        pads: Sequence[int],
        new: npt.NDArray[np.uint32],
        sections: Sequence[torch.Tensor],
        expected: Callable[[Chain], None],
    ) -> None:
        for row, (chain, pad) in enumerate(zip(chains, pads, strict=True)):
            chain.extend(_trimmed(new[row]) if len(chains) > 1 else new[row])
            self._stored(*store_row(self._mover(sections[0].device), session, chain, sections, row, pad))
            expected(chain)

    def _stored(self, blocks: int, dropped: int) -> None:
        with self._lock:
            self._statistics.stored_blocks += blocks
            self._statistics.dropped_blocks += dropped

    # -- the end ------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all generated KV is stored. False if ``timeout`` seconds passed before."""
        return self._background.flush(timeout)

    def statistics(self) -> AttachedStatistics:
        with self._lock:
            return replace(self._statistics, passed_on=Counter(self._statistics.passed_on))

    def detach(self) -> None:
        """Restore the model's own ``generate``, wait for loads, store what is queued, and close the store if it is
        owned."""
        if vars(self.model).get("generate") == self._generate:
            del vars(self.model)["generate"]
            if self._shadowed is not None:
                vars(self.model)["generate"] = self._shadowed
        atexit.unregister(self.detach)
        if self.store.origin is not forks.here:
            return  # the store and the queued work belong to the parent process
        self._guard.shut()
        self._background.close()
        with self._lock:
            sessions, self._sessions = self._sessions, OrderedDict()
            movers, self._movers = self._movers, {}
        for each in movers.values():
            each.close()  # first: its copies use memory leased by a session
        for session in sessions.values():
            session.close()
        if self._owned:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.detach()


class _Found(NamedTuple):
    """The prefix found for the prompts of a call."""

    cache: DynamicCache
    border: int
    """Tokens of every row that are in the cache, including padding."""
    cached: tuple[int, ...]
    """How many tokens of each row were loaded from the store."""
    loads: ExitStack
    """To be closed when the loads have ended."""


def _check_open(session: Session) -> None:
    """Raise ClosedError if others may have written to the memory of blocks while it was copied."""
    if session.closed:
        raise ClosedError("the store was closed while generate copied blocks from it; keep it open until generate ends")


def _with_our_cache(call: Call, defaults: GenerationConfig) -> None:
    """Remove a request for the default cache from the arguments or settings: ``generate`` rejects it together with a
    cache."""
    if (given := call.get("generation_config")) is not None and given.cache_implementation:
        call["generation_config"] = given = copy(given)
        given.cache_implementation = None
    if call.get("cache_implementation") or (given is None and defaults.cache_implementation):
        call["cache_implementation"] = None


def _trimmed(tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Without the repeated end token of a row that ended earlier than its batch."""
    others = np.flatnonzero(tokens != tokens[-1]) if len(tokens) else tokens
    return tokens[: others[-1] + 2] if len(others) else tokens[:1]
