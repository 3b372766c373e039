"""The canonical encoding of values, over which every digest is computed.

Type tags and length prefixes make the encoding injective, so that ``["ab"]`` and ``["a", "b"]`` or ``1`` and ``"1"``
can never collide; sorted mappings make it independent of insertion order. It is part of the identity of every stored
block: a change here is a change of the format, which the tests with golden vectors detect.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

__all__ = ["Value", "encode"]

Value = None | bool | int | float | str | bytes | Sequence["Value"] | Mapping[str, "Value"]


def _framed(tag: bytes, body: bytes) -> bytes:
    return tag + len(body).to_bytes(4, "little") + body


def encode(value: Value) -> bytes:
    """The canonical bytes of ``value``. Raises TypeError for a type that has no canonical form."""
    match value:
        case None:
            return b"n"
        case bool():
            return b"T" if value else b"F"
        case int():
            size = (value.bit_length() + 8) // 8
            return _framed(b"i", value.to_bytes(size, "little", signed=True))
        case float():
            return b"d" + struct.pack("<d", value)
        case str():
            return _framed(b"s", value.encode())
        case bytes():
            return _framed(b"b", value)
        case Mapping():
            if bad := [k for k in value if not isinstance(k, str)]:
                raise TypeError(f"mapping keys must be strings, not {bad[0]!r}")
            items = sorted(value.items())
            return _framed(b"m", b"".join(encode(k) + encode(v) for k, v in items))
        case Sequence():
            return _framed(b"l", b"".join(encode(v) for v in value))
        case _:
            raise TypeError(f"{type(value).__name__} has no canonical form: {value!r}")
