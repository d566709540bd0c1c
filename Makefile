# `make demo` and `make test` need Python 3.11 or later and nothing else: both make .venv when there is none.
# Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The package itself is built with the setuptools that constraints.txt pins, so pip fetches no second one.
INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt
SKGP := $(INSTALL) --no-build-isolation --editable
PACKAGING := setup.py constraints.txt

# The user's own table: make demo DATA=file.csv TARGET=column
DATA ?=
TARGET ?=
# Tests of the parts below the models that need no long fits.
FAST := $(filter-out tests/test_doc.py,$(wildcard tests/test_*.py)) tests/linalg tests/kernels tests/likelihoods tests/inference
# Anything to hand to pytest: make test PYTEST_ARGS="-k kernels"
PYTEST_ARGS ?=

.PHONY: help demo test test-fast lint format doc bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    fit and score QSGPRegressor on real data (DATA=file.csv TARGET=column for yours)"
	@echo "make test    the default test suite     make test-fast  what runs in a minute and a half of it"
	@echo "make lint    ruff check, ruff format --check, mypy       make format  apply ruff"
	@echo "make doc     the documentation, in doc/_build/html"
	@echo "make bench   the benchmarks"
	@echo "make clean   remove everything that the above made"

demo: $(VENV)/.plot
	$(BIN)/python examples/quickstart.py $(if $(DATA),--data "$(DATA)") $(if $(TARGET),--target "$(TARGET)")

test: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(PYTEST_ARGS)

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(FAST) $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

doc: $(VENV)/.doc
	$(BIN)/python -m sphinx -W --keep-going -b html doc doc/_build/html

bench: $(VENV)/.bench
	$(BIN)/python -m pytest $(wildcard tests/benchmarks/bench_*.py) -m benchmark $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist skgp.egg-info doc/_build doc/auto_examples doc/api/generated doc/api/backreferences doc/methods/defaults.csv
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks predictions.png
	find skgp tests examples doc -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes before the rest, by itself and pinned: where a CPU build is on offer it is taken here, and
# nothing later pulls the CUDA libraries in. Each stamp holds when its packages are all installed.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "skgp needs Python >= 3.11; this is " + sys.version.split()[0] + ". Give another with PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools torch
	touch $@

$(VENV)/.plot: $(VENV)/.torch $(PACKAGING)
	$(SKGP) .[plot]
	touch $@

$(VENV)/.dev: $(VENV)/.torch $(PACKAGING)
	$(SKGP) .[plot,progress,mcmc,distributed,dev]
	touch $@

$(VENV)/.doc: $(VENV)/.torch $(PACKAGING)
	$(SKGP) .[plot,doc]
	touch $@

$(VENV)/.bench: $(VENV)/.torch $(PACKAGING)
	$(SKGP) .[plot,progress,mcmc,distributed,dev,bench]
	touch $@
