"""What a block is: geometry, prefix rules, who writes which heads, and layouts that cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide import Group, Kind, Layout
from kvtide.block import ALIGN, DTYPES, Geometry, padded
from kvtide.errors import KvtideError, LayoutError

FULL = Group("full", Kind.FULL, 32, 8, 128, "bfloat16")


# -- geometry -----------------------------------------------------------------------------------------------


def test_a_block_of_llama_3_8b_is_32_mib_without_padding() -> None:
    geometry = Layout.attention(layers=32, heads=8, head_dim=128).geometry["full"]
    assert geometry == Geometry(sections=64, section=512 << 10)
    assert geometry.nbytes == geometry.footprint == 32 << 20


@pytest.mark.parametrize(
    ("group", "sections", "section"),
    [
        (Group("full", Kind.FULL, 3, 4, 64, "float32"), 6, 4 * 64 * 32 * 4),
        (Group("latent", Kind.MLA, 3, 1, 576, "float16"), 3, 576 * 32 * 2),
        (Group("near", Kind.WINDOW, 3, 4, 64, "float8_e4m3fn", window=100), 6, 4 * 64 * 32),
        (Group("mamba", Kind.STATE, 3, 4, 4096, "float32"), 3, 4 * 4096 * 4),  # whatever the number of tokens
        (Group("eagle", Kind.DRAFT, 1, 4, 64, "bfloat16"), 2, 4 * 64 * 32 * 2),
    ],
    ids=lambda v: v.name if isinstance(v, Group) else "",
)
def test_each_kind_has_its_shape(group: Group, sections: int, section: int) -> None:
    assert group.geometry(32) == Geometry(sections, section)


@pytest.mark.parametrize(
    ("packing", "head_dim", "key", "value"),
    [
        ("fp8", 128, 128 + 2 * 2, 128 + 2 * 2),  # codes, and a scale of 2 bytes for each run of 64
        ("fp8", 80, 80 + 5 * 2, 80 + 5 * 2),  # 80 is no multiple of 64: runs of 16
        ("k8v4", 64, 64 + 2, 32 + 2),
        ("r4", 128, 64 + 2 * 2, 64 + 2 * 2),
        ("r4", 96, 48 + 3 * 2, 48 + 3 * 2),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_lossy_block_has_a_section_for_each_layer(
    packing: str, head_dim: int, key: int, value: int, dtype: str
) -> None:
    group = Group("full", Kind.FULL, 3, 4, head_dim, dtype, packing=packing)
    assert group.head_bytes(32) == 32 * (key + value)
    assert group.geometry(32) == Geometry(3, 4 * 32 * (key + value))
    assert group.itemsize == 1


def test_a_packing_that_is_not_known_is_as_large_as_its_dtype_makes_it() -> None:
    assert replace(FULL, packing="amx").geometry(256) == FULL.geometry(256)


@given(st.integers(1, 40), st.integers(1, 3 * ALIGN))
def test_sections_start_on_pages_and_padding_is_less_than_a_page(sections: int, section: int) -> None:
    geometry = Geometry(sections, section)
    assert geometry.stride % ALIGN == 0
    assert 0 <= geometry.stride - section < ALIGN
    assert geometry.footprint == sections * geometry.stride
    assert geometry.nbytes == sections * section


@pytest.mark.parametrize(("nbytes", "whole"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_padded_rounds_up(nbytes: int, whole: int) -> None:
    assert padded(nbytes) == whole


# -- prefix rules -------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 64), st.integers(1, 500))
def test_a_prefix_needs_what_its_kind_says(blocks: int, tokens: int, window: int) -> None:
    for kind in (Kind.FULL, Kind.MLA, Kind.DRAFT):
        group = Group("g", kind, 1, 1, 64, "int8")
        assert group.needs(blocks, tokens) == range(blocks)
    state = Group("g", Kind.STATE, 1, 1, 64, "int8")
    assert list(state.needs(blocks, tokens)) == ([blocks - 1] if blocks else [])
    near = Group("g", Kind.WINDOW, 1, 1, 64, "int8", window=window)
    end = blocks * tokens
    seen = {t // tokens for t in range(max(0, end - window), end)}
    assert set(near.needs(blocks, tokens)) == seen


def test_only_a_draft_is_not_required() -> None:
    needed = {k for k in Kind if Group("g", k, 1, 1, 1, "int8", window=int(k is Kind.WINDOW)).required}
    assert needed == set(Kind) - {Kind.DRAFT}


# -- slices -------------------------------------------------------------------------------------------------


def holders(heads: int, ranks: int) -> dict[int, list[int]]:
    """The ranks that hold each head, as tensor parallelism deals them."""
    if ranks <= heads:
        return {h: [h // (heads // ranks)] for h in range(heads)}
    return {h: list(range(h * (ranks // heads), (h + 1) * (ranks // heads))) for h in range(heads)}


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([Kind.FULL, Kind.STATE, Kind.DRAFT]))
def test_every_head_is_written_once_by_the_lowest_rank_that_holds_it(heads: int, ranks: int, kind: Kind) -> None:
    group = Group("g", kind, 1, heads, 64, "int8")
    if max(heads, ranks) % min(heads, ranks):
        with pytest.raises(LayoutError, match=f"{heads} heads cannot be cut for {ranks} ranks"):
            group.slices(ranks)
        return
    slices = group.slices(ranks)
    written = {h: s.rank for s in slices for h in range(s.start, s.stop)}
    assert written == {h: min(who) for h, who in holders(heads, ranks).items()}
    assert sum(s.stop - s.start for s in slices) == heads
    assert len({s.rank for s in slices}) == len(slices), "a rank has one slice"


@pytest.mark.parametrize("ranks", [1, 2, 7, 16])
def test_the_latent_of_mla_is_written_by_rank_0_alone(ranks: int) -> None:
    (only,) = Group("latent", Kind.MLA, 1, 1, 576, "bfloat16").slices(ranks)
    assert (only.rank, only.start, only.stop) == (0, 0, 1)


@pytest.mark.parametrize("ranks", [0, -2])
def test_no_ranks_is_an_error(ranks: int) -> None:
    with pytest.raises(LayoutError, match="cannot be cut"):
        FULL.slices(ranks)


# -- digests ------------------------------------------------------------------------------------------------

OTHERS: list[dict[str, Any]] = [
    {"name": "other"},
    {"kind": Kind.DRAFT},
    {"layers": 31},
    {"heads": 4},
    {"head_dim": 64},
    {"dtype": "float16"},
    {"page": 32},
    {"packing": "amx"},
    {"packing": "fp8"},
    {"packing": "r4"},
    {"kind": Kind.WINDOW, "window": 64},
    {"kind": Kind.WINDOW, "window": 65},
]


def test_whatever_differs_in_a_group_differs_in_the_digest() -> None:
    other = Group("anchor", Kind.FULL, 1, 1, 64, "int8")  # a draft alone is no layout
    found = [Layout((other, replace(FULL, **change))).digest for change in [{}, *OTHERS]]
    assert len(set(found)) == len(found)


def test_the_digest_knows_block_tokens_and_the_order_of_groups() -> None:
    near = Group("near", Kind.WINDOW, 1, 8, 128, "bfloat16", window=64)
    found = [Layout((FULL, near)), Layout((near, FULL)), Layout((FULL, near), 128), Layout((FULL,))]
    assert len({layout.digest for layout in found}) == 4
    assert len(found[0].digest) == 16


def test_equal_layouts_have_equal_digests() -> None:
    assert Layout((replace(FULL),)) == Layout((FULL,))
    assert Layout((replace(FULL),)).digest == Layout.attention(layers=32, heads=8, head_dim=128).digest


# -- what cannot be -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "a b"}, "group name 'a b'"),
        ({"name": "x" * 17}, "16 at most"),
        ({"name": "é"}, "group name 'é'"),
        ({"name": ""}, "group name ''"),
        ({"dtype": "bf16"}, "dtype 'bf16' is none of float32, float16, bfloat16"),
        ({"layers": 0}, "layers is 0, not positive"),
        ({"heads": -1}, "heads is -1, not positive"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"page": 0}, "page is 0"),
        ({"window": 64}, "a window goes with Kind.WINDOW"),
        ({"window": -1}, "a window goes with Kind.WINDOW"),
        ({"kind": Kind.WINDOW}, "a window goes with Kind.WINDOW"),
        ({"kind": Kind.WINDOW, "window": -1}, "a window goes with Kind.WINDOW"),
        ({"kind": Kind.MLA}, "one latent head, not 8"),
        ({"kind": Kind.MLA, "heads": 1, "packing": "r4"}, "'r4' is for keys and values"),
        ({"kind": Kind.STATE, "packing": "fp8"}, "'fp8' is for keys and values"),
        ({"dtype": "int8", "packing": "r4"}, "int8 is small already"),
        ({"head_dim": 72, "packing": "k8v4"}, "a multiple of 16, not 72"),
    ],
)
def test_a_group_that_cannot_be_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        replace(FULL, **change)


@pytest.mark.parametrize(
    ("groups", "tokens", "says"),
    [
        ((), 256, "at least one group"),
        ((FULL, FULL), 256, "two groups have one name"),
        ((replace(FULL, kind=Kind.DRAFT),), 256, "draft groups alone can never be a hit"),
        ((FULL,), 0, "block_tokens is 0"),
        ((FULL,), 100, "100 is not a multiple of group 'full''s page of 16"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(groups: tuple[Group, ...], tokens: int, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        Layout(groups, tokens)


def test_an_unknown_group_is_named_with_those_that_there_are() -> None:
    layout = Layout((FULL, Group("near", Kind.WINDOW, 1, 8, 128, "int8", window=9)))
    assert layout.group("near").window == 9
    with pytest.raises(LayoutError, match="no group 'far'; this layout has full, near"):
        layout.group("far")


def test_layout_errors_are_value_errors_and_ours() -> None:
    assert issubclass(LayoutError, ValueError)
    assert issubclass(LayoutError, KvtideError)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_its_width(dtype: str) -> None:
    group = Group("g", Kind.FULL, 1, 1, 1, dtype, page=1)
    assert group.geometry(1).section == {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)
