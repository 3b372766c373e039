"""The documents are correct: their code runs, their links lead somewhere, their lists are complete.

``python -m tests.test_docs`` regenerates ``docs/configuration.md`` and the catalogue in ``docs/metrics.md``.
"""

from __future__ import annotations

import inspect
import re
from itertools import pairwise
from pathlib import Path

import pytest

from kvtide import Unwritten, config
from kvtide.counts import Count, TierCount
from kvtide.metrics import METRICS
from kvtide.tiers.format.reason import Reason

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LATER = {ROOT / "docs/benchmarks.md"}  # made by `make bench`


def code(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def settings_page() -> str:
    """``docs/configuration.md``, from the settings themselves."""
    lines = [
        "# Configuration",
        "",
        "<!-- Generated from kvtide.config: regenerate it with `python -m tests.test_docs` -->",
        "",
        "This page lists all settings of kvtide, with defaults and allowed values, for those who configure a store,",
        "a node or an engine's connector. Start with a complete file, and check which values apply:",
        "",
        "```sh",
        "kvtide config > kvtide.toml    # a complete, commented file to start from",
        "kvtide config --explain        # the values that apply here, and where each one comes from",
        "```",
        "",
        "Settings come from these sources, and each wins over the ones before it: defaults; `kvtide.toml`, or the file",
        "that `$KVTIDE_CONFIG` names; the environment; arguments of `kvtide.open`. An unknown name is an error that",
        "suggests the nearest known name.",
        "",
        "A `kvtide.toml` in the working directory is read even if neither `--config` nor `$KVTIDE_CONFIG` names it,",
        "but with these restrictions, which do not apply to a file that is named:",
        "",
        "- It must belong to root or to the current user. A file of another user is ignored, with a warning.",
        "- It must not be writable by others: that is an error (`chmod go-w kvtide.toml`). The owner's private group",
        "  may write to it.",
        "- It must not name files or sources of secrets. These settings are an error there, unless they are empty:",
        "  " + ", ".join(f"`{name}`" for name in sorted(config.SECRETS)) + ".",
    ]
    section = ""
    for setting in config.explain(env={}):
        part, _, name = setting.name.partition(".")
        if part != section:
            section = part
            about = getattr(config, part.capitalize()).__doc__
            lines += [
                "",
                f"## [{part}]",
                "",
                f"{about} In the environment: `KVTIDE_{part.upper()}_...`",
                "",
                "| setting | default | what it does | must be |",
            ]
            lines += ["|---|---|---|---|"]
        accepts = config._fields(config._sections()[part])[name].accepts()
        default = setting.text.replace('""', "empty")
        lines.append(f"| `{name}` | {default} | {setting.help} | {accepts} |")
    return "\n".join(lines) + "\n"


def test_the_configuration_page_is_current(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # where no kvtide.toml is
    assert (ROOT / "docs/configuration.md").read_text() == settings_page()


def metrics_page() -> str:
    """``docs/metrics.md`` with the catalogue as it is in the code."""
    start, mark, _ = (
        (ROOT / "docs/metrics.md").read_text().partition("regenerate it with `python -m tests.test_docs` -->\n")
    )
    lines = ["", "| metric | kind | labels | what it is |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = " ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return start + mark + "\n".join(lines) + "\n"


def test_the_catalogue_of_metrics_is_current() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == metrics_page()


def test_the_code_about_the_python_interface_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    parts = code(ROOT / "docs/python.md", "python")
    assert len(parts) >= 3
    names: dict[str, object] = {"__name__": "python_page"}
    for number, part in enumerate(parts):
        exec(compile(part, f"docs/python.md, part {number + 1}", "exec"), names)


def test_the_code_about_hugging_face_models_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (part,) = code(ROOT / "docs/transformers.md", "python")
    exec(compile(part, "docs/transformers.md", "exec"), {"__name__": "transformers"})
    first, second = re.findall(r"cached=\((\d+),\)", capsys.readouterr().out)
    assert (first, int(second) // 256 * 256) == ("0", int(second))
    assert int(second) > 0


def test_the_readme_starts_with_the_two_commands() -> None:
    commands = code(ROOT / "README.md", "sh")[0]
    assert [line.split("#")[0].strip() for line in commands.splitlines()] == ["make demo", "make test"]
    targets = re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_file_names_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith("https://"):
            found = (page.parent / target).resolve()
            assert found.exists() or found in LATER, f"{page.name}: {target}"
    for name in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text):
        assert any((ROOT / base / name).exists() for base in ("src/kvtide", ".")), f"{page.name}: {name}"


def rows(page: str, heading: str) -> set[str]:
    """What stands in code in the first column of the table under a heading."""
    part = (ROOT / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    first = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    return {name for cell in first for name in re.findall(r"`([^`]+)`", cell)}


def source(folder: str) -> str:
    return "\n".join(file.read_text() for file in sorted((ROOT / "src/kvtide" / folder).glob("**/*.py")))


def test_the_glossary_has_every_counter_and_no_other() -> None:
    of_dram = {TierCount.BLOCKS_EVICTED, TierCount.LOAD_QUOTA, TierCount.LOAD_OTHERS_BLOCK}
    counters = {count.of("nvme") for count in TierCount if count is not TierCount.LOAD_QUOTA}
    counters |= {count.of("dram") for count in of_dram} | {*Count}
    assert counters == rows("docs/glossary.md", "Counters")


def test_the_glossary_has_every_reason_why_a_block_is_not_written() -> None:
    assert rows("docs/glossary.md", "Unwritten") == {reason.value for reason in Unwritten}


def test_the_glossary_has_every_reason() -> None:
    told = rows("docs/glossary.md", "Reasons")
    with_more = {Reason.UNREADABLE: "unreadable: E", Reason.ANOTHER_VERSION: "version N"}
    for reason in Reason:
        if reason is not Reason.KEY_UNAVAILABLE:  # always with words of its own
            assert with_more.get(reason, reason.value) in told, reason


def test_the_words_of_the_public_interface_are_in_the_glossary() -> None:
    import kvtide

    told = (ROOT / "docs/glossary.md").read_text()
    methods = {name for name, _ in inspect.getmembers(kvtide.Session, inspect.isfunction) if name[0] != "_"}
    for verb in methods - {"close", "chain", "ended", "write_arguments"}:
        assert f"`{verb}`" in told, verb
    for noun in ("Chain", "Extra", "Group", "Layout", "Load", "Match", "Model", "Session", "Store", "Tenant"):
        assert noun in kvtide.__all__
        assert f"| **{noun}** |" in told, noun


NAMED = re.compile(r"`(tests/[a-z0-9_/]+\.py)::(test_\w+)`")


def claims() -> list[list[str]]:
    """The rows of the table of claims: what is claimed, its tests, its limit."""
    part = (ROOT / "docs/security.md").read_text().split("\n## Claims\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    assert lines[:2] == ["| claim | tests | limit |", "|---|---|---|"]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_claim_has_tests_and_a_limit() -> None:
    assert len(claims()) >= 40
    for row in claims():
        assert len(row) == 3, row
        claim, tests, limit = row
        assert re.match(r"\*\*[A-Z][a-z ]+\*\*: ", claim), claim
        assert NAMED.search(tests), claim
        assert not NAMED.sub("", tests).strip(), f"more than tests: {tests}"
        assert limit == "-" or (len(limit) > 3 and "none known" not in limit), f"{claim}: what is not claimed?"


def test_every_test_that_security_names_is_there() -> None:
    text = (ROOT / "docs/security.md").read_text()
    named = NAMED.findall(text)
    assert len(named) == text.count("::test_"), "one is not written as `path::test`"
    for file, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {name}"


def test_nothing_is_said_to_be_tested_outside_the_table_of_claims() -> None:
    """So that nobody has to look in two places."""
    prose = (ROOT / "docs/security.md").read_text().split("\n## Claims\n")[0]
    assert "tests/" not in prose
    assert "ot claimed:" not in prose, "limits stand in the table"


def test_the_tables_of_the_format_are_those_of_the_code() -> None:
    """Offsets and lengths in the binding document add up, and end where the code's structs end."""
    from kvtide.tiers.format import record
    from kvtide.tiers.nvme import directory, journal

    text = (ROOT / "docs/design/0002-record-format.md").read_text()
    tables = re.split(r"\n\n", text)
    ends = []
    for table in tables:
        spans = [(int(a), int(b)) for a, b in re.findall(r"^\| (\d+) \| (\d+) \|", table, re.MULTILINE)]
        if spans:
            for (at, size), (after, _) in pairwise(spans):
                assert at + size == after, table
            ends.append(spans[-1][0] + spans[-1][1])
    assert ends == [directory._SEGMENT.size, record.TABLE, journal.RECORD.itemsize]
    assert "| 320 | 32 n |" in text
    assert (record.TABLE, record.SECTION.itemsize) == (320, 32)


if __name__ == "__main__":
    (ROOT / "docs/configuration.md").write_text(settings_page())
    (ROOT / "docs/metrics.md").write_text(metrics_page())
