# `make demo` and `make test` set up all they need: a virtual environment here, and (as root, with apt) Chromium,
# Fashion-MNIST for the tests (with FULL also Slurm). The demo installs only the command line.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLI := $(VENV)/.cli-installed
STAMP := $(VENV)/.installed
# Tests start hundreds of interpreters: each would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo why-slow docs check test test-together test-all chaos format clean

setup: $(STAMP)

# torch first and pinned: any other order may fetch a CUDA build of several gigabytes. Python compiles what is imported at
# its first import; pip would compile all files of all packages, which takes half of the installation.
$(CLI): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[cli]'
	touch $(CLI)

$(STAMP): $(CLI)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(CLI)
	$(BIN)/syncline compare --recipe demo

# Records the cases of docs/why-slow.md again, with their pictures.
why-slow: setup
	$(BIN)/python scripts/why_slow.py

# The site with API pages in build/site, built offline. A broken link or a page that the menu lacks is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: setup
	$(BIN)/ruff format --check src tests scripts examples
	$(BIN)/ruff check src tests scripts examples
	$(BIN)/mypy
	$(MAKE) docs

# Two runs: most tests share the cores, also with the checks; those that measure time (marker `alone`) have the machine
# to themselves.
test: setup
	$(MAKE) --jobs 2 check test-together
	$(BIN)/python -m pytest -m alone $(FULL) $$(grep -rlE 'mark\.alone' tests --include='*.py')

test-together: setup
	sh scripts/system-packages.sh $(FULL)
	$(BIN)/python -m pytest -n 3 --dist loadscope -m "not alone" $(FULL)

# The same with the full tables: every model under every strategy, every number of ranks.
test-all:
	$(MAKE) test FULL=--full

# Faults at random moments that SEED decides, and a soak of SOAK seconds; the table of what happened is committed.
SEED ?= 0
SOAK ?= 60
chaos: setup
	$(BIN)/python -m pytest tests/chaos --chaos --timeout 600 --seed $(SEED) --soak $(SOAK) --record benchmarks/results/chaos.json

format: setup
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build
