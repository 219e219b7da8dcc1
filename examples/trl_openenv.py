"""Train by TRL's GRPOTrainer on a world that AgentFactory serves: `agentfactory worlds serve ... --as openenv`.

Runs in an environment of its own, with `trl` and `openenv==0.10.0`, and without AgentFactory:
`python trl_openenv.py http://:KEY@127.0.0.1:8000 MODEL STEPS`.
"""

import sys
from typing import Literal

import torch
from datasets import Dataset
from openenv import GenericEnvClient
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

URL, MODEL, STEPS = sys.argv[1:]


class TreasureHunt:
    """One rollout's session. TRL offers the public methods, except reset and get_reward, as tools."""

    def __init__(self) -> None:
        self._session = GenericEnvClient(base_url=URL).sync()
        self._reward: float | None = None

    def reset(self, seed: int, **row: object) -> str:
        """Begin the task of a seed; TRL adds the text to the prompt."""
        self._reward = None
        messages = self._session.reset(seed=seed).observation["messages"]
        return "\n\n".join(message["content"] for message in messages)

    def move(self, direction: Literal["north", "east", "south", "west"]) -> str:
        """Take one step.

        Args:
            direction: Where to.
        """
        return self._call("move", direction=direction)

    def get_reward(self) -> float:
        """End the episode unless the world has ended it; return its reward."""
        if self._reward is None:
            self._call("end_episode")
        return self._reward or 0.0

    def _call(self, tool: str, **arguments: object) -> str:
        step = self._session.step({"tool_name": tool, "arguments": arguments})
        if step.done:
            self._reward = step.reward
        error = step.observation["error"]
        return error["message"] if error else step.observation["result"]


tokenizer = AutoTokenizer.from_pretrained(MODEL)
if getattr(tokenizer, "response_template", None) is None:
    # TRL knows the templates of published models; the quickstart's is its own, with calls as Qwen3 writes them
    tokenizer.response_template = qwen3_template
trainer = GRPOTrainer(
    model=MODEL,
    processing_class=tokenizer,
    # the chains of a group get equal rows, so equal tasks
    train_dataset=Dataset.from_list(
        [{"prompt": [{"role": "user", "content": ""}], "seed": seed} for seed in range(1000)]
    ),
    environment_factory=TreasureHunt,
    args=GRPOConfig(
        output_dir="trl-openenv",
        max_steps=int(STEPS),
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=256,
        max_tool_calling_iterations=8,
        learning_rate=4e-4,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        bf16=torch.cuda.is_available(),
    ),
)
trainer.train()
