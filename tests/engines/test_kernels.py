"""The kernel, run by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernel itself runs, in test_paged", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is imported

from kvtide.engines.paged.kernels import move_pages


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 3, 1, 2, 4), (2, 0, 1, 4, 3)])
@pytest.mark.parametrize("first", [0, 1])
def test_pages_are_gathered_and_scattered(order: tuple[int, ...], first: int) -> None:
    """Two blocks; any order of axes, dims innermost or not; sections from ``first`` on; odd sizes of atoms."""
    sections, _, heads, tokens, dim = sizes = 3, 6, 2, 5, 6
    memory = torch.randint(-(2**60), 2**60, [sizes[a] for a in order])
    engine = memory.permute([order.index(a) for a in range(5)])
    numbers, each, atom, held = [5, 0, 3, 2], 2, tokens * dim, sections - first
    staging = torch.zeros(held * heads * len(numbers) * atom, dtype=torch.int64)
    bases = torch.tensor([s.data_ptr() for s in engine])

    def run(gather: bool) -> None:
        move_pages[(len(numbers), held * heads)](
            bases,
            torch.tensor(numbers),
            staging,
            first,
            *engine[0].stride(),
            each,
            held * heads * each * atom,
            heads * each * atom,
            each * atom,
            HEADS=heads,
            DIM=dim,
            ATOM=atom,
            STEP=8,
            GATHER=gather,
        )

    run(gather=True)
    before = engine.clone()
    blocks = before[first:, numbers].unflatten(1, (-1, each)).permute(1, 0, 3, 2, 4, 5)
    assert torch.equal(staging, blocks.reshape(-1))
    memory.zero_()
    run(gather=False)
    assert torch.equal(engine[first:, numbers], before[first:, numbers])
    assert not engine[:first].any()
    assert not engine[:, [1, 4]].any()
