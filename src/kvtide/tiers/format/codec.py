"""Converts between a block in memory and its stored sections.

A codec turns each section into the bytes that are stored, and back, without loss. Checksums are always over the stored
bytes, so a record can be checked without knowing its codec, and a section is never decoded before it is verified. A
section that does not shrink is stored unchanged, which is recognised by its stored length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from kvtide.block import Geometry, Span, padded
from kvtide.errors import ConfigError
from kvtide.tiers.format.reason import Reason
from kvtide.tiers.format.record import SECTION, Header, OtherVersion, Rejected, plain, section_table, unchecked_table
from kvtide.tiers.format.scratch import Scratch

__all__ = ["RAW", "Codec", "Scratch", "Zstd", "decode", "encode", "make", "work_of"]

RAW, PLANES, ZSTD = 0, 1, 2
_LARGE = 1 << 20
"""Longer sections are processed in parts of this many bytes. The C library does not return to the system what threads
allocate for whole sections, so each thread would keep several of them for good."""


class Codec(Protocol):
    """One way to store a section. Used by one thread at a time."""

    number: int
    """The codec number of its output."""
    reads: frozenset[int]
    """The codec numbers that it can read."""

    def compress(self, section: Span, itemsize: int) -> bytes: ...

    def compress_into(self, out: Span, section: Span, itemsize: int) -> int:
        """Compress a long section into ``out``, which is as long, using little memory; returns the number of bytes.

        Returns the section's length if it does not shrink; ``out`` holds garbage then.
        """

    def decompress(self, stored: Span, section: Span, itemsize: int, number: int) -> None:
        """Fill ``section`` from the output of the codec with that number. Raises Rejected if that fails."""

    @property
    def work(self) -> Scratch:
        """Memory that it keeps from one long section to the next."""


class Zstd:
    """Compresses the exponents of all numbers together with zstd; signs and mantissas stay unchanged.

    Exponents of KV are much alike: of bfloat16's 8 bits about 2.8 are left. Signs and mantissas are noise, and
    compressing them would only take time. A section becomes byte planes: the first byte of every number, then the
    second, and so on, with the sign moved down next to the mantissa, so that the last plane has exponents alone (or, in
    float16, the exponent and the first bits of the mantissa). That plane is compressed, and the others precede it.

    Records of number 1 were byte planes with the sign in place, all through zstd; they can still be read.
    """

    number = ZSTD
    reads = frozenset({PLANES, ZSTD})

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as e:
            raise ConfigError("codec 'zstd' needs the package zstandard: pip install kvtide[zstd]") from e
        # Exponents repeat by chance only: searching for short repeats takes longer and saves less than coding each.
        parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7)
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._decompressor = zstandard.ZstdDecompressor()
        self._error: type[Exception] = zstandard.ZstdError
        self._content_size: Callable[[Span], int] = zstandard.frame_content_size
        self.work = Scratch()

    def compress(self, section: Span, itemsize: int) -> bytes:
        planes = np.frombuffer(section, np.uint8).reshape(-1, itemsize).T.copy()
        top = planes[-1]
        if itemsize > 1:
            below = planes[-2]
            top, below[:] = top << 1 | below >> 7, top & 0x80 | below & 0x7F
        return b"".join((planes[:-1].data, self._compressor.compress(top)))

    def compress_into(self, out: Span, section: Span, itemsize: int) -> int:
        numbers = np.frombuffer(section, np.uint8).reshape(-1, itemsize)
        count = len(numbers)
        kept = count * (itemsize - 1)
        top = self.work.get(count)
        last = np.frombuffer(top, np.uint8)
        planes = np.frombuffer(out[:kept], np.uint8).reshape(itemsize - 1, count)
        chunks: Any = self._compressor.chunker(size=count, chunk_size=_LARGE)
        end = kept
        for i in range(0, count, _LARGE):
            part = slice(i, i + _LARGE)
            last[part] = numbers[part, -1]
            for plane in range(itemsize - 1):
                planes[plane, part] = numbers[part, plane]
            if itemsize > 1:
                above, below = last[part], planes[-1, part]
                signs = above & 0x80
                np.left_shift(above, 1, out=above)
                above |= below >> 7
                below &= 0x7F
                below |= signs
            for chunk in chunks.compress(top[part]):
                if end + len(chunk) >= len(section):
                    return len(section)
                out[end : end + len(chunk)] = chunk
                end += len(chunk)
        for chunk in chunks.finish():
            if end + len(chunk) >= len(section):
                return len(section)
            out[end : end + len(chunk)] = chunk
            end += len(chunk)
        return end

    def decompress(self, stored: Span, section: Span, itemsize: int, number: int) -> None:
        if len(section) > _LARGE:
            self._decompress_parts(stored, section, itemsize, number)
            return
        numbers = np.frombuffer(section, np.uint8).reshape(-1, itemsize)
        count = len(numbers)
        kept = count * (itemsize - 1) if number == ZSTD else 0
        data = self._whole(stored[kept:], len(section) - kept)
        parts = (np.frombuffer(part, np.uint8).reshape(-1, count) for part in (stored[:kept], data))
        planes: list[npt.NDArray[np.integer]] = [plane for part in parts for plane in part]
        if number == ZSTD and itemsize > 1:
            below, top = planes[-2:]
            planes[-2:] = top << 7 | below & 0x7F, below & 0x80 | top >> 1
        for i, plane in enumerate(planes):
            numbers[:, i] = plane

    def _decompress_parts(self, stored: Span, section: Span, itemsize: int, number: int) -> None:
        numbers = np.frombuffer(section, np.uint8).reshape(-1, itemsize)
        count = len(numbers)
        kept = count * (itemsize - 1) if number == ZSTD else 0
        data = self.work.get(len(section) - kept)
        try:
            got = 0
            if self._content_size(stored[kept:]) == len(data):
                with self._decompressor.stream_reader(stored[kept:]) as reader:
                    while got < len(data) and (size := reader.readinto(data[got : got + _LARGE])):
                        got += size
        except self._error as e:
            raise Rejected(Reason.UNDECODABLE) from e
        if got < len(data):
            raise Rejected(Reason.UNDECODABLE)
        planes = [
            plane for whole in (stored[:kept], data) for plane in np.frombuffer(whole, np.uint8).reshape(-1, count)
        ]
        for i in range(0, count, _LARGE):
            part = slice(i, i + _LARGE)
            parts: list[npt.NDArray[np.integer]] = [plane[part] for plane in planes]
            if number == ZSTD and itemsize > 1:
                below, top = parts[-2:]
                parts[-2:] = top << 7 | below & 0x7F, below & 0x80 | top >> 1
            for k, plane in enumerate(parts):
                numbers[part, k] = plane

    def _whole(self, frame: Span, size: int) -> bytes:
        try:
            if self._content_size(frame) != size:
                raise Rejected(Reason.UNDECODABLE)
            data: bytes = self._decompressor.decompress(frame)
        except self._error as e:
            raise Rejected(Reason.UNDECODABLE) from e
        return data


def work_of(section: int) -> int:
    """Bytes of memory needed to compress or decompress a section of that size, besides its result."""
    return 3 * section if section <= _LARGE else section + 4 * _LARGE


def make(name: str) -> Codec | None:
    """The codec of that name; None for "raw"."""
    return {"raw": lambda: None, "zstd": Zstd}[name]()


def encode(
    span: Span,
    geometry: Geometry,
    itemsize: int,
    header: int,
    codec: Codec | None,
    scratch: Scratch,
    checked: bool = True,
) -> tuple[Span, npt.NDArray[np.void], int]:
    """The payload to write for a block, its section table, and the number of the codec that made it.

    ``header`` is the offset of the payload in the record. A raw payload is ``span`` itself; a compressed one is in
    ``scratch``. If compressing the whole block saves no page, it is raw. If not ``checked``, the table has zeros in
    place of checksums.
    """
    count, size, stride = geometry.sections, geometry.section, geometry.stride
    if codec is not None:
        table = np.zeros(count, SECTION)
        out = scratch.get(geometry.footprint)
        end = 0
        for i in range(count):
            section = span[i * stride : i * stride + size]
            data: Span | bytes
            if size > _LARGE:
                data = out[end : end + codec.compress_into(out[end : end + size], section, itemsize)]
            else:
                data = codec.compress(section, itemsize)
            if len(data) >= size:
                data = section
            if end + padded(len(data)) >= geometry.footprint:
                break
            if size <= _LARGE:
                out[end : end + len(data)] = data
            elif data is section:
                np.copyto(np.frombuffer(out, np.uint8, size, end), np.frombuffer(section, np.uint8))
            out[end + len(data) : end + padded(len(data))] = bytes(padded(len(data)) - len(data))
            table[i] = (header + end, len(data), size, xxh3_128_digest(data) if checked else bytes(16))
            end += padded(len(data))
        else:
            return out[:end], table, codec.number
    usual = plain(geometry, header)
    return span, np.frombuffer(section_table(span, usual), SECTION) if checked else unchecked_table(usual), RAW


def decode(
    header: Header,
    sections: range,
    payload: Span,
    span: Span,
    geometry: Geometry,
    itemsize: int,
    codec: Codec,
) -> None:
    """Fill ``span`` with verified, compressed sections; ``payload`` starts with the first of them."""
    if header.codec not in codec.reads:
        raise OtherVersion(f"codec {header.codec} is not known here")
    table = header.sections[sections.start : sections.stop]
    start = int(table["offset"][0])
    for i, (offset, stored, raw) in enumerate(table[["offset", "stored", "raw"]].tolist()):
        target = span[i * geometry.stride : i * geometry.stride + raw]
        data = payload[offset - start : offset - start + stored]
        if stored == raw:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))
        else:
            codec.decompress(data, target, itemsize, header.codec)
