"""Two updates of a recipe on any number of processes, with a checkpoint in between: see test_meshes.py."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from torch import Tensor
from torch import distributed as dist
from transformers import AutoTokenizer

from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.token_advantages import Credit, Credited, needed_scores
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.learner_state import load_state
from agentfactory.trainers.update.policy_update import update_policy
from tests.saved_checkpoint import save_checkpoint
from tests.trainers.ranks import whole

STEP = 1


@contextmanager
def counted_collectives() -> Iterator[dict[str, list[int]]]:
    """Yield the bytes of each call of FSDP2's reductions in this context: the result of one process."""
    found: dict[str, list[int]] = {"all_reduce": [], "reduce_scatter_single": []}

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **named: Any) -> Any:
            output = named["output"] if "output" in named else arguments[0]
            found[name].append(output.nbytes)
            return call(*arguments, **named)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for name in found:
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
        yield found


def make_forks(seed: int) -> list[Group]:
    """Groups whose chains have the same prompt and first turn, and then turns of different lengths."""
    rng = random.Random(seed)

    def sample(row: Row, count: int) -> None:
        drawn = [rng.randrange(64) for _ in range(count)]
        row.append_sampled(drawn, [rng.uniform(-6.0, -2.0) for _ in drawn], [Span("0", 0, count)])

    groups = []
    for number in range(4):
        prompt, chains = [rng.randrange(64) for _ in range(12)], []
        for chain in range(3):
            row = Row()
            row.append_context(prompt)
            for _ in range(2):
                sample(row, rng.randint(2, 9))
                row.append_context([rng.randrange(64) for _ in range(rng.randint(1, 5))])
            chains.append(Trajectory(f"{number}/{chain}", [], [row], Outcome.COMPLETED, rng.random(), turns=2))
        groups.append(Group(str(number), {"question": str(number)}, chains))
    return groups


def update(learner: Learner, recipe: TrainRecipe, seed: int) -> dict[str, Any]:
    """Return loss, norm, gradients before and after clipping, weights after the step, and the reductions of the
    passes; all tensors whole, in every rank."""
    credit, main = Credit(make_forks(seed), recipe), learner.accelerator.is_main_process
    names = needed_scores(recipe)
    rows = learner.score(credit.rows if main else [], names) if names else credit.rows
    credited = credit.assign(rows) if main else Credited()
    batch = learner.deal(credited.rows, credited.normaliser)
    model = learner.accelerator.unwrap_model(learner.model)
    found: dict[str, Any] = {"micro-batches": len(batch.micro_batches)}
    run, step = learner.forward_backward, learner.optimizer.step

    def gradients() -> dict[str, Tensor]:
        # not listed before: after scoring, the outermost weights are still gathered
        return {name: whole(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}

    def counted_run(*arguments: Any) -> Any:
        with counted_collectives() as found["bytes"]:
            terms = run(*arguments)
        found["before"] = gradients()
        return terms

    def recorded_step() -> None:
        found["after"] = gradients()
        step()

    learner.forward_backward, learner.optimizer.step = counted_run, recorded_step
    (made,) = update_policy(learner, batch, recipe).updates
    learner.forward_backward, learner.optimizer.step = run, step
    found |= {"loss": made.loss, "norm": made.grad_norm, "sums": made.sums}
    return {**found, "weights": {n: whole(w.detach()) for n, w in model.named_parameters() if w.requires_grad}}


def exercise(recipe: TrainRecipe, accelerator: Accelerator, folder: Path) -> list[dict[str, Any]]:
    """Return what `update` does, before and after a checkpoint in the folder that the seed names; if the checkpoint
    exists, only what it does after it."""
    learner, found = Learner(recipe, accelerator), []
    saved = folder / str(recipe.seed) / f"step-{STEP:06d}"
    if saved.exists():
        load_state(saved, learner)
    else:
        found.append(update(learner, recipe, seed=1))
        save_checkpoint(saved.parent, STEP, learner, AutoTokenizer.from_pretrained(recipe.model.path), {})
    return [*found, update(learner, recipe, seed=2)]
