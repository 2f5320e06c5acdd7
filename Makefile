# Every target sets up .venv by itself, and again when pyproject.toml or constraints.txt change.

PYTHON  ?= python3
WORKERS ?= 2
ARGS    ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS  := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.PHONY: help test lint format types demo figures bench-digits bench-shares bench-retraining bench-rows bench-binomial bench-gram bench-frontier bench-minilm clean bench-advice

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=$(PYTHON) makes .venv; WORKERS=$(WORKERS) test processes; ARGS=... goes to pytest"

# One thread each: thread counts change rounding, and the workers share the cores.
test: $(STAMP)  ## run the tests
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -q $(ARGS)

lint: $(STAMP)  ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)  ## put the code into the house format, with the fixes that are safe
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

types: $(STAMP)  ## check types only
	$(BIN)/mypy

demo: $(STAMP)  ## see it work: find mislabelled digits, and check by retraining; a minute or two
	@$(BIN)/metasketch demo

figures: $(STAMP)  ## draw every figure and table from stored scores, into build/figures
	$(BIN)/python -m benchmarks.figures

bench-digits: $(STAMP)  ## judge the methods on digits (an hour of one core; resumable)
	$(BIN)/python -m benchmarks.digits --seeds 5 --store build/digits

bench-shares: $(STAMP)  ## compare what the paper's methods capture of exact rows
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m benchmarks.shares

bench-retraining: $(STAMP)  ## measure retraining together against one by one
	$(BIN)/python -m benchmarks.retraining

bench-rows: $(STAMP)  ## measure the cost of exact rows; ARGS=--memory: the peak of memory
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/rows.py $(ARGS)

bench-binomial: $(STAMP)  ## count the steps that 2,000 steps under 20 states take again
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/binomial.py

# Where the allocator keeps its memory, gradients of 80 MB need no new pages: twice as fast.
bench-gram: $(STAMP)  ## make a Gram matrix of 1,000 queries of ten million parameters in 4 GiB
	MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824 OMP_NUM_THREADS=2 $(BIN)/python benchmarks/gram.py --threads 2

bench-advice: $(STAMP)  ## prove the doctor, the advice and the intervals of an audit (half an hour)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m benchmarks.doctor
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m benchmarks.advice
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m benchmarks.calibration

bench-frontier: $(STAMP)  ## judge SAGE and the others at equal sweeps, on real data (hours)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m benchmarks.frontier $(ARGS)

bench-minilm: $(STAMP)  ## attribute a fine-tuned MiniLM, and check it by retraining
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python benchmarks/minilm.py

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) *.metasketch build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: docs docs-serve
docs: $(DOCS)  ## build the documentation into build/docs; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-serve: $(DOCS)  ## read the documentation in a browser, built anew at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

# The stamp goes first and comes back last, so an interrupted set-up is taken up again.
# A .venv without a working pip is made anew.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@echo "Setting up $(VENV); the first time takes minutes."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The site has a stamp of its own: tests do not need what builds it.
$(DOCS): $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
