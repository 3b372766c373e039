"""``docs/benchmarks.md`` and its charts are what the records in ``bench/results`` say, the unfavourable ones too."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from bench.claims import Found, charts
from bench.report import FORMS, MACHINES, PAGE, PLOTS, REASONS, ROOT, beside, forms, missed, page, read_all, target
from kvtide.benchmarks.record import BenchRecord

FOUND = read_all()
RECORDS = [(machine, r) for machine, mine in FOUND.items() for r in mine.values()]
REGENERATE = "is not what the records say: python -m bench --report"


def changed(machine: str, name: str, **values: Any) -> Found:
    """All records, one of them with other values."""
    return {
        at: {n: msgspec.structs.replace(r, **values) if (at, n) == (machine, name) else r for n, r in mine.items()}
        for at, mine in FOUND.items()
    }


def listed(text: str) -> list[tuple[str, str]]:
    """Figure and machine of each row in the list of misses."""
    part = text.split("\n## What we miss\n")[1].split("These have no target")[0]
    rows, group = [], ""
    for line in part.splitlines():
        if found := re.match(r"- `([^`]+)`, (.+?): ", line):
            rows.append((found[1], found[2]))
        elif found := re.match(r"- (.+?), `([^`]+)`: ", line):
            rows.append((found[2], found[1]))
        elif found := re.match(r"- (.+?), [0-9]+ figures\. ", line):
            group = found[1]
        elif found := re.match(r"    - `([^`]+)`: ", line):
            rows.append((found[1], group))
    return rows


def test_page_and_charts_are_what_the_records_say() -> None:
    assert PAGE.read_text() == page(FOUND), f"docs/benchmarks.md {REGENERATE}"
    assert FORMS.read_text() == forms(list(FOUND[""].values())), f"docs/compression.md {REGENERATE}"
    for name, text in charts(FOUND).items():
        assert (PLOTS / f"{name}.svg").read_text() == text, f"docs/plots/{name}.svg {REGENERATE}"


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(file.read_text() for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    assert [file.name for file in PLOTS.iterdir() if f"plots/{file.name}" not in pages] == []


@pytest.mark.parametrize(
    ("machine", "name", "values", "says"),
    [
        ("h200", "gpu-first-token-128k", {"ours": 9.87}, "comes after 9.87 s from DRAM"),
        ("h200", "gpu-first-token-128k-against-computing", {"ratio": 2.34}, "2.34 times sooner"),
        ("h200-first-token", "overlap-default", {"ours": 9.87}, "its first token after 9.87 s"),
        ("h200", "gpu-out-llama-3-8b", {"ours": 5.495}, "to DRAM at 10 % of"),
        ("h200-first-token", "vllm-cold-batch", {"ours": 1.25}, "takes 25 % longer for a batch"),
    ],
)
def test_a_claim_says_its_record(machine: str, name: str, values: dict[str, float], says: str) -> None:
    (sentence,) = [line for line in page(changed(machine, name, **values)).splitlines() if says in line]
    assert sentence.startswith("**")
    assert says not in page(FOUND)


def test_charts_draw_the_records_and_computing_beside_each_load() -> None:
    other = charts(changed("h200", "gpu-first-token-128k", ours=9.87))
    assert "9.87 s loaded" in other["first-token-dram"]
    for name, text in charts(FOUND).items():
        told = ElementTree.fromstring(text).findtext("{*}desc")
        assert told is not None
        for group in told.split("; "):
            assert not name.startswith("first-token") or re.search(r" s computed, ", group), f"{name}: {group}"


def test_all_misses_are_listed_and_nothing_else() -> None:
    expected = [(r.name, MACHINES[machine]) for machine, r in RECORDS if r.met is False]
    assert sorted(listed(page(FOUND))) == sorted(expected)
    more = changed("", "match-list", met=False)
    assert ("match-list", MACHINES[""]) in listed(page(more))
    assert len(listed(page(more))) == len(expected) + 1


def test_reasons_are_told_of_misses_alone() -> None:
    assert set(REASONS) <= {(machine, r.name) for machine, r in missed(FOUND)}


@pytest.mark.parametrize("met", [True, None])
def test_a_run_that_did_not_do_what_it_measures_cannot_be_recorded_as_met(met: bool | None) -> None:
    record = BenchRecord(
        name="x", unit="s", better="lower", ours=1.0, spread=(1.0, 1.0), rounds=1, command="test", machine="test",
        met=False, exercised=False, reason="nothing was loaded",
    )  # fmt: skip
    with pytest.raises(ValueError, match="x was not exercised"):
        msgspec.structs.replace(record, met=met)
    with pytest.raises(ValueError, match="x was not exercised"):
        msgspec.structs.replace(record, reason="")
    stored = msgspec.to_builtins(record) | {"met": met}
    with pytest.raises(msgspec.ValidationError, match="x was not exercised"):
        msgspec.json.decode(msgspec.json.encode(stored), type=BenchRecord)


def test_no_row_shows_a_run_that_did_nothing_as_met() -> None:
    for machine, r in RECORDS:
        idle = {"met": False, "exercised": False, "reason": "nothing was loaded: of 3 rounds"}
        assert target(msgspec.structs.replace(r, **idle)) == "**missed: nothing was loaded**"
        if r.exercised:  # a speed of nothing, or reads of nothing as the limit, are values of a run that did nothing
            assert r.limit != 0, f"{machine} {r.name}"
            assert r.ours > 0 or not r.unit.endswith("B/s"), f"{machine} {r.name}"
    old = [target(r) for _, r in RECORDS if r.name.startswith("gpu-first-token-nvme-raw")]
    assert old == ["**missed: nothing was loaded**"] * 4


def test_only_what_hardware_cannot_exceed_is_named_a_limit() -> None:
    for machine, r in RECORDS:
        if r.limit is not None and beside(r)[1]:
            # Rounds differ, so a little more than the limit may be seen.
            better = r.ours / r.limit if r.better == "higher" else r.limit / r.ours
            assert better < 1.05, f"{machine} {r.name} is {better:.2f} times what is named a limit"
            assert "memcpy" not in r.against


def test_charts_are_inside_their_pictures() -> None:
    for name, text in charts(FOUND).items():
        picture = ElementTree.fromstring(text)
        width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
        for part in picture.iter("{*}text"):
            assert 0 < float(part.attrib["x"]) < width, f"{name}: {part.text}"
            assert 0 < float(part.attrib["y"]) < height, f"{name}: {part.text}"
        for part in picture.iter("{*}rect"):
            assert float(part.get("x", 0)) + float(part.attrib["width"]) <= width, name
