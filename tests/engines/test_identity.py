"""The identity of a model in memory: the same for the same weights, another after every change."""

from __future__ import annotations

import pytest
import torch

from kvtide import canonical
from kvtide.engines.identity import Weights, adapters, settings
from kvtide.errors import LayoutError
from tests.engines.models import tiny
from tests.weights import from_parameters


def test_the_name_is_that_of_the_same_arrays_in_any_process() -> None:
    model = tiny()
    arrays = [(n, t.detach().numpy()) for n, t in (*model.named_parameters(), *model.named_buffers())]
    assert Weights(model).name() == from_parameters(arrays) == Weights(tiny()).name()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_every_dtype_has_a_name_of_its_own(dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(300, 200)
    first = Weights(linear).name()
    with torch.no_grad():
        linear.weight.data = linear.weight.data.to(dtype)
    assert Weights(linear).name() != first


def test_moving_a_tensor_changes_nothing_and_changing_it_does() -> None:
    linear = torch.nn.Linear(300, 200)
    weights = Weights(linear)
    first = weights.name()
    linear.weight.data = linear.weight.data.clone()
    assert weights.name() == first
    linear.weight.data = linear.weight.data.t().contiguous().t()
    assert weights.name() == first, "the same numbers in another order of memory"
    linear.weight.data = linear.weight.data + 1
    assert weights.name() not in ("", first)


def test_a_change_that_was_counted_but_not_sampled_gets_a_name_that_stays() -> None:
    embedding = torch.nn.Embedding(5000, 64)
    weights = Weights(embedding)
    first = weights.name()
    with torch.no_grad():
        embedding.weight[1234, 5] += 1
    changed = weights.name()
    assert changed.startswith(f"{first}+")
    assert weights.name() == changed
    embedding.weight.data.mul_(2)
    embedding.weight.data.mul_(0.5)  # back to where the samples are as at first, but one number is not
    assert weights.name() != first


def test_buffers_count_too() -> None:
    norm = torch.nn.BatchNorm1d(8)
    weights = Weights(norm)
    first = weights.name()
    norm.running_mean.data += 1  # type: ignore[union-attr]
    assert weights.name() != first


def test_weights_that_are_not_in_memory_are_refused() -> None:
    with torch.device("meta"):
        linear = torch.nn.Linear(3, 2)
    with pytest.raises(LayoutError, match="weight is not in memory"):
        Weights(linear).name()


def test_settings_are_plain_and_without_what_changes_no_kv() -> None:
    model = tiny()
    found = settings(model.config)
    canonical.encode(found)
    assert found["rope_parameters"]
    model.config._name_or_path = "elsewhere"
    model.config._attn_implementation = "eager"
    model.config.use_cache = False
    assert settings(model.config) == found
    assert settings(tiny("Qwen2").config) != found


def test_a_tensor_that_is_seen_otherwise_is_another_one() -> None:
    """The same memory, and no change of it: only which number is where is another."""
    linear = torch.nn.Linear(64, 64)
    weights = Weights(linear)
    first = weights.name()
    linear.weight.data = linear.weight.data.t()
    assert weights.name() == Weights(linear).name() != first


def test_tensors_and_modules_that_change_places_get_another_name() -> None:
    pair = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    weights = Weights(pair)
    first = weights.name()
    pair[0], pair[1] = pair[1], pair[0]
    swapped = weights.name()
    assert swapped == Weights(pair).name() != first
    pair[0], pair[1] = pair[1], pair[0]
    assert weights.name() == first
    pair.add_module("late", torch.nn.ReLU())
    assert weights.name() == first, "a module without weights has no part in their name"
    pair[1].weight = torch.nn.Parameter(torch.zeros(64, 64))
    assert weights.name() == Weights(pair).name() != first


def test_weights_that_go_elsewhere_are_refused_until_they_are_back() -> None:
    """As programs do that keep some weights on disk: their places are there, their numbers are not."""
    linear = torch.nn.Linear(64, 64)
    weights, here = Weights(linear), linear.weight
    first = weights.name()
    linear.weight = torch.nn.Parameter(here.to("meta"))
    for _ in range(2):
        with pytest.raises(LayoutError, match="weight is not in memory"):
            weights.name()
    linear.weight = here
    assert weights.name() == first


def test_modules_that_hold_one_another_are_looked_at_once() -> None:
    outer, inner = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    outer.inner, inner.outer = inner, outer
    assert Weights(outer).name() != Weights(inner).name()
    assert adapters(outer) == ""


def test_adapters_are_those_of_the_layers_or_of_their_kind() -> None:
    class Adapted(torch.nn.Linear):
        _active_adapter = ("default",)
        _disable_adapters = False
        merged_adapters = ()

    module = torch.nn.Sequential(torch.nn.Linear(8, 8), Adapted(8, 8))
    assert adapters(module) == "1: ('default',) off=False merged=() scaling=[]"
    vars(module[1])["_active_adapter"] = ("other",)
    assert "other" in adapters(module)
    assert adapters(module[0]) == ""
