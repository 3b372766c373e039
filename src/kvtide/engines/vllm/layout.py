"""The layout of vLLM's KV: its cache groups as a ``Layout``, and the tensors of a worker as ``Pages`` of it.

The scheduler has no tensors, but must know their packing, which is part of a block's name. On a GPU it is plain: if an
attention backend packs differently, vLLM's cache spec says so, and the deployment is refused. On a CPU the packing
depends on the processor, the dtype and the build of vLLM ("neon" packs bfloat16 in two ways). So nothing is concluded
from names: the kernel that the engine will use writes a page of random numbers, which is compared with every known
packing. If none fits, the packing is opaque, and named after this version and backend.

A deployment is refused with a LayoutError if a block would be wrong or could not be identified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupRole,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    iter_layer_specs,
)

from kvtide.block import BLOCK_TOKENS, DTYPES, Group, Kind, Layout, Slice
from kvtide.engines.paged import packing
from kvtide.engines.paged.pages import Pages
from kvtide.errors import LayoutError

__all__ = ["Layouts", "attention_pages", "latents", "layouts", "pages"]

_PLAIN_PAGE = 16
"""Plain bytes are the same for every page size; all engines declare this one, so that they share one name."""
_CPU_PAGE = 128
"""vLLM's default page size on CPUs."""
_DRAFTLESS = ("ngram", "ngram_gpu", "suffix")
"""Speculation methods that keep no KV of their own."""
_KINDS = {
    FullAttentionSpec: Kind.FULL,
    MLAAttentionSpec: Kind.MLA,
    SlidingWindowSpec: Kind.WINDOW,
    ChunkedLocalAttentionSpec: Kind.WINDOW,
}
"""By exact class: subclasses in vLLM keep something else. A token of an attention chunk sees no further back than the
chunk's length, so a window of that length has all that a prefix needs, and at times more."""


@dataclass(frozen=True)
class Layouts:
    """The block layouts of a deployment."""

    own: Layout
    """The layout that is stored."""
    others: tuple[Layout, ...]
    """Layouts that other deployments of this model may have stored: a load converts them."""
    groups: tuple[str, ...]
    """The name in ``own`` of each of vLLM's cache groups, in vLLM's order."""
    layers: tuple[tuple[str, ...], ...]
    """For each group the names of its layers, in the order of the model."""
    pages: tuple[int, ...]
    """For each group the tokens per page, as vLLM's scheduler counts pages."""


