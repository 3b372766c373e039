"""The Triton kernel that gathers scattered pages into staging memory, and scatters them back.

One program copies one head of one page of one section: an atom. It is contiguous in staging; in the engine's memory it
has one row per token. Words of 8 bytes are moved where all strides and addresses are multiples of 8, else smaller ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["move_pages"]


@triton.jit  # type: ignore[untyped-decorator]
def move_pages(  # type: ignore[no-untyped-def]  # the compiler reads the signature, not mypy
    bases,  # address of each section in the engine's memory
    numbers,  # page numbers, block by block
    staging,
    first,  # the first section that is in staging
    page_stride,
    head_stride,
    token_stride,
    dim_stride,
    each,  # pages per block
    block_words,  # in staging
    section_words,
    head_words,
    HEADS: tl.constexpr,  # noqa: N803 - Triton constants are upper case
    DIM: tl.constexpr,  # noqa: N803 - words per row
    ATOM: tl.constexpr,  # noqa: N803 - words per atom
    STEP: tl.constexpr,  # noqa: N803
    GATHER: tl.constexpr,  # noqa: N803 - else scatter
):
    entry = tl.program_id(0)
    section = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    page = tl.load(numbers + entry)
    base = tl.load(bases + first + section).to(staging.dtype)
    rows = base + page * page_stride + head * head_stride
    block = staging + (entry // each).to(tl.int64) * block_words + section * section_words + head * head_words
    atom = block + (entry % each) * ATOM
    for start in range(0, ATOM, STEP):
        i = start + tl.arange(0, STEP)
        here = rows + (i // DIM) * token_stride + (i % DIM) * dim_stride
        if GATHER:
            tl.store(atom + i, tl.load(here, mask=i < ATOM), mask=i < ATOM)
        else:
            tl.store(here, tl.load(atom + i, mask=i < ATOM), mask=i < ATOM)
