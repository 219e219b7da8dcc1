"""What the server of forks imports, once for all commands of a test process (tests/forked.py)."""

import gc
import importlib

MODULES = [
    *("accelerate", "aiohttp.web", "peft", "torch", "transformers", "trl.chat_template_utils"),
    *(
        "agentfactory.commands.main",
        "agentfactory.launching.launcher",
        "agentfactory.rollout.delivery",
        "agentfactory.rollout.load_renderer",
        "agentfactory.rollout.embedded.server",
    ),
    *(
        "agentfactory.trainers.checkpoints",
        "agentfactory.trainers.rl",
        "agentfactory.trainers.sft",
        "agentfactory.trainers.sync.retrying",
    ),
    # the tests' own main module, which multiprocessing imports in each process
    "pytest",
]

# nothing that a module defines is garbage; a forked command enables it
gc.disable()
for _name in MODULES:
    importlib.import_module(_name)
