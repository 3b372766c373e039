"""The members of a cluster: nodes that serve their blocks and said so in the directory."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Member"]


class Member(NamedTuple):
    """A node from a join until its lease ends. Who joins again is another member, with a higher epoch."""

    number: int
    """A small number. It is given again after the member is gone, but only with a higher epoch."""
    epoch: int
    """Greater than that of every member before. It identifies the member: entries of the directory have it."""
    name: bytes
    """The 16 random bytes of the store, as in the welcome of its server: another one at every opening."""
    address: str
    """Where the node serves: ``host:port``."""
