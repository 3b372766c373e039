"""Parses and formats sizes, times, paths and plain values in settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from re import compile as pattern
from typing import Any

from msgspec import Meta, Struct

from kvtide.errors import ConfigError

__all__ = [
    "Unit",
    "bare",
    "cpus",
    "format_duration",
    "format_size",
    "parse_cpus",
    "parse_duration",
    "parse_shares",
    "parse_size",
    "path",
    "plain",
    "shares",
    "size",
    "time",
]

_A_SIZE = "a size such as 4096, 512MiB or 1.5GB"
_A_TIME = "a time such as 2, 250ms, 2s or 5min"
_SHARES = "tenants, each once, and sizes or parts of the budget, such as default:20% or TAG:4GiB"

_CPUS = '"inherit", empty, or numbers of CPUs from 0 to 8191, such as 0-3,8'

_CPU = pattern(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_SHARE = pattern(r"(default|[0-9a-f]{32}):(?:([0-9]{1,3}(?:\.[0-9]{1,6})?)%|(.+))")
_NUMBER = pattern(r"([0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,2})?)\s*([a-zA-Z]*)")
_BYTES = {"B": Fraction(1)} | {f"{p}iB": Fraction(1024**n) for n, p in enumerate("KMGTPE", 1)}
_BYTES |= {f"{p}B": Fraction(1000**n) for n, p in enumerate("kMGTPE", 1)}
_TIMES = {"min": Fraction(60), "s": Fraction(1), "ms": Fraction("1e-3"), "us": Fraction("1e-6")}


def _measure(text: str, units: Mapping[str, Fraction], usual: str, wanted: str) -> Fraction:
    known = {name.lower(): factor for name, factor in units.items()}
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (unit := (match[2] or usual).lower()) not in known:
        raise ConfigError(f"{text!r} is not {wanted}")
    return Fraction(match[1]) * known[unit]


def parse_size(given: int | str) -> int:
    """Whole bytes from ``4096``, ``"4096"``, ``"512 MiB"`` (1024s) or ``"1.5GB"`` (1000s)."""
    return int(_measure(str(given), _BYTES, "B", _A_SIZE))


def format_size(nbytes: int) -> str:
    """The shortest exact text: ``parse_size(format_size(n)) == n`` for any size in use."""
    thousandths = {name: nbytes * 1000 / factor for name, factor in _BYTES.items()}
    exact = {name: int(t) for name, t in thousandths.items() if t >= 1000 and t.denominator == 1}
    texts = (f"{Decimal(t).scaleb(-3).normalize():f} {name}" for name, t in exact.items())
    return min(texts, key=len, default="0 B")


def parse_duration(duration: float | str) -> float:
    """Seconds from ``2``, ``"0.25"``, ``"250ms"``, ``"2 s"`` or ``"5min"``."""
    return float(_measure(str(duration), _TIMES, "s", _A_TIME))


def format_duration(seconds: float) -> str:
    """Readable and exact: ``parse_duration(format_duration(s)) == s`` from nanoseconds to years."""
    for name, factor in _TIMES.items():
        text = f"{seconds / float(factor):.6g} {name}"
        if seconds >= factor and parse_duration(text) == seconds:
            return text
    return f"{bare(float(seconds))} s"


def parse_shares(text: str, whole: int) -> dict[str, int]:
    """Bytes by tenant from ``"default:20% TAG:4GiB"``; percentages are of ``whole``."""
    found: dict[str, int] = {}
    for item in text.replace(",", " ").split():
        match = _SHARE.fullmatch(item)
        if match is None or match[1] in found or Fraction(match[2] or 0) > 100:
            raise ConfigError(f"{item!r} in {text!r} is not {_SHARES}")
        found[match[1]] = int(Fraction(match[2]) * whole / 100) if match[2] else parse_size(match[3])
    return found


def _checked_shares(text: str) -> str:
    parse_shares(text, 0)
    return " ".join(text.replace(",", " ").split())


def parse_cpus(text: str) -> frozenset[int]:
    """The CPUs of ``"0-3,8"``."""
    found: set[int] = set()
    for item in text.replace(",", " ").split():
        match = _CPU.fullmatch(item)
        some = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not some or some[-1] > 8191:
            raise ConfigError(f"{item!r} in {text!r} is not a CPU or a range of CPUs: it must be {_CPUS}")
        found.update(some)
    return frozenset(found)


def _checked_cpus(text: str) -> str:
    if text.strip() == "inherit":
        return "inherit"
    parse_cpus(text)
    return ",".join(text.replace(",", " ").split())


def bare(value: object) -> str:
    """A value in TOML syntax, but text without quotes."""
    text = repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
    return text.lower() if isinstance(value, bool) else text


class Unit(Struct, frozen=True):
    """How a kind of value is written. Calling it creates the metadata of a field of that kind."""

    parse: Callable[[str], object]
    format: Callable[[Any], str]
    wanted: str = ""

    def __call__(self, text: str, **limits: Any) -> Meta:
        return Meta(description=text, extra={"unit": self}, **limits)


cpus = Unit(_checked_cpus, str, _CPUS)
plain = Unit(str, bare)
path = Unit(lambda given: str(Path(given).expanduser()) if given else "", str, "a path")
shares = Unit(_checked_shares, str, _SHARES)
size = Unit(parse_size, format_size, _A_SIZE)
time = Unit(parse_duration, format_duration, _A_TIME)
