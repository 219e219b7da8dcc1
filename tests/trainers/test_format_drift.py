"""A scripted policy breaks the format in a tenth of its successes: the broken format does not spread."""

import random
from collections.abc import Callable
from copy import deepcopy
from statistics import fmean
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.batches.batch import TrainingRow, training_row
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.token_advantages import Credit
from agentfactory.trainers.update.learner import Learner, Terms
from agentfactory.trainers.update.losses import negative_log_likelihood
from agentfactory.trainers.update.policy_update import update_policy

pytestmark = [pytest.mark.numbers, pytest.mark.extended]

PROMPT, OPEN, CLOSE, GOOD, BAD = [5, 6, 7], 11, 12, 21, 22
BATCHES = 40
TRAIN: dict[str, Any] = {"learning_rate": 1e-3, "batch_size": 1}


def row_of(*said: int) -> Row:
    row = Row()
    row.append_context(PROMPT)
    row.append_sampled([*said], [0.0] * len(said), [Span("0", 0, len(said))])
    return row


def chains(number: int, draw: random.Random, off: float, on_purpose: bool) -> Group:
    """Return twenty chains of a simulated policy: turns leave out the opening with probability `off`, and then the
    chain fails without acting; half of the others succeed. A tenth of the successes are broken `on_purpose`."""
    made = []
    for place in range(20):
        lost, succeeds, scripted = draw.random() < off, place < 10, on_purpose and place == 0
        broken = lost or scripted
        said = [GOOD if succeeds else BAD, CLOSE] if broken else [OPEN, GOOD if succeeds else BAD, CLOSE]
        reward = float(succeeds and (scripted or not lost))
        chain = Trajectory(f"{number}.{place}", [], [row_of(*said)], Outcome.COMPLETED, reward, turns=1)
        chain.malformed_turns = [0] if broken else []
        made.append(chain)
    return Group(f"g{number}", {}, made)


@pytest.fixture(scope="module")
def learned(make_recipe: Callable[..., TrainRecipe], accelerator: Accelerator) -> list[dict[str, Any]]:
    """The state of a learner that begins calls correctly except for a few in a thousand."""
    learner = Learner(make_recipe(**TRAIN), accelerator)
    rows: list[TrainingRow] = [row for a in (GOOD, BAD) if (row := training_row(row_of(OPEN, a, CLOSE)))]

    def loss(index: int, part: object, logprob: torch.Tensor, entropy: torch.Tensor) -> object:
        return Terms(loss=negative_log_likelihood(logprob).sum())

    for _ in range(60):
        learner.update(learner.deal(rows), loss)  # type: ignore[arg-type]
    return [part.state_dict() for part in (learner.model, learner.optimizer, learner.schedule)]


def off_format(learner: Learner) -> float:
    """Return the probability that a turn does not begin with the opening."""
    row = training_row(row_of(OPEN))
    assert row is not None
    (scored,) = learner.score([row], ["proximal"])
    return 1 - torch.tensor(scored.streams["proximal"][0]).exp().item()


def train(recipe: TrainRecipe, accelerator: Accelerator, learned: list[dict[str, Any]], on_purpose: bool) -> float:
    """Return the probability of a broken turn, mean over the second half of the run."""
    learner, draw = Learner(recipe, accelerator), random.Random(0)
    for part, state in zip((learner.model, learner.optimizer, learner.schedule), deepcopy(learned), strict=True):
        part.load_state_dict(state)
    lost = [off_format(learner)]
    assert lost[0] < 0.02
    for number in range(BATCHES):
        group = chains(number, draw, lost[-1], on_purpose)
        # as if the policy had sampled it: the mismatch correction must not hide its effect
        rows = [row for chain in group.trajectories if (row := training_row(chain.rows[0]))]
        for chain, scored in zip(group.trajectories, learner.score(rows, ["proximal"]), strict=True):
            chain.rows[0].logprobs[len(PROMPT) :] = scored.streams["proximal"]
        credit = Credit([group], recipe)
        credited = credit.assign(credit.rows)
        update_policy(learner, learner.deal(credited.rows, credited.normaliser), recipe)
        lost.append(off_format(learner))
    return fmean(lost[BATCHES // 2 :])


def test_a_broken_format_that_succeeds_does_not_spread(
    make_recipe: Callable[..., TrainRecipe], accelerator: Accelerator, learned: list[dict[str, Any]]
) -> None:
    whole = train(make_recipe(**TRAIN), accelerator, learned, on_purpose=False)
    assert train(make_recipe(**TRAIN), accelerator, learned, on_purpose=True) < 1.1 * whole
    # without the rule it spreads, so this test can fail
    as_others = make_recipe(**TRAIN, advantage={"malformed_turns": "like_others"})
    assert train(as_others, accelerator, learned, on_purpose=True) > 1.5 * whole