def layouts(vllm_config: Any, kv_cache_config: Any, block_tokens: int = BLOCK_TOKENS) -> Layouts:
    """The layouts of this deployment, equal in the scheduler and in the workers. Raises LayoutError if it is
    unsupported."""
    _check(vllm_config)
    specs = [_spec(number, group) for number, group in enumerate(kv_cache_config.kv_cache_groups)]
    if not specs:
        raise LayoutError("this model keeps no KV: there is nothing to do for a connector")
    counts: dict[Kind, int] = {}
    groups = []
    layers = tuple(tuple(_in_order(g.layer_names)) for g in kv_cache_config.kv_cache_groups)
    for number, spec in enumerate(specs):
        kind = _KINDS[type(spec)]
        counts[kind] = counts.get(kind, 0) + 1
        name = kind.value + (str(counts[kind]) if counts[kind] > 1 else "")
        found = _packing(vllm_config, spec)
        groups.append(
            Group(
                name,
                kind,
                len(layers[number]),
                _heads(vllm_config, spec, number),
                spec.head_size,
                str(spec.dtype).removeprefix("torch."),
                window=_window(spec),
                page=_page(found, spec.block_size),
                packing=found,
            )
        )
    whole = math.lcm(*(spec.block_size for spec in specs))
    own = Layout(tuple(groups), -(-block_tokens // whole) * whole)
    return Layouts(
        own, _others(own), tuple(g.name for g in groups), layers, tuple(int(spec.block_size) for spec in specs)
    )


def pages(found: Layouts, vllm_config: Any, kv_caches: Mapping[str, torch.Tensor], rank: int) -> dict[str, Pages]:
    """A worker's tensors as pages, by group name. ``rank`` is the tensor-parallel rank.

    If an attention kernel has smaller pages than the scheduler, these are the kernel's: ``found.pages`` is how many
    of them, which are consecutive, form one of the scheduler's. Raises LayoutError if the tensors do not match the
    scheduler's layout.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    known = {}
    for name, layers in zip(found.groups, found.layers, strict=True):
        group = found.own.group(name)
        if missing := [layer for layer in layers if layer not in kv_caches]:
            raise LayoutError(f"vLLM registered no KV tensor for {missing[0]}, which its cache groups list")
        tensors = [kv_caches[layer] for layer in layers]
        if current_platform.is_cpu():
            _check_isa(vllm_config, layers, tensors[0], group)
        share = group.share(rank, ranks)
        if group.kind is Kind.MLA:
            known[name] = latents(found.own, name, tensors, share)
        else:
            known[name] = attention_pages(found.own, name, tensors, share, apart=current_platform.is_cpu())
    return known


def attention_pages(layout: Layout, group: str, tensors: Sequence[torch.Tensor], share: Slice, *, apart: bool) -> Pages:
    """Tensors ``[page, head, token, K and V]``, one per layer. ``apart``: each head of a page has first all of K and
    then all of V, whatever the shape says, as on CPUs. Otherwise K and V of a token are adjacent."""
    sections: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.dim() != 4 or tensor.shape[-1] % 2:
            raise LayoutError(
                f"a KV tensor of group {group!r} is {tuple(tensor.shape)}, not [page, head, token, 2 dim]"
            )
        count, heads, tokens, both = tensor.shape
        if apart:
            sections += tensor.view(count, heads, 2, tokens, both // 2).unbind(2)
        else:
            sections += tensor.split(both // 2, -1)
    return Pages(layout, group, sections, share)


def latents(layout: Layout, group: str, tensors: Sequence[torch.Tensor], share: Slice) -> Pages:
    """Tensors ``[page, 1, token, latent]`` or ``[page, token, latent]``, one per layer."""
    return Pages(layout, group, [t if t.dim() == 4 else t.unsqueeze(1) for t in tensors], share)


# -- refused deployments --------------------------------------------------------------------------------------


def _check(vllm_config: Any) -> None:
    """Raises LayoutError for features of the deployment that blocks do not support."""
    parallel = vllm_config.parallel_config
    for name, size in (
        ("pipeline", parallel.pipeline_parallel_size),
        ("decode context", parallel.decode_context_parallel_size),
        ("prefill context", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise LayoutError(
                f"{name} parallelism of {size} spreads a block over ranks in a way that is not supported yet: use "
                "tensor parallelism"
            )
    draft = vllm_config.speculative_config
    if draft is not None and draft.method not in _DRAFTLESS:
        raise LayoutError(
            f"speculation by {draft.method!r} keeps KV of a draft model, which is not supported yet: use one of "
            f"{', '.join(_DRAFTLESS)}, or none"
        )
    if vllm_config.cache_config.kv_cache_dtype_skip_layers:
        raise LayoutError("kv_cache_dtype_skip_layers gives layers KV of several dtypes: leave it empty")
    chunked = vllm_config.scheduler_config.enable_chunked_prefill
    if current_platform.is_cpu() and vllm_config.model_config.use_mla and not chunked:
        raise LayoutError(
            "with MLA on this processor vLLM computes a prompt otherwise when a part of it is there, and so turns its "
            "own prefix cache and chunked prefill off: serve this model without kvtide, or on a GPU"
        )
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise LayoutError(f"KV on {current_platform.device_name} cannot be moved: there are copies for CPUs and CUDA")


def _window(spec: Any) -> int:
    """Window in tokens, including the current token; 0: unlimited."""
    if type(spec) is SlidingWindowSpec:
        return int(spec.sliding_window)
    return int(spec.attention_chunk_size) if type(spec) is ChunkedLocalAttentionSpec else 0


def _spec(number: int, group: Any) -> Any:
    """The spec of a group's layers. Raises LayoutError unless all layers keep the same kind of KV for every token."""
    specs = list(iter_layer_specs(group.kv_cache_spec))
    spec, what = (
        specs[0],
        f"cache group {number} of vLLM ({len(group.layer_names)} layers, {group.layer_names[0]} first)",
    )
    if type(spec) not in _KINDS:
        raise LayoutError(
            f"{what} is of kind {type(spec).__name__}; supported are {', '.join(s.__name__ for s in _KINDS)}: serve "
            "this model without kvtide"
        )
    if any(other != spec for other in specs):
        raise LayoutError(f"{what} has layers of several shapes, which is not supported yet: serve it without kvtide")
    if group.is_eagle_group or group.host_resident or group.role is not KVCacheGroupRole.DEFAULT:
        raise LayoutError(f"{what} is not plain KV of the model itself (a draft's, or HiSparse): turn that off")
    if spec.state_content_bytes is not None or spec.num_head_slots is not None or spec.tokens_per_state != 1:
        raise LayoutError(
            f"{what} is in a packed form that only its attention backend knows: choose --kv-cache-dtype auto"
        )
    if spec.kv_quant_mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        raise LayoutError(f"{what} is quantized as {spec.kv_quant_mode.name}: choose --kv-cache-dtype auto or fp8")
    if str(spec.dtype).removeprefix("torch.") not in DTYPES:
        raise LayoutError(f"{what} is of {spec.dtype}; supported are {', '.join(DTYPES)}")
    if type(spec) is MLAAttentionSpec:
        if spec.model_version or spec.cache_role is not SparseCacheRole.SPARSE or spec.non_causal_multi_token_decode:
            raise LayoutError(f"{what} is of sparse attention with an index of its own, which is not supported yet")
    elif spec.head_size != spec.head_size_v:
        raise LayoutError(f"{what} has keys of {spec.head_size} and values of {spec.head_size_v}: not supported yet")
    if getattr(spec, "non_causal", False):
        raise LayoutError(f"{what} attends to what comes later, so a prefix has no KV of its own")
    if getattr(spec, "extra_retained_tokens", 0):
        raise LayoutError(f"{what} keeps {spec.extra_retained_tokens} tokens for a draft model: turn speculation off")
    return spec


def _heads(vllm_config: Any, spec: Any, number: int) -> int:
    """The KV heads of the whole model: vLLM's spec has those of a rank."""
    ranks, mine = vllm_config.parallel_config.tensor_parallel_size, int(spec.num_kv_heads)
    if ranks == 1 or type(spec) is MLAAttentionSpec:
        return mine
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    if mine != max(1, total // ranks) or (total % ranks and ranks % total):
        raise LayoutError(
            f"cache group {number} of vLLM has {mine} KV heads on each of {ranks} ranks, and the model {total} in all: "
            "such a cut is not supported yet"
        )
    return total


def _in_order(names: Sequence[str]) -> list[str]:
    """Layer names sorted by the numbers in them: layer 9 before layer 10."""
    return sorted(names, key=lambda name: ([int(part) for part in name.split(".") if part.isdecimal()], name))


# -- packings -------------------------------------------------------------------------------------------------


def _packing(vllm_config: Any, spec: Any) -> str:
    if type(spec) is MLAAttentionSpec or not current_platform.is_cpu():
        return "plain"
    isa = _isa(vllm_config, spec.block_size, spec.head_size)
    if spec.kv_quant_mode is KVQuantMode.NONE:
        for name in packing.names():
            if _writes(isa, spec.dtype, spec.block_size, spec.head_size, name):
                return name
    return f"vllm-{vllm.__version__}-{isa}-{vllm_config.cache_config.cache_dtype}"


def _isa(vllm_config: Any, page: int, dim: int) -> str:
    """The instruction set that vLLM's attention for CPUs chooses."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = vllm_config.cache_config.cache_dtype
    return str(_get_attn_isa(vllm_config.model_config.dtype, page, dim, cache_dtype))


def _writes(isa: str, dtype: torch.dtype, page: int, dim: int, name: str) -> bool:
    """Whether the attention for CPUs writes its pages in that packing, tested by letting it write one."""
    from vllm import _custom_ops

    if not packing.fits(name, page, dim):
        return False
    numbers = torch.Generator().manual_seed(page)
    key, value = torch.randn(2, page, 1, dim, generator=numbers).to(dtype)
    into = torch.zeros(2, 1, 1, page, dim, dtype=dtype)
    _custom_ops.cpu_attn_reshape_and_cache(key, value, into[0], into[1], torch.arange(page), isa)
    return all(
        torch.equal(packing.unpack(found[0, 0], name, bool(i)), true[:, 0])
        for i, (found, true) in enumerate(zip(into, (key, value), strict=True))
    )


def _check_isa(vllm_config: Any, layers: Sequence[str], tensor: torch.Tensor, group: Group) -> None:
    """Raises LayoutError if a layer packs differently from what the scheduler assumes."""
    if group.kind is Kind.MLA:
        return
    supposed = _isa(vllm_config, tensor.shape[2], group.head_dim)
    for name in layers:
        isa = getattr(vllm_config.compilation_config.static_forward_context[name], "isa", None)
        if isa != supposed:
            raise LayoutError(f"{name} packs its pages for {isa!r}, where {supposed!r} was expected: a miss, always")


def _page(name: str, page: int) -> int:
    return _PLAIN_PAGE if name == "plain" and page % _PLAIN_PAGE == 0 else page


def _others(own: Layout) -> tuple[Layout, ...]:
    """The same blocks in every other known packing, as other engines would have stored them."""
    group = own.groups[0]
    if len(own.groups) > 1 or group.parts == 1 or not packing.known(group.packing):
        return ()
    page = _CPU_PAGE if group.packing == "plain" else group.page
    return tuple(
        Layout((replace(group, packing=name, page=_page(name, page)),), own.block_tokens)
        for name in packing.names(group.dtype)
        if name != group.packing and packing.fits(name, page, group.head_dim) and own.block_tokens % page == 0
    )
