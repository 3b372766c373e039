#!/usr/bin/env bash
# `make test`: everything that must hold, in rows side by side, for most tests wait for disks and sockets half the time:
# vLLM's tests, which need more than a core, beside all the rest; and when they have ended, those of other engines and
# those of nodes beside each other and the rest.
#
# Rows on two cores starve each other now and then. A file with a failure is run once more when all is quiet, and what
# failed only beside others is named at the end: that is a fault too, of the test at least. What fails alone as well, or
# more than a few files, fails the whole.
#
# For trying the script itself: PYTEST_ARGS narrows the tests.
set -uo pipefail
cd "$(dirname "$0")/.."

main=${VENV:-.venv}/bin/python
vllm=.venv-vllm/bin/python
few=3
found=$(mktemp -d)
trap 'rm -rf "$found"' EXIT
trap 'trap "" TERM; kill 0; exit 130' INT TERM # with the rows that a row has started

# tests NAME PYTHON PYTEST-OPTION...: how it ended, and what failed, is kept under that name.
tests() {
    local name=$1 python=$2
    shift 2
    # shellcheck disable=SC2086  # PYTEST_ARGS are several words on purpose
    "$python" -m pytest -m "not long" -o cache_dir="$found/$name" "$@" ${PYTEST_ARGS:-}
    echo $? >"$found/$name.status"
}

# again NAME PYTHON
again() {
    local name=$1 python=$2 files
    case $(cat "$found/$name.status") in
        0) return 0 ;;
        1) ;; # tests failed
        *) echo "== $name: pytest itself failed" && return 1 ;;
    esac
    mapfile -t files < <("$main" -c "
import json, sys
print(*sorted({test.partition('::')[0] for test in json.load(open(sys.argv[1]))}), sep='\n')
" "$found/$name/v/cache/lastfailed")
    seen=$((seen + ${#files[@]}))
    [ "$seen" -le "$few" ] || return 1
    echo "== failed beside others, and run again alone: ${files[*]}"
    tests "$name" "$python" "${files[@]}"
    [ "$(cat "$found/$name.status")" = 0 ]
}

# Mooncake's library keeps memory for good, which tests of nodes would find, so these are another process.
engines=(tests/engines tests/serve)
peers=(tests/peers tests/mooncake)
{
    tests vllm "$vllm" tests/engines/vllm >"$found/vllm.log" 2>&1
    tests engines "$main" "${engines[@]}" >"$found/engines.log" 2>&1 &
    tests node "$main" tests/node >"$found/node.log" 2>&1
    tests peers "$main" "${peers[@]}" >"$found/peers.log" 2>&1
    wait
} &
tests rest "$main" "${engines[@]/#/--ignore=}" "${peers[@]/#/--ignore=}" --ignore=tests/node &
wait
for name in vllm engines node peers; do
    echo "== $name"
    cat "$found/$name.log"
done

seen=0
again vllm "$vllm" && again engines "$main" && again node "$main" && again peers "$main" && again rest "$main" || exit 1
[ "$seen" = 0 ] || echo "== passed alone, and not beside others: mend what is named above"
