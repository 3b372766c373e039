"""The order in which a block is read that several tiers have: one function, for who plans a read and for who makes it.

A plan that expected another node than the one that is read from would compare the wrong seconds with computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["reading_order"]

T = TypeVar("T")

_PROBE = 1 << 20
"""Bytes by which nodes with nothing queued are compared."""


def reading_order(tiers: Sequence[T], node: Callable[[T], bool], seconds: Callable[[T, int], float]) -> Sequence[T]:
    """The tiers as given, but those that are other nodes (``node``) by the ``seconds`` that they would take for so many
    bytes more, with what is queued there."""
    nodes = [tier for tier in tiers if node(tier)]
    if len(nodes) < 2:
        return tiers
    left = iter(sorted(nodes, key=lambda tier: seconds(tier, _PROBE)))
    return [next(left) if node(tier) else tier for tier in tiers]
