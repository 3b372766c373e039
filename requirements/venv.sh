#!/usr/bin/env bash
# venv.sh DIR: make a virtual environment there, with the Python that $PYTHON names, or else with the first one on PATH that
# kvtide supports. A Python counts only if it runs (a shim of pyenv may refuse) and can make environments (Debian has the
# module venv, with pip for it, in a package of its own).
set -euo pipefail

able='
import sys
assert (3, 11) <= sys.version_info < (3, 14), "it is Python %d.%d" % sys.version_info[:2]
import venv, ensurepip
'

wrong=""
for python in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if ! command -v "$python" >/dev/null; then
        wrong+="  $python: not found"$'\n'
    elif said=$("$python" -c "$able" 2>&1); then
        exec "$python" -m venv "$1"
    else
        wrong+="  $python: ${said##*$'\n'}"$'\n'
    fi
done
cat >&2 <<END
No Python here can make the virtual environment $1. kvtide needs Python 3.11 to 3.13 with the modules venv and ensurepip:
$wrong
On Debian or Ubuntu: sudo apt install python3-venv. If you have another Python: make PYTHON=/path/to/python3 ...
END
exit 1
