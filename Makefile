# Everything sets itself up: `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test test-all check bench clean

demo: $(READY)
	$(BIN)/penstock demo

test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

test-all: check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/planning.py
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/runtime.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/split_backward.py

clean:
	rm -rf .venv build dist demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The constraints pin torch, so that pip finds a CPU build where one is offered.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
