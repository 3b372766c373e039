"""The README and the comparison: what they say works is tested, what they call planned is not there, and their
figures are those of the records."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from bench import readme
from kvtide import cli
from kvtide import config as configuration
from kvtide.benchmarks.record import BenchRecord
from kvtide.engines.transformers.attached import Attached
from tests.engines.models import tiny
from tests.test_docs import ROOT, code

README = ROOT / "README.md"
COMPARISON = ROOT / "docs/comparison.md"
SYSTEMS = ["kvtide", "vLLM's offloading", "LMCache", "SGLang HiCache", "Mooncake Store", "Dynamo KVBM"]


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, with the head and without the line under it."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    split = [[[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()] for part in found]
    return [[table[0], *table[2:]] for table in split]


def table(page: Path, first: str) -> list[list[str]]:
    """The rows of the table whose first column has that head."""
    (found,) = (table[1:] for table in tables(page.read_text()) if table[0][0] == first)
    return found


# -- what is there ----------------------------------------------------------------------------------------------


def test_what_works_is_tested() -> None:
    works = table(README, "works")
    assert len(works) >= 10
    for what, tested in works:
        files = re.findall(r"`([^`]+)`", tested)
        assert any(file.startswith("tests/") for file in files), what
        for file in files:
            assert (ROOT / file).is_file(), f"{what}: there is no {file}"


def test_what_is_planned_is_not_there() -> None:
    planned = table(README, "planned, not there today")
    assert len(planned) >= 5
    for what, place in planned:
        folder = ROOT / place.strip("`")
        assert folder.parent.is_dir() or folder.parent.parent.is_dir()
        assert not any(folder.parent.glob(f"{folder.name}*")), (
            f"{what}: {place} is there. Say in README.md and docs/comparison.md that it works, and how it is tested"
        )


def test_every_picture_is_there_in_both_versions_and_is_one() -> None:
    text = README.read_text()
    shown = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(shown) == 4
    assert {name.removesuffix("-light.svg") for name in shown if name.endswith("-light.svg")} == {
        name.removesuffix("-dark.svg") for name in shown if name.endswith("-dark.svg")
    }
    for name in shown:
        picture = ET.parse(ROOT / name).getroot()
        assert picture.tag == "{http://www.w3.org/2000/svg}svg"
        assert picture.find("{http://www.w3.org/2000/svg}title") is not None
    assert len(re.findall('<img [^>]*alt="[^"]+"', text)) == 2


@pytest.mark.parametrize("page", ["README.md", "docs/comparison.md", "docs/commands.md", "docs/python.md"])
def test_links_into_a_page_lead_to_a_heading(page: str) -> None:
    for target, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", (ROOT / page).read_text()):
        text = ((ROOT / page).parent / target if target else ROOT / page).read_text()
        titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        known = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert heading in known, f"{page}: {target}#{heading}"


def test_it_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


# -- the quickstarts --------------------------------------------------------------------------------------------


def test_the_lines_for_vllm_are_those_of_its_page_and_of_the_command() -> None:
    (lines,) = (part for part in code(README, "sh") if "vllm serve" in part)
    (serve,) = (line for line in lines.splitlines() if line.startswith("vllm serve"))
    assert any(serve in part for part in code(ROOT / "docs/vllm.md", "sh"))
    (export,) = (line.split("#")[0].split()[1:] for line in lines.splitlines() if line.startswith("export"))
    config = configuration.read(env=dict(word.split("=", 1) for word in export))
    assert (config.dram.budget, config.engine.store) == (16 << 30, "through")


def test_the_lines_for_transformers_run_and_load_a_known_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVTIDE_CONFIG", raising=False)
    monkeypatch.setenv("KVTIDE_DRAM_BUDGET", "64MiB")
    (lines,) = code(README, "python")
    model = tiny()
    tokens = torch.arange(600)[None] % 500 + 2
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    names: dict[str, object] = {"__name__": "readme", "model": model, "inputs": inputs}
    exec(compile(lines, "README.md", "exec"), names)
    attached = names["attached"]
    assert isinstance(attached, Attached)
    try:
        attached.flush()
        assert attached.statistics().cached_tokens == 0
        again = model.generate(**inputs, max_new_tokens=100)  # type: ignore[operator]
        assert attached.statistics().cached_tokens == 512
        first = names["output"]
        assert isinstance(first, torch.Tensor)
        assert torch.equal(again, first)
    finally:
        attached.detach()


def test_the_commands_of_the_page_exist() -> None:
    (told,) = (part[1:] for part in tables((ROOT / "docs/commands.md").read_text()))
    names = {name for row in told for name in re.findall(r"`(?:kvtide )?([a-z]+)", row[0])}
    assert len(names) > 10
    for name in names:
        assert CliRunner().invoke(cli.app, [name, "--help"]).exit_code == 0, name


# -- figures ----------------------------------------------------------------------------------------------------


def test_figures_and_pictures_are_those_of_the_records() -> None:
    for file, content in readme.files().items():
        assert file.read_text() == content, f"{file.relative_to(ROOT)}: run python -m bench.readme"


def test_the_figures_in_the_text_are_those_of_the_records() -> None:
    figures = readme.Figures()
    more = {name: 100 * (figures[f"vllm-cold-{name}"].ours - 1) for name in ("decode", "batch", "decode-new-node")}
    text = " ".join(README.read_text().split())
    assert f"cost {more['decode']:.1f} to {more['batch']:.1f} % more time on an H200" in text
    assert f"({more['decode-new-node']:.0f} % for decoding in the first minutes of a new node" in text
    times = [figures[f"nvme-{name}"].ours / figures[f"nvme-{name}"].peers[peer] for name, peer in CPU_OF_LOADS]
    assert f"reading a disk takes {min(times):.1f} to {max(times):.1f} times the CPU time of its peers" in text
    peer = figures["nvme-load-cpu-32mib"].peers["lmcache fs_native_odirect"]
    assert f"{figures['nvme-load-cpu-32mib-shared'].ours / peer:.1f} times into a node" in text


CPU_OF_LOADS = [("load-cpu-2mib", "vllm fs"), ("load-cpu-32mib", "lmcache fs_native_odirect")]


# -- beside other systems ---------------------------------------------------------------------------------------


def test_the_readme_has_the_overview_of_the_comparison() -> None:
    both = [
        page.read_text().split("<!-- overview -->")[1].split("<!-- /overview -->")[0] for page in (README, COMPARISON)
    ]
    assert both[0] == both[1]
    assert tables(both[0])[0][0][1:] == SYSTEMS


def test_every_fact_about_a_system_names_its_source() -> None:
    facts = [table[1:] for table in tables(COMPARISON.read_text()) if table[0] == ["system", "fact", "source"]]
    assert len(facts) >= 9
    for part in facts:
        assert [row[0] for row in part] == SYSTEMS
        for system, fact, source in part:
            assert (fact == "not known") != bool(source), f"{system}: {fact}"
        for file in re.findall(r"`(tests/[^`]+)`", part[0][2]):
            assert (ROOT / file).is_file(), file


def test_what_is_worse_is_told() -> None:
    """Every record in which a peer is ahead of kvtide is on the page."""
    told = {name for _, name, _ in readme.TASKS}
    for record in readme.Figures():
        best = (min if record.better == "lower" else max)([record.ours, *record.peers.values()])
        assert best == record.ours or record.name in told, f"{record.name} is not in TASKS of bench/readme.py"
    assert "times worse**" in COMPARISON.read_text()


def test_a_task_measured_without_its_peer_is_left_out(tmp_path: Path) -> None:
    """As after ``python -m bench --no-peers``."""
    shutil.copytree(readme.RESULTS, tmp_path / "results")
    file = tmp_path / "results" / "dram-store-32mib.json"
    record = msgspec.json.decode(file.read_bytes(), type=BenchRecord)
    assert record.peers
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, peers={})))
    before, after = (readme.beside_peers(readme.Figures(where)) for where in (readme.RESULTS, tmp_path / "results"))
    assert len(after.splitlines()) == len(before.splitlines()) - 1
    assert "store 32 MiB" in before
