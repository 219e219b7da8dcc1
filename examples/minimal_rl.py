"""GRPO from end to end in one file, with AgentFactory's own parts: the quickstart's agent learns to hunt treasure.

    python examples/minimal_rl.py --output runs/minimal        # two minutes on two cores

Read `reinforce` first: it is the training loop. `agentfactory train` runs the same loop with a worker process, so that
chains run while the trainer computes. It adds everything that a long run needs: other algorithms, several devices,
proof that the weights arrived, checkpoints, resume, limits, retries. docs/life-of-a-token.md walks through that code.
"""

import argparse
import asyncio
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from agentfactory.launching.prepare import prepare
from agentfactory.launching.start_server import serve
from agentfactory.recipe.checks import check_recipe
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe, StagedRecipe
from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.data import Task, load_tasks
from agentfactory.rollout.evaluation.evaluate import evaluate, open_runner
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.trajectory import Group
from agentfactory.trainers.batches.batch import MicroBatch, TrainingRow, make_batches, training_row
from agentfactory.trainers.loop.advantages import grpo_advantages
from agentfactory.trainers.loop.sft import conversation_rows
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.sync.file_sync import FileSync
from agentfactory.trainers.sync.server_control import ServerControl
from agentfactory.trainers.update.losses import clip, negative_log_likelihood
from agentfactory.trainers.update.optimizer import make_optimizer, make_schedule

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart" / "quickstart.yaml"
Loss = Callable[[MicroBatch, Tensor], Tensor]


class Trainer:
    """A policy with its optimiser and its learning-rate schedule."""

    def __init__(self, recipe: Recipe):
        self.policy: Policy = load_policy(recipe)
        self._train = recipe.train
        self._optimizer = make_optimizer(self.policy, recipe.train)
        self._schedule = make_schedule(self._optimizer, recipe.train)

    def update(self, rows: list[TrainingRow], loss: Loss) -> float:
        """Take one optimiser step on the mean of `loss` over the trained tokens of `rows`; return that mean."""
        (batch,) = make_batches(rows, self.policy.batching, self._train.token_budget)
        total = 0.0
        for part in batch.micro_batches:
            # log-probabilities of the trained tokens only, not of prompts and tool results
            logprob, _ = self.policy(part.ids, part.sources, part.labels, part.positions, part.ends)
            term = loss(part, logprob).sum() / batch.normaliser
            term.backward()
            total += term.item()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._train.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        return total


def likelihood(part: MicroBatch, logprob: Tensor) -> Tensor:
    """SFT: make the transcript's tokens more likely."""
    return negative_log_likelihood(logprob)


def surrogate(part: MicroBatch, logprob: Tensor) -> Tensor:
    """GRPO: make tokens with a positive advantage more likely and others less likely, within the limits of clipping.

    `behaviour` is the log-probability with which the server sampled the token.
    """
    terms, _ = clip(logprob, part.streams["behaviour"], part.streams["advantage"], 0.2, 0.2, None)
    return terms


def credit(groups: list[Group]) -> list[TrainingRow]:
    """Give every sampled token of a chain the chain's advantage over the other chains of its task."""
    rows: list[TrainingRow | None] = []
    for group in groups:
        # a chain that failed has no reward: it does not count in the baseline, and is not trained
        advantages = grpo_advantages([chain.reward for chain in group.trajectories])
        for chain, advantage in zip(group.trajectories, advantages, strict=True):
            rows += [training_row(row, advantage) for row in chain.rows if chain.reward is not None]
    return [row for row in rows if row is not None]


async def run_group(runner: ChainRunner, recipe: Recipe, task: Task, name: str, model: str) -> Group:
    """Run several chains on one task concurrently: model, tools, model, ... until each ends and gets its reward."""
    chains = [
        runner.run(
            f"{name}.{chain}", task, Sampling(model, recipe.rollout.temperature, f"{recipe.seed}/{name}/{chain}")
        )
        for chain in range(recipe.rollout.group_size)
    ]
    return await runner.run_group(name, task, chains)


async def reinforce(recipe: Recipe, folder: Path, say: Callable[[str], None]) -> dict[str, float]:
    """Roll out, credit, update, publish; return the success on held-out tasks before and after."""
    assert recipe.data is not None
    assert recipe.eval.data is not None
    tasks, held_out = load_tasks(recipe.data), load_tasks(recipe.eval.data)
    draw = random.Random(recipe.seed)
    trainer = Trainer(recipe)
    async with serve(recipe, {}) as (_, url), open_runner(recipe, folder, url) as runner:
        sync = FileSync([ServerControl(url)], folder / "sync")
        report = sync.push(0, trainer.policy, trainer.policy.gather())
        test = partial(evaluate, runner, recipe, held_out, report.model, folder)
        before, _ = await test("before")
        for step in range(1, recipe.train.steps + 1):
            # from now on, every turn comes from these weights
            runner.client.published(report.published)
            batch = draw.sample(tasks, recipe.train.batch_size)
            groups = await asyncio.gather(
                *(run_group(runner, recipe, task, f"{step}-{place}", report.model) for place, task in enumerate(batch))
            )
            trainer.update(credit(groups), surrogate)
            report = sync.push(step, trainer.policy, trainer.policy.gather())
            rewards = [chain.reward for group in groups for chain in group.trajectories if chain.reward is not None]
            say(f"step {step}: reward {sum(rewards) / len(rewards):.2f}")
        runner.client.published(report.published)
        after, _ = await test("after")
        sync.close()
    return {
        f"{mode}_{when}": metrics[f"{mode}/success"]
        for when, metrics in (("before", before), ("after", after))
        for mode in ("sampled", "greedy")
    }


def imitate(recipe: Recipe, folder: Path) -> None:
    """Fine-tune on transcripts, and write the model into `folder`."""
    assert recipe.data is not None
    renderer = load_renderer(recipe.model, recipe.rollout.parser)
    rows = [row for row in map(training_row, conversation_rows(load_tasks(recipe.data), renderer)) if row is not None]
    draw, trainer = random.Random(recipe.seed), Trainer(recipe)
    for _ in range(recipe.train.steps):
        trainer.update(draw.sample(rows, recipe.train.batch_size), likelihood)
    trainer.policy.network.save_pretrained(folder)
    renderer.tokenizer.chat_template = renderer.chat_template
    renderer.tokenizer.save_pretrained(folder)


def main() -> None:
    """Run the quickstart's two stages."""
    parser = argparse.ArgumentParser(description="GRPO in one file: the quickstart's agent learns to hunt treasure.")
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--steps", type=int, default=50, help="steps of reinforcement learning")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps: got {options.steps}; fix: use at least 1")
    recipe = load_recipe(
        QUICKSTART, [f"output={options.output}", f"seed={options.seed}", f"grpo.train.steps={options.steps}"]
    )
    check_recipe(recipe)
    assert isinstance(recipe, StagedRecipe)
    assert recipe.prepare is not None
    if options.output.exists():
        parser.error(f"--output: {options.output} exists; fix: name a new folder")
    options.output.mkdir(parents=True)
    torch.manual_seed(recipe.seed)
    disable_progress_bar()
    say = partial(print, flush=True)
    sft, grpo = recipe.stages
    prepare(recipe.prepare, recipe.output / "prepared", recipe.seed)
    say("learning to call the tool from transcripts of a bad player")
    imitate(sft, recipe.output / "model")
    say("learning to play from the reward")
    result = asyncio.run(reinforce(grpo.with_model(str(recipe.output / "model")), recipe.output / "rollouts", say))
    say(", ".join(f"{name} {value:.3f}" for name, value in result.items()))


if __name__ == "__main__":
    main()
