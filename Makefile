# `make demo` and `make test` need git, make and Python 3.11 or newer, and set up .venv by themselves.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
WORKERS ?= 2

.PHONY: help demo test lint types unit slow golden published bench clean

help:
	@echo "make demo       profile this machine's CPU devices, plan GPT-2 on eight of them, explain, train, compare"
	@echo "make test       everything that CI checks: lint, types, import contracts, tests"
	@echo "make lint       ruff and import contracts only;  make types: the type checker;  make unit: pytest"
	@echo "make slow       every model family on every layout, executed (about half an hour)"
	@echo "make golden     rewrite the golden files of the tests"
	@echo "make published  tests of training functions from published packages (in their own .venv-published)"
	@echo "make bench      benchmarks: planning, capture and estimating time, a profile that changes the plan, schedules"

demo: $(VENV)/installed
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh

test: lint types unit

lint: $(VENV)/installed-for-tests
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/installed-for-tests
	$(BIN)/basedpyright

unit: $(VENV)/installed-for-tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

slow: $(VENV)/installed-for-tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow

golden: $(VENV)/installed-for-tests
	MESHPLAN_UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/planfile tests/report tests/cli

published: $(VENV)-published/installed
	$(VENV)-published/bin/python -m pytest -m published tests/published

bench: $(VENV)/installed-for-tests
	$(BIN)/python benchmarks/planning_time.py
	$(BIN)/python benchmarks/capture_time.py
	$(BIN)/python benchmarks/estimate_speed.py
	$(BIN)/python benchmarks/profile_changes_plan.py
	$(BIN)/python benchmarks/simulator_speed.py
	$(BIN)/python benchmarks/schedule_synthesis.py --cases 200

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: install one, or make PYTHON=/path/to/python"; exit 1; }
	@echo "setting up $(VENV) (once, a minute or two) ..."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "Python's venv module is missing (on Debian: python3-venv)"; exit 1; }

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(PIP) install --editable .
	@touch $@

$(VENV)/installed-for-tests: pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[test,cuda-check,fast,tpu-check]'
	@touch $@ $(VENV)/installed

$(VENV)-published/installed: pyproject.toml tests/published/requirements.txt
	$(PYTHON) -m venv $(VENV)-published
	$(VENV)-published/bin/python -m pip --disable-pip-version-check --quiet --quiet install --editable . -r tests/published/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-published .demo build dist *.egg-info
