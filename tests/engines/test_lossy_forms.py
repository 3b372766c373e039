"""Lossy forms: errors within their bounds, nothing that wears off, and broken numbers that stay broken."""

from __future__ import annotations

import math

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtide.block import DTYPES, LOSSY, Group, Kind, run_of
from kvtide.engines.paged.lossy import FORMS, Form

DTYPE = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
NAMES = pytest.mark.parametrize("name", FORMS)
Pair = tuple[Tensor, Tensor]


def room(form: Form, keys: Tensor) -> Tensor:
    """Memory for the heads of ``keys``, full of rubbish."""
    *lead, tokens, dim = keys.shape
    group = Group("full", Kind.FULL, 1, 1, dim, "float32", packing=form.name)
    return torch.full((*lead, group.head_bytes(tokens)), 0xA5, dtype=torch.uint8)


def encoded(form: Form, pair: Pair) -> Tensor:
    heads = room(form, pair[0])
    form.encode(*pair, heads)
    return heads


def decoded(form: Form, heads: Tensor, like: Tensor) -> Pair:
    pair = torch.full_like(like, 7.0), torch.full_like(like, 7.0)
    form.decode(heads, *pair)
    return pair


@st.composite
def vectors(draw: st.DrawFn) -> Pair:
    """Keys and values ``[head, token, dim]``: some channels larger than others, of any size, some rows all the same."""
    dim = draw(st.sampled_from([16, 32, 64, 80, 96, 128]))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 9)), dim
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype, size = draw(DTYPE), 10.0 ** draw(st.integers(-3, 2))
    pair = []
    for _ in range(2):
        numbers = torch.randn(shape, generator=generator) * size
        numbers[..., draw(st.integers(0, dim - 1))] *= draw(st.sampled_from([1.0, 30.0, 0.0]))
        if draw(st.booleans()):
            numbers[:, 0] = draw(st.sampled_from([0.0, size, -size]))
        pair.append(numbers.to(dtype))
    return pair[0], pair[1]


def bound(form: Form, part: int, exact: Tensor) -> Tensor:
    """The largest error that a number may have, before the last rounding."""
    bits, run = LOSSY[form.name][part], run_of(exact.shape[-1])
    runs = exact.float().reshape(*exact.shape[:-1], -1, run)
    greatest = runs.abs().amax(-1, keepdim=True).expand_as(runs)
    if form.name == "fp8":  # half of the last of 4 bits, or of the smallest float8 there is
        limit = torch.maximum(runs.abs() / 16, greatest * 2**-10 / 448)
    elif bits == 4:  # half a step in each direction, turned back
        limit = runs.norm(dim=-1, keepdim=True).expand_as(runs) * math.sqrt(run) / 15
    else:
        limit = greatest / 255
    return (limit + greatest * 2**-8).reshape(exact.shape)


@NAMES
@settings(max_examples=100, deadline=None)
@given(pair=vectors())
def test_the_error_of_every_number_is_bounded(name: str, pair: Pair) -> None:
    form = FORMS[name]
    back = decoded(form, encoded(form, pair), pair[0])
    for part, (exact, found) in enumerate(zip(pair, back, strict=True)):
        error = (found.float() - exact.float()).abs()
        assert (error <= bound(form, part, exact)).all(), (error - bound(form, part, exact)).max()


