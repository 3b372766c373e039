#!/usr/bin/env bash
# `make test`: everything that must hold, in two rows side by side, for the one waits for disks and sockets half the time,
# and the other for one core: vLLM's tests, then those of other engines, then those of other nodes; and all the rest.
#
# Two rows on two cores starve each other now and then. A file with a failure is run once more when all is quiet, and what
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
trap 'kill $(jobs -p) 2>/dev/null; exit 130' INT TERM

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

engines=(tests/engines tests/serve)
peers=(tests/peers tests/mooncake)
{
    tests vllm "$vllm" tests/engines/vllm
    tests engines "$main" "${engines[@]}"
    tests peers "$main" "${peers[@]}"
} >"$found/engines.log" 2>&1 &
tests rest "$main" "${engines[@]/#/--ignore=}" "${peers[@]/#/--ignore=}" &
wait
echo "== with vLLM, then other engines, then other nodes"
cat "$found/engines.log"

seen=0
again vllm "$vllm" && again engines "$main" && again peers "$main" && again rest "$main" || exit 1
[ "$seen" = 0 ] || echo "== passed alone, and not beside others: mend what is named above"
