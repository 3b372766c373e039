"""Checks the arguments of public methods, before anything is done or sent.

The checks are the same for a store in this process and for one behind a node, so that a wrong argument raises the same
error in both. Numbers of other libraries (``numpy.int64``, ``numpy.float32``) are accepted wherever a number is, and
are converted to Python's own; ``True`` and ``False`` are not numbers here. A wrong type raises ``ArgumentError``, a
value out of range ``LayoutError``.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator
from typing import Any, TypeVar

from kvtide.errors import ArgumentError, LayoutError

__all__ = ["callback", "each", "integer", "items", "kind", "real", "seconds", "text"]

_LONGEST = 1e9
"""Seconds, some 30 years: a longer wait counts as endless, and the system's timers cannot count much further."""

_LARGEST = 1 << 128
"""Larger integers are refused at once: those of some thousand digits cannot even be printed."""

T = TypeVar("T")


def integer(value: Any, name: str) -> int:
    """``value`` as an int. The caller checks its range."""
    if type(value) is int:
        found = value
    else:
        try:
            if isinstance(value, bool) or _is_bool(value):
                raise TypeError
            found = operator.index(value)
        except TypeError:
            raise ArgumentError(f"{name} is {_shown(value)}; give an integer") from None
    if not -_LARGEST <= found < _LARGEST:
        raise LayoutError(f"{name} is {_shown(value)}, which is too large")
    return found


def real(value: Any, name: str) -> float:
    """``value`` as a float that is not NaN; infinity is allowed."""
    if type(value) is float:
        found = value
    elif isinstance(value, bool | str | bytes | bytearray) or _is_bool(value):
        raise ArgumentError(f"{name} is {_shown(value)}; give a number")
    else:
        try:
            found = float(value)
        except OverflowError:
            raise LayoutError(f"{name} is {_shown(value)}, which is too large") from None
        except (TypeError, ValueError):
            raise ArgumentError(f"{name} is {_shown(value)}; give a number") from None
    if math.isnan(found):
        raise LayoutError(f"{name} is not a number (nan)")
    return found


def seconds(value: Any, name: str) -> float | None:
    """A time to wait in seconds, or None. A negative time becomes 0, and infinity a very long time."""
    return None if value is None else min(max(0.0, real(value, name)), _LONGEST)


def text(value: Any, name: str) -> str:
    """``value``, a str that can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise ArgumentError(f"{name} is {_shown(value)}; give a str")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise LayoutError(f"{name} cannot be encoded as UTF-8: {e}") from None
    return value


def kind(value: Any, wanted: type[T], name: str) -> T:
    """``value``, if it is an instance of ``wanted``."""
    if not isinstance(value, wanted):
        raise ArgumentError(f"{name} is {_shown(value)}; give a {wanted.__name__}")
    return value


def items(values: Any, wanted: type[T], name: str) -> list[T]:
    """A list of instances of ``wanted``."""
    return [kind(value, wanted, f"an item of {name}") for value in each(values, name, wanted.__name__)]


def each(values: Any, name: str, wanted: str) -> Iterator[Any]:
    """The items of a sequence that is neither text nor bytes."""
    if not isinstance(values, str | bytes | bytearray | memoryview):
        with contextlib.suppress(TypeError):
            return iter(values)
    raise ArgumentError(f"{name} is {_shown(values)}; give a sequence of {wanted}")


def callback(value: Any, name: str) -> None:
    """Raises if ``value`` cannot be called."""
    if not callable(value):
        raise ArgumentError(f"{name} is {_shown(value)}; give something that can be called")


def _is_bool(value: Any) -> bool:
    """Whether it is another library's boolean."""
    return bool(getattr(getattr(value, "dtype", None), "kind", "") == "b")


def _shown(value: Any) -> str:
    """A value for an error message, shortened."""
    try:
        shown = repr(value)
    except Exception:  # noqa: BLE001 - an int of many digits, or whatever a caller's class does in its repr
        shown = "..."
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"{shown} ({type(value).__name__})"