@NAMES
@settings(max_examples=60, deadline=None)
@given(pair=vectors())
def test_what_goes_out_and_in_again_does_not_wear_off(name: str, pair: Pair) -> None:
    form = FORMS[name]
    heads = encoded(form, pair)
    back = decoded(form, heads, pair[0])
    again = encoded(form, back)
    if 4 not in LOSSY[name]:
        assert torch.equal(again, heads)
    for once, twice in zip(back, decoded(form, again, pair[0]), strict=True):
        length = once.float().norm(dim=-1)
        assert ((twice.float() - once.float()).norm(dim=-1) <= length * 2**-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@NAMES
def test_its_bytes_are_as_many_as_the_layout_says_and_all_of_them_are_written(name: str, dtype: torch.dtype) -> None:
    pair = torch.randn(3, 8, 64).to(dtype), torch.randn(3, 8, 64).to(dtype)
    for rubbish in (0, 0xFF):
        heads = torch.full_like(room(FORMS[name], pair[0]), rubbish)
        FORMS[name].encode(*pair, heads)
        assert torch.equal(heads, encoded(FORMS[name], pair))


@NAMES
@settings(max_examples=30, deadline=None)
@given(pair=vectors(), data=st.data())
def test_parts_of_a_head_are_coded_and_decoded_alone(name: str, pair: Pair, data: st.DataObject) -> None:
    """A load may begin inside a block, and each rank has heads of its own."""
    form, tokens = FORMS[name], pair[0].shape[1]
    heads, cut = encoded(form, pair), data.draw(st.integers(0, tokens))
    whole = decoded(form, heads, pair[0])
    parts = room(form, pair[0])
    for here, at in ((slice(0, cut), 0), (slice(cut, tokens), cut)):
        for head in range(len(heads)):
            form.encode(pair[0][head, here], pair[1][head, here], parts[head], at)
        some = torch.empty_like(pair[0][:, here]), torch.empty_like(pair[1][:, here])
        form.decode(heads, *some, at)
        assert all(torch.equal(part, all_[:, here]) for part, all_ in zip(some, whole, strict=True))
    if 4 not in LOSSY[name]:
        assert torch.equal(parts, heads)
    for part, all_ in zip(decoded(form, parts, pair[0]), whole, strict=True):  # products of few rows round otherwise
        assert (part.float() - all_.float()).norm() <= 0.05 * all_.float().norm()


@NAMES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_run_with_a_broken_number_is_broken_and_no_other(name: str, bad: float) -> None:
    form = FORMS[name]
    for part in range(2):
        pair = torch.randn(2, 4, 128), torch.randn(2, 4, 128)
        whole = decoded(form, encoded(form, pair), pair[0])
        pair[part][1, 2, 70] = bad
        back = decoded(form, encoded(form, pair), pair[0])
        run = slice(64, 128)
        assert back[part][1, 2, run].isnan().all()
        back[part][1, 2, run] = whole[part][1, 2, run]
        assert all(torch.equal(a, b) for a, b in zip(back, whole, strict=True))


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_at_the_ends_of_what_a_dtype_can_hold(name: str, dtype: torch.dtype) -> None:
    form = FORMS[name]
    zeros = torch.zeros(2, 4, 64, dtype=dtype)
    assert not any(p.any() for p in decoded(form, encoded(form, (zeros, zeros)), zeros))
    least = torch.full_like(zeros, torch.finfo(dtype).smallest_normal) * torch.tensor([2**-5, 1.0] * 32, dtype=dtype)
    for found in decoded(form, encoded(form, (least, -least)), zeros):
        assert found.isfinite().all()
        assert (found.abs() <= 2 * least.abs().max()).all()
    if dtype is torch.float16:
        most = torch.full_like(zeros, 65504.0)
        assert all(p.isfinite().all() for p in decoded(form, encoded(form, (most, -most)), zeros))


@NAMES
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), dtype=DTYPE)
def test_any_bytes_are_decoded_to_something(name: str, seed: int, dtype: torch.dtype) -> None:
    form, like = FORMS[name], torch.zeros(2, 4, 64, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randint(0, 256, room(form, like).shape, generator=generator, dtype=torch.uint8)
    once, twice = decoded(form, heads, like), decoded(form, heads, like)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(once, twice, strict=True))


def test_turning_saves_what_one_large_channel_would_crush() -> None:
    """KV of real models has such channels. With 16 steps for all of the run, the other numbers would have none left."""
    values = torch.randn(4, 256, 64, generator=torch.Generator().manual_seed(1))
    values[..., 5] *= 30
    found = decoded(FORMS["k8v4"], encoded(FORMS["k8v4"], (values, values)), values)[1]
    step = values.abs().amax(-1, keepdim=True) / 15 * 2
    straight = (values / step - 0.5).round().add(0.5) * step
    others = [i for i in range(64) if i != 5]
    assert (found - values)[..., others].norm() < 0.5 * (straight - values)[..., others].norm()


GOLDEN = {
    "fp8": "bae05d8b926f4a40",
    "k8v4": "ca62e62020cecde7",
    "r4": "5f0435e92dddc518",
}


@NAMES
def test_the_format_does_not_change(name: str) -> None:
    """Blocks of other hosts and of last year must mean the same: golden bytes, and what they decode to."""
    numbers = (torch.arange(2 * 4 * 64) * 37 % 101 - 50).float().reshape(2, 4, 64)
    heads = encoded(FORMS[name], (numbers, numbers.flip(-1)))
    back = torch.stack(decoded(FORMS[name], heads, numbers))
    found = blake3(heads.numpy().tobytes() + back.numpy().tobytes()).hexdigest(8)
    assert found == GOLDEN[name]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that torch can use")
@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_decodes_the_same_and_codes_nearly_so(name: str, dtype: torch.dtype) -> None:
    form = FORMS[name]
    pair = torch.randn(3, 256, 128).to(dtype), torch.randn(3, 256, 128).to(dtype)
    heads = encoded(form, pair)
    there = torch.empty_like(pair[0], device="cuda"), torch.empty_like(pair[1], device="cuda")
    form.decode(heads.cuda(), *there)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(there, decoded(form, heads, pair[0]), strict=True))
    coded = torch.zeros_like(heads, device="cuda")
    form.encode(pair[0].cuda(), pair[1].cuda(), coded)
    assert (coded.cpu() != heads).float().mean() < 0.01


def test_every_lossy_packing_has_a_form() -> None:
    assert set(FORMS) == set(LOSSY)
    assert not set(FORMS) & set(DTYPES)
