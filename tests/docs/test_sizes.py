"""The table of model shapes in ``docs/sizing.md`` is what the code computes from them.

``python -m tests.docs.test_sizes`` writes it.
"""

from __future__ import annotations

from kvtide.block import Group, Kind, Layout
from tests.docs.pages import ROOT

PAGE = ROOT / "docs/sizing.md"
SHAPES = [
    # As in config.json of each: layers, KV heads, numbers in each head.
    ("SmolLM2-135M", 30, 3, 64),
    ("Qwen2.5-0.5B", 24, 2, 64),
    ("Qwen2.5-7B", 28, 4, 128),
    ("Llama-3.1-8B, Mistral-7B", 32, 8, 128),
    ("Qwen3-8B", 36, 8, 128),
    ("Qwen3-30B-A3B", 48, 4, 128),
    ("Qwen3-32B", 64, 8, 128),
    ("Llama-3.3-70B", 80, 8, 128),
]
MLA = [("DeepSeek-V3, DeepSeek-R1", 61, 512 + 64)]


def layouts() -> list[tuple[str, str, Layout]]:
    found = [(name, f"{la} | {h} x {d}", Layout.attention(layers=la, heads=h, head_dim=d)) for name, la, h, d in SHAPES]
    for name, layers, width in MLA:
        found.append(
            (name, f"{layers} | {width} (MLA)", Layout((Group("mla", Kind.MLA, layers, 1, width, "bfloat16"),)))
        )
    return found


def table() -> str:
    lines = [
        "| model | layers | KV heads x head dim | KiB a token | MiB a block | GiB for 131,072 tokens "
        "| tokens in 64 GiB | tokens/s from 5 GB/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, shape, layout in layouts():
        block = sum(geometry.nbytes for geometry in layout.geometry.values())
        token = block / layout.block_tokens
        fits = (64 << 30) // block * layout.block_tokens
        lines.append(
            f"| {name} | {shape} | {token / 1024:.4g} | {block / 2**20:.3g} | {token * 131072 / 2**30:.3g} "
            f"| {fits:,} | {5e9 / token:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def page() -> str:
    before, _, rest = PAGE.read_text().partition("<!-- shapes -->\n")
    return f"{before}<!-- shapes -->\n{table()}<!-- /shapes -->{rest.partition('<!-- /shapes -->')[2]}"


def test_the_table_of_sizes_is_what_the_code_computes() -> None:
    assert PAGE.read_text() == page()


def test_the_formula_of_the_page_is_that_of_the_code() -> None:
    assert "2 x layers x KV heads x head dim x bytes per number" in PAGE.read_text()
    for (_, layers, heads, dim), (_, _, layout) in zip(SHAPES, layouts(), strict=False):
        assert layout.geometry["full"].nbytes == 2 * layers * heads * dim * 2 * 256
    for (_, layers, width), (_, _, layout) in zip(MLA, layouts()[len(SHAPES) :], strict=True):
        assert layout.geometry["mla"].nbytes == layers * width * 2 * 256


if __name__ == "__main__":
    PAGE.write_text(page())
