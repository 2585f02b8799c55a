# Works with GNU Make 3.81, which macOS ships.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.edge0-installed
DOCS_STAMP := $(VENV)/.edge0-docs-installed

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test lint docs clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  PYTHON=$(PYTHON) (3.11 to 3.13)   VENV=$(VENV)   both can be set: make venv PYTHON=python3.13 VENV=/tmp/v"
	@echo "  A Linux machine without a GPU gets the much smaller CPU build of PyTorch by"
	@echo "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make venv"

venv: $(STAMP) ## the virtual environment, at the tested versions (constraints.txt)

# torch==2.13.0 also admits 2.13.0+cpu, and pip prefers that one wherever an index or PIP_FIND_LINKS offers it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "make venv: $(PYTHON) is missing or not Python 3.11 to 3.13; name one: make venv PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	    echo "make venv: '$(PYTHON) -m venv $(VENV)' failed; on Debian, install python3-venv" >&2; exit 1; }
	@echo "make venv: installing into $(VENV), which takes some minutes"
	@$(BIN)/python -m pip install -qq --log $(VENV)/pip.log --disable-pip-version-check -c constraints.txt -e '.[train,runtime,dev]' || { \
	    echo "make venv: pip failed; its message is above, its full log is $(VENV)/pip.log. Mend that and run make again" >&2; exit 1; }
	@touch $@
	@$(BIN)/python -c 'import importlib.metadata as m; print("$(VENV):", *(f"{n} {m.version(n)}" for n in ("torch", "transformers", "mlx", "mlx-lm")))'

quickstart: $(STAMP) ## the whole pipeline on the nano tier, in minutes on a CPU
	OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 $(BIN)/python scripts/quickstart.py

# The environment that tests run in (threads, offline) is set in pyproject.toml, for a bare pytest too.
test: $(STAMP) ## all tests, in two processes; PYTEST_ARGS is passed on
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: $(STAMP) ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(DOCS_STAMP): $(STAMP)
	@$(BIN)/python -m pip install -qq --log $(VENV)/pip.log --disable-pip-version-check --no-build-isolation --no-compile \
	    -c constraints.txt -e '.[docs]' || { \
	    echo "make docs: pip failed; its message is above, its full log is $(VENV)/pip.log. Mend that and run make again" >&2; exit 1; }
	@touch $@

docs: $(DOCS_STAMP) ## the docs site, into build/site; a warning is an error
	$(BIN)/python scripts/build_docs.py

clean: ## removes caches and build outputs; keeps the virtual environment and runs
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
