"""The Triton kernel that gathers scattered pages into staging memory, and scatters them back.

One program copies one head of one page of one section: an atom, contiguous in staging, in the engine's memory as many
rows as it has tokens. It moves words of 8 bytes where everything is a multiple of 8, else smaller ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["move_pages"]


@triton.jit  # type: ignore[untyped-decorator]
def move_pages(  # type: ignore[no-untyped-def]  # the compiler reads the signature, not mypy
    bases,  # where each section begins in the engine's memory
    numbers,  # of the pages: those of a block, then those of the next
    staging,
    first,  # the first section that is in staging
    page_stride,
    head_stride,
    token_stride,
    dim_stride,
    each,  # pages of a block
    block_words,  # in staging
    section_words,
    head_words,
    HEADS: tl.constexpr,  # noqa: N803 - constants of the compiler's are written so
    DIM: tl.constexpr,  # noqa: N803 - words of a row
    ATOM: tl.constexpr,  # noqa: N803 - words of an atom
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
