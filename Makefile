PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-oldest lint types docs bench paper paper-small clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s  %s\n", $$1, $$2}' Makefile

venv: $(STAMP)  ## create .venv and install the package in it, with the pinned versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e '.[test,peers,dask,docs]' -c constraints.txt
	@touch $@

demo: $(STAMP)  ## fit a network on the digits data and compare the schemes with split CP
	$(BIN)/fullconformal demo

test: lint types  ## lint, types, then all tests and docstring examples
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# Files, tables, pages, plots and p-values: where other libraries are touched.
FAST := tests/test_storage.py tests/test_cli.py tests/test_cli_regression.py tests/test_report.py tests/test_plots.py tests/test_pvalues.py tests/test_sets.py tests/test_oob.py
LOWEST := import tomllib; print(*(d.replace('>=', '==') for d in tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))

test-oldest:  ## the tests that touch other libraries, with the lowest versions that pyproject.toml allows
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet $$($(PYTHON) -c "$(LOWEST)") pytest hypothesis mpmath pyarrow
	.venv-oldest/bin/python -m pip install --quiet --no-deps -e .
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -q $(FAST)

lint: $(STAMP)  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict on src
	$(BIN)/mypy

docs: $(STAMP)  ## build the documentation; its gallery runs the examples, a warning is an error
	$(BIN)/sphinx-build -q -W --keep-going docs docs/_build/html
	@echo docs/_build/html/index.html

bench: $(STAMP)  ## print the speed ratios and the peak memory
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/exact.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/wide.py

paper-small: $(STAMP)  ## the paper's tables and figures on reduced sizes, into build/paper-small; needs FULLCONFORMAL_DATA
	$(BIN)/python -m paper.run --small --device cpu --out build/paper-small
	$(BIN)/python -m paper.page build/paper-small

paper: $(STAMP)  ## the paper's tables and figures in full, into paper/results; needs FULLCONFORMAL_DATA and a GPU, or a day
	$(BIN)/python -m paper.run --out paper/results
	$(BIN)/python -m paper.page paper/results

clean:  ## remove the environment, caches and build outputs
	rm -rf .venv .venv-oldest .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist docs/_build docs/gallery docs/generated fullconformal-demo*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
