"""The identity of a model in memory: the same for the same weights, another after every change."""

from __future__ import annotations

import pytest
import torch

from kvtide import canonical
from kvtide.engines.identity import Weights, settings
from kvtide.errors import LayoutError
from kvtide.index.weights import from_parameters
from tests.engines.models import tiny


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
