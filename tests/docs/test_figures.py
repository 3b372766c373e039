"""Measured figures on pages are those of the records in ``bench/results``, which they name."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from tests.docs.pages import ROOT


@cache
def records() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in sorted((ROOT / "bench/results").glob("*.json")) + sorted(
        (ROOT / "bench/results/elsewhere").glob("*.json")
    ):
        read = json.loads(file.read_text())
        for record in read if isinstance(read, list) else [read]:
            found[record["name"]] = record
    return found


def figures(name: str) -> list[float]:
    """The record's value, and every number that its note has."""
    record = records()[name]
    numbers = re.findall(r"\d+(?:\.\d+)?", record["note"].replace(",", ""))
    return [record["ours"], *map(float, numbers)]


def test_the_table_of_costs_in_the_faq() -> None:
    part = (ROOT / "docs/faq.md").read_text().split("Measured, with nothing to reuse")[1].split("\n## ")[0]
    rows = [line.split("|") for line in part.splitlines() if line.endswith("` |")]
    assert len(rows) >= 6
    for _, _, factor, name, _ in rows:
        for number in re.findall(r"\d\.\d{3,}", factor):
            close = pytest.approx(float(number), abs=0.5 * 10.0 ** -len(number.partition(".")[2]))
            assert any(figure == close for figure in figures(name.strip(" `"))), f"{name}: {number}"


@pytest.mark.parametrize(
    ("page", "said", "name", "value"),
    [
        ("index.md", "takes 0.39 s from DRAM", "gpu-first-token-128k", lambda r: f"takes {r['ours']:.2f} s from DRAM"),
        (
            "index.md",
            "takes 11.8 s, 30.5 times as long",
            "gpu-first-token-128k-against-computing",
            lambda r: f"takes {r['ours'] * r['ratio']:.1f} s, {r['ratio']:.1f} times as long",
        ),
        ("sizing.md", "about 240 bytes", "index-memory", lambda r: f"about {round(r['ours'], -1):.0f} bytes"),
        ("sizing.md", "takes 4.48 s (", "overlap-default", lambda r: f"takes {r['ours']:.2f} s ("),
    ],
)
def test_a_figure_in_the_text(page: str, said: str, name: str, value: Any) -> None:
    text = " ".join((ROOT / "docs" / page).read_text().split())
    assert said == value(records()[name])
    assert said in text
    assert f"`{name.removesuffix('-against-computing')}`" in text
