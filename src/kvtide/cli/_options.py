"""Options that several commands have."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

__all__ = ["ConfigFile", "choice", "number", "seconds", "size", "socket_of", "whole"]

E = TypeVar("E", bound=StrEnum)

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Read this file instead of $KVTIDE_CONFIG or ./kvtide.toml."),
]

_LONGEST = 1e9
"""Seconds that an option may be: the system's calls cannot wait for much longer."""


def seconds(text: float | str) -> float:
    """The value of an option that is a time."""
    from kvtide.errors import ConfigError
    from kvtide.units import parse_duration

    try:
        value = parse_duration(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    if value > _LONGEST:
        raise typer.BadParameter(f"{text} is more than {_LONGEST:g} seconds")
    return value


def size(text: int | str) -> int:
    """The value of an option that is a number of bytes."""
    from kvtide.errors import ConfigError
    from kvtide.units import parse_size

    try:
        return parse_size(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def socket_of(address: str, elsewhere: str) -> Path:
    """The socket of a node that an argument names, with or without ``unix:``. Raises ConfigError for an address over
    HTTP, with what to do ``elsewhere``: on the host of that node."""
    from kvtide.errors import ConfigError

    if "://" in address:
        raise ConfigError(f"{address} is no socket; {elsewhere}")
    path = Path(address.removeprefix("unix:"))
    if not path.name:
        raise ConfigError(f"{address!r} is no socket: name the node's, kvtide.sock say")
    return path


def choice(known: type[E]) -> Callable[[E | str], E]:
    """The value of an option that is one of some words."""

    def parse(text: E | str) -> E:
        try:
            return known(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is none of {', '.join(known)}") from None

    return parse


def whole(least: int, most: int | None = None) -> Callable[[int | str], int]:
    """The value of an option that is a whole number."""

    def parse(text: int | str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= (value if most is None else most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise typer.BadParameter(f"{text!r} is not a whole number {limits}")
        return value

    return parse


def number(least: float, below: float = math.inf) -> Callable[[float | str], float]:
    """The value of an option that is a number of any kind."""

    def parse(text: float | str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < below:
            limits = f", and below {below:g}" if math.isfinite(below) else ""
            raise typer.BadParameter(f"{text!r} is not a number of at least {least:g}{limits}")
        return value

    return parse
