"""The identity of a torch model in memory: its weights, configuration and adapters, as they are now.

A program may train, merge, quantise or patch a model between two calls, and KV of the old weights must not be used with
the new ones. Reading all weights at every call would cost seconds, so there are two checks:

*At every call* a quick check, which takes some milliseconds: it compares a few elements of every tensor, and each
tensor's address, shape, strides and torch's version counter. Elements are needed because a change through ``.data`` is
not counted; the counter, because a sample may miss a change of few elements. The check computes no names of tensors:
these would take longer than all the rest. On a GPU it runs on a stream of its own, so that KV can be loaded meanwhile
under the assumption that the model has not changed.

*When the quick check differs* the weights are named anew, by thousands of elements of every tensor
(``index/weights_identity.py``): the name is the same in every process with the same weights. If torch counted a change
that these elements do not show, the weights get a unique random name. That costs misses, and never a wrong byte.

Not detected are changes that are neither counted nor sampled (a few elements, through ``.data``), and what hooks do to
a model.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvtide.canonical import Value
from kvtide.engines.paged.pages import WORDS
from kvtide.errors import LayoutError
from kvtide.index.weights_identity import WeightsId, from_samples, places

__all__ = ["Moment", "Weights", "adapters", "settings"]

_GLANCE = 64
"""Elements of each tensor that are read at every call."""

_IDLE = {
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "quantization_config",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Parts of a configuration that do not affect KV, or only through the weights and their dtype."""


class _Look(NamedTuple):
    """Properties that show, without reading any tensor, whether the tensors are still the same."""

    keys: Sequence[str] = ()
    """Names under which each module has its child modules, parameters and buffers."""
    places: Sequence[tuple[int, torch.Size, tuple[int, ...], torch.dtype]] = ()
    """Address, shape, strides and dtype of each tensor."""
    changes: Sequence[int] = ()
    """Torch's version counter of each tensor."""


Moment = Mapping[torch.device, torch.cuda.Event]


class Weights:
    """The weights of one model. Thread-safe."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._look = _Look()
        self._devices: set[torch.device] = set()
        """The GPUs that hold the weights."""
        self._seen: list[bytes] = []
        self._sampled = self._name = WeightsId("")
        self._mark = ""

    def moment(self) -> Moment:
        """Events after the work queued so far on the caller's streams."""
        with self._lock:
            devices = [*self._devices]
        return {device: torch.cuda.current_stream(device).record_event() for device in devices}

    def name(self, after: Moment | None = None) -> WeightsId:
        """The name of the weights, which differs after every change. Work queued on streams ``after`` a moment is not
        awaited."""
        with self._lock:
            look, tensors = _look(self._module)
            moved = not self._name or look[:2] != self._look[:2]
            if any(tensor.is_meta for tensor in tensors):
                _ = [*_tensors(self._module)]  # raises an error that names the tensor
            # Created anew each time: a kept view would keep the memory of weights that were moved since.
            views = _views(tensors)
            seen = [_read(group, after or {}) for group in views]
            counted = bool(self._name) and look.changes != self._look.changes
            if moved or counted or seen != self._seen:
                self._rename(counted)
                self._look, self._seen = look, seen
                self._devices = {group[0].device for group in views if group[0].is_cuda}
            return self._name

    def _rename(self, counted: bool) -> None:
        sampled = from_samples((name, tuple(t.shape), _samples(t)) for name, t in _tensors(self._module))
        if counted and sampled == self._sampled:
            # kept from now on: the samples would not show a change back either
            self._mark = f"+{secrets.token_hex(16)}"
        self._sampled = sampled
        self._name = WeightsId(sampled + self._mark)


def _modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The module and all its descendants, each once."""
    found, level = {module: None}, [module]
    while level:
        level = [below for m in level for below in m._modules.values() if below is not None and below not in found]
        found.update(dict.fromkeys(level))
    return list(found)


def _look(module: torch.nn.Module) -> tuple[_Look, list[torch.Tensor]]:
    held = [part for m in _modules(module) for part in (m._modules, m._parameters, m._buffers) if part]
    tensors = [each for part in held for each in part.values() if isinstance(each, torch.Tensor)]
    look = _Look(
        [key for part in held for key in part],
        [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors],
        [0 if t.is_inference() else t._version for t in tensors],
    )
    return look, [tensor.detach() for tensor in tensors]


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise LayoutError(
                f"{name} is not in memory, so the weights cannot be distinguished from others: load all of them"
            )
        yield name, tensor.detach()


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a few elements. The stride is in memory order and, if possible, no two elements share a column."""
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    stride, row = max(1, span // _GLANCE), tensor.shape[-1] if tensor.ndim else 1
    while math.gcd(stride, row) > 1:
        stride -= 1
    return tensor.as_strided((span,), (1,))[::stride]


def _views(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """A few elements of each tensor, grouped by device and width: each group is read by one transfer."""
    alike = defaultdict(list)
    for view in (_few(t) for t in tensors if t.numel()):
        alike[view.device, view.element_size()].append(view.view(WORDS[view.element_size()]))
    return list(alike.values())


def _read(views: Sequence[torch.Tensor], after: Moment) -> bytes:
    """The elements' values after a moment, or else after all work queued on the device's stream."""
    device = views[0].device
    if not views[0].is_cuda:
        return torch.cat([*views]).cpu().numpy().tobytes()
    stream = torch.cuda.Stream(device)
    stream.wait_event(after.get(device) or torch.cuda.current_stream(device).record_event())
    with torch.cuda.stream(stream):
        return torch.cat([*views]).cpu().numpy().tobytes()


def _samples(tensor: torch.Tensor) -> Any:
    flat = tensor.reshape(-1)
    picked = flat[torch.from_numpy(places(len(flat))).to(flat.device)].cpu()
    try:
        return picked.numpy()
    except TypeError:  # numpy has no bfloat16 and no float8
        return picked.view(WORDS[picked.element_size()]).numpy()


def settings(config: Any) -> dict[str, Value]:
    """A model's configuration after overrides, as plain values, without the parts that cannot affect its KV."""
    found = _plain(config.to_dict())
    assert isinstance(found, dict)
    return found


def _plain(value: Any) -> Value:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(k): _plain(v) for k, v in value.items() if k not in _IDLE and not str(k).startswith("_")}
        case list() | tuple() | set():
            return [_plain(v) for v in (sorted(value) if isinstance(value, set) else value)]
        case _:
            return str(value)


def adapters(module: torch.nn.Module) -> str:
    """The active adapters of a model, as PEFT keeps them in its layers; empty if there are none.

    Raises LayoutError if each row of a batch has its own: PEFT selects these by hooks, for one call.
    """
    if not any(map(_adapted, _modules(module))):
        return ""
    layers = [(name, layer) for name, layer in module.named_modules() if _adapted(layer)]
    for name, layer in layers:
        if layer._forward_pre_hooks:
            raise LayoutError(f"{name} has a hook that may choose another adapter for each row")
    return "; ".join(
        f"{name}: {layer._active_adapter} off={layer._disable_adapters} merged={layer.merged_adapters} "
        f"scaling={sorted(getattr(layer, 'scaling', {}).items())}"
        for name, layer in layers
    )


def _adapted(layer: torch.nn.Module) -> bool:
    """Avoids ``hasattr`` on the layer: modules search three more places for an attribute that they do not have."""
    return "_active_adapter" in vars(layer) or hasattr(type(layer), "_active_adapter")
