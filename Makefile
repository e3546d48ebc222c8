# Everything sets itself up: `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# Started as a module, so that the pages can import what makes them; its advertisement is left out.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

# A worker keeps to neighbouring tests, which share what they set up, until it has none left. Those
# who forbid Python to keep bytecode would compile the package in every process of every test.
TESTS := -n 3 --dist worksteal
TEST_SETTINGS := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: demo test test-all test-oldest test-libraries test-gpu check scripts docs docs-serve browser bench fuzz clean

demo: $(READY)
	$(BIN)/penstock demo

test: check browser
	$(TEST_SETTINGS) $(BIN)/pytest $(TESTS) -m "not slow"

test-all: check browser
	$(TEST_SETTINGS) $(BIN)/pytest $(TESTS) --hypothesis-profile fresh

# The default tests on the oldest torch that pyproject.toml claims, in an environment of its own.
test-oldest: .venv-oldest/ready browser
	$(TEST_SETTINGS) .venv-oldest/bin/pytest $(TESTS) -m "not slow"

.venv-oldest/ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --constraint constraints-oldest.txt --editable '.[dev]'
	touch $@

# The trainers that run on the drop-in: torchtitan and NeMo AutoModel, in an environment of their own.
# Without the dependencies of the second, which would bring another torch.
test-libraries: .venv-libraries/ready
	$(TEST_SETTINGS) .venv-libraries/bin/pytest tests/dropin/test_libraries.py

.venv-libraries/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-libraries
	.venv-libraries/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]' \
	    torchtitan==0.3.0 spmd_types==0.2.3 torchao triton
	.venv-libraries/bin/pip install --quiet --no-deps nemo-automodel==0.7.0
	touch $@

# Every test that needs CUDA, between several ranks on one GPU too. From the source and with what
# python3 has, so that it runs where nothing can be installed; with .venv where there is one.
GPU_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_SECONDS ?= 900
test-gpu:
	@$(GPU_PYTHON) -c 'import sys, torch; torch.cuda.is_available() or \
	    sys.exit("make test-gpu needs a CUDA device, but torch sees none")'
	OMP_NUM_THREADS=1 PYTHONPATH=src timeout --signal=INT --kill-after=20 $(GPU_SECONDS) \
	    $(GPU_PYTHON) -m tests.gpu

check: $(READY) scripts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The types of the pages' scripts, where Node is installed; TypeScript comes from npm, once.
TYPESCRIPT ?= npx --yes --package typescript@5.9.3 tsc
scripts:
	@if command -v npx > /dev/null; then \
	    $(TYPESCRIPT) -p src/penstock/view/html && $(TYPESCRIPT) -p src/penstock/view/playground; \
	else echo "no Node: the types of scripts are not checked"; fi

# The documentation of this version, into site/VERSION beside others that are there; with a server,
# on which the search box works too.
docs: $(READY)
	$(MKDOCS) build --site-dir "site/$$($(BIN)/python -c 'import penstock; print(penstock.__version__)')"
	$(BIN)/python -m docs_build.versions site

docs-serve: $(READY)
	$(MKDOCS) serve

# The tests of pages need a Chromium: Debian's, where it can be installed; else they are skipped.
browser:
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null \
	|| command -v google-chrome > /dev/null \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && apt-get update -qq \
	     && apt-get install -y -qq --no-install-recommends chromium > /dev/null; } \
	|| echo "no Chromium, and no way to install it: the browser tests will be skipped"

bench: $(READY)
	$(BIN)/python benchmarks/planning.py
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/runtime.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/split_backward.py
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/gpu_step.py
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
	    && $(BIN)/python benchmarks/gpu_ranks.py && $(BIN)/python benchmarks/message_cost.py \
	    && $(BIN)/python benchmarks/llama_ranks.py && $(BIN)/python benchmarks/overlap.py \
	    && $(BIN)/python benchmarks/uneven_ranks.py && $(BIN)/python benchmarks/memory_ranks.py \
	    || echo 'the benchmarks of GPU ranks need a CUDA device'
	PYTHONPATH=. $(BIN)/python benchmarks/solving.py
	$(BIN)/python benchmarks/memory_limits.py
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/planned_step.py
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/faults.py --quick

# Every reader of files for SECONDS each, with Atheris, which has an environment of its own.
SECONDS ?= 60
fuzz: .venv-fuzz/ready
	PYTHONPATH=. .venv-fuzz/bin/python -m fuzz -max_total_time=$(SECONDS)

.venv-fuzz/ready: pyproject.toml
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/pip install --quiet --editable '.[fuzz]'
	touch $@

clean:
	rm -rf .venv .venv-fuzz .venv-libraries .venv-oldest build dist demo-output site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The constraints pin torch, so that pip finds a CPU build where one is offered.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
