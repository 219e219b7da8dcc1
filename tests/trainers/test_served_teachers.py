"""A teacher behind a server: its grades, and whole updates with them, compared with dense forward passes in float64."""

import asyncio
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentfactory.base.errors import SettingError
from agentfactory.rollout.groups.group_files import decode_group, encode_group
from agentfactory.rollout.inference.teacher_client import TeacherClient
from agentfactory.rollout.trajectory import Group
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.token_advantages import Credit, needed_scores
from agentfactory.trainers.teachers.teacher import top_k_divergence
from agentfactory.trainers.update.policy_update import update_metrics
from tests.conftest import embedded_server
from tests.trainers.conftest import VOCABULARY, Make, make_groups, make_row
from tests.trainers.test_teachers import Recorded
from tests.trainers.test_teachers import dense as at_temperature

pytestmark = [pytest.mark.numbers, pytest.mark.processes]

LONGEST = 90
dense = partial(at_temperature, temperature=1.0)
PLAIN: dict[str, Any] = {
    "algorithm": "distill",
    "token_budget": 200,
    "max_grad_norm": 1e9,
    "loss": {"behaviour_kl": 0.0, "mismatch": {"correction": "none"}},
}


@pytest.fixture(scope="module")
def teacher_url(teacher_folder: Path) -> Iterator[str]:
    with embedded_server(teacher_folder, "--max-model-len", str(LONGEST + 1)) as url:
        yield url


def with_url(recipe: TrainRecipe, url: str, **teacher: Any) -> TrainRecipe:
    data = recipe.model_dump(mode="json", by_alias=True) | {"teacher": {"url": url, **teacher}}
    return TrainRecipe.model_validate_json(json.dumps(data), strict=True)


def graded(recipe: TrainRecipe, groups: list[Group]) -> list[Group]:
    """The groups with the teacher's grades, as the trainer gets them from the worker."""
    server = recipe.teacher.server

    async def grade() -> int:
        async with TeacherClient(server, recipe.model.path, LONGEST, retry_seconds=20) as teacher:
            await teacher.check()
            chains = [chain for group in groups for chain in group.trajectories]
            return sum(await asyncio.gather(*map(teacher.grade, chains)))

    rows = [row for group in groups for chain in group.trajectories for row in chain.rows]
    assert asyncio.run(grade()) == sum(int(np.flatnonzero(row.mask)[-1]) + 1 for row in rows if any(row.mask[1:]))
    encoded = [encode_group(group) for group in groups]
    return [decode_group(one.line, one.record) for one in encoded]


def chains() -> list[Group]:
    """Chains of several turns, some with several rows, with a row that begins with a sampled token, and one that has
    none."""
    groups = make_groups(2, 3)
    first, second, third, *_ = (chain for group in groups for chain in group.trajectories)
    first.rows.append(make_row(random.Random(5), turns=2))
    second.rows[0].mask[0] = 1
    third.rows[0].mask = [0] * len(third.rows[0].mask)
    return groups


@pytest.mark.parametrize(
    ("kind", "count", "batching"),
    [("sampled", None, "tree"), ("reverse_kl", 5, "packed"), ("jensen_shannon", VOCABULARY, "padded")],
)
def test_grades_and_updates_equal_a_dense_forward_pass(
    make_recipe: Make,
    model_folder: Path,
    teacher_folder: Path,
    teacher_url: str,
    kind: str,
    count: int | None,
    batching: str,
) -> None:
    settings = {"divergence": kind, "top_k": count, "coefficient": 0.8}
    recipe = with_url(make_recipe(**PLAIN, batching=batching), teacher_url, **settings)
    assert needed_scores(recipe) == []
    credit = Credit(graded(recipe, chains()), recipe)
    rows = credit.assign(credit.rows).rows
    done = Recorded(recipe, rows, temperature=1.0)
    # the trainer loads no teacher
    assert done.learner.networks == [done.learner.model]
    metrics = update_metrics([done.update], done.batch)
    network, policy = dense(model_folder, rows)
    with torch.no_grad():
        teacher = dense(teacher_folder, rows)[1]
    terms, kls = [], []
    for number, row in enumerate(rows):
        labels = torch.from_numpy(row.token_ids[row.targets])[:, None]
        own = policy[number].log_softmax(-1).gather(-1, labels)[:, 0]
        theirs = teacher[number].log_softmax(-1)
        if count is None:
            wanted = theirs.gather(-1, labels)[:, 0]
            torch.testing.assert_close(torch.from_numpy(row.streams["teacher"]), wanted, atol=2e-5, rtol=0)
            kls.append(own.detach() - wanted)
            terms.append((own - own.detach()).exp() * 0.8 * kls[-1])
        else:
            best = theirs.topk(min(count, theirs.shape[-1]))
            tokens, values = torch.from_numpy(row.streams["teacher_top"]).unbind(1)
            kept = best.values.shape[-1]
            assert tokens[:, :kept].tolist() == best.indices.tolist()
            torch.testing.assert_close(values[:, :kept], best.values, atol=2e-5, rtol=0)
            assert bool((tokens[:, kept:] == -1).all())
            # compared with sums of probabilities in test_teachers.py
            exact = top_k_divergence(kind, policy[number], best.indices, best.values)  # type: ignore[arg-type]
            kls.append(exact.detach())
            terms.append(0.8 * exact)
    loss_by_hand = torch.cat(terms).sum() / done.batch.tokens
    loss_by_hand.backward()
    kl = torch.cat(kls).mean().item()
    assert metrics["teacher/kl"] == pytest.approx(kl, abs=2e-5)
    assert abs(kl) > 0.1
    assert metrics["loss"] == pytest.approx(loss_by_hand.item(), abs=2e-5)
    expected = {name: weight.grad for name, weight in network.named_parameters()}
    assert max(float(value.abs().max()) for value in expected.values()) > 1e-2
    torch.testing.assert_close(done.gradients, expected, atol=5e-5, rtol=1e-3)


def test_rows_without_grades_are_refused(make_recipe: Make) -> None:
    recipe = with_url(make_recipe(algorithm="distill"), "http://127.0.0.1:1")
    with pytest.raises(SettingError, match=r"teacher\.url: a row of \d+ sampled tokens has no grades"):
        Credit(make_groups(1, 1), recipe)
