# Every target does its own set-up: on a bare machine with Python 3.11, `make demo` is enough.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

.PHONY: setup demo test test-all test-machines test-gpu coverage dist lint types docs reference screenshots \
	results experiment bench notebooks clean

setup: .venv/.ready

# What dpspan needs to run
.venv/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "dpspan needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(INSTALL) .
	@touch $@

# Every extra, and the tools
.venv/.ready: .venv/.runtime
	$(INSTALL) '.[dev]'
	@touch $@

demo: .venv/.runtime
	$(BIN)/dpspan demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# All tests come last, and with them the lines that say what was not tested. Of the numeric ones
# three quarters have run as on other machines; `make test-all` runs all of them everywhere.
test: lint types docs test-machines
	$(BIN)/pytest -n 2 -m "not slow" --part 4/4

test-all: lint types docs
	$(BIN)/python tools/machines.py -n 2 --every-machine
	$(BIN)/pytest -n 2

# Three quarters of the numeric tests, each with the kernels and threads of another machine
test-machines: setup
	$(BIN)/python tools/machines.py -n 2

# On a machine with CUDA; installs nothing: make test-gpu PYTHON=python3 COMMIT=...
test-gpu:
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) tools/gpu_tests.py \
		$(if $(COMMIT),--commit $(COMMIT))

# Which lines the fast tests run; coverage.xml for whoever shows it
coverage: setup
	$(BIN)/python -m pytest -n 2 -m "not slow" --cov=dpspan --cov-report=xml --cov-report=term

# The wheel and the sdist, tried: the wheel's demo in an empty environment, the sdist's own tests
dist: setup
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python tools/check_dist.py

runs/demo/report.html:
	$(MAKE) demo

# docs/reference/configuration.md and commands.md, from the code
reference: setup
	$(BIN)/python tools/reference.py docs/reference

# Runs the notebooks of docs/tutorials and keeps their output
notebooks: setup
	$(BIN)/python tools/notebooks.py

screenshots: setup runs/demo/report.html
	$(BIN)/python tools/screenshots.py runs/demo/report.html docs

# Renders docs/results.md and its plots from the stored results, without data or GPU
results: setup
	$(BIN)/python -m experiments --render

# make experiment NAME=pdpsgd-mnist DATA=folder OPTIONS="--device cuda --jobs 4"
experiment: setup
	$(BIN)/python -m experiments $(NAME) --data $(DATA) $(OPTIONS)

bench: setup
	$(BIN)/python -m benchmarks.dpsgd
	$(BIN)/python -m benchmarks.gep --models cnn resnet20

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist runs coverage.xml .coverage
