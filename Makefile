# Every target sets itself up: it makes .venv with plain pip, once.
PYTHON ?= python3
VENV ?= .venv
SEEDS ?= 0 1 2
BIN := $(VENV)/bin

.PHONY: setup quickstart test lint learn

setup: $(VENV)/.installed-dev

$(VENV)/.installed: setup.py
	@echo "installing into $(VENV): a minute or two"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

# A small agent learns to hunt treasure; the run folder is runs/quickstart.
quickstart: $(VENV)/.installed
	$(BIN)/agentfactory train recipes/quickstart/quickstart.yaml $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The learning runs, one per seed and one with an adapter: about five minutes each.
learn: $(VENV)/.installed-dev
	SEEDS="$(SEEDS)" $(BIN)/python -m pytest -v --timeout 1800 tests/learn/learn_quickstart.py $(ARGS)
