"""Teachers with more in their context, and behind a server: grades and whole updates compared with dense forward passes
in float64 and with TRL."""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl.experimental.sdpo.loss_utils import (
    add_tail_bucket,
    apply_importance_sampling_clipping,
    compute_divergence,
    compute_sampled_token_self_distillation_loss,
    compute_topk_self_distillation_loss,
)

from agentfactory.base.errors import SettingError
from agentfactory.rollout.groups.group_files import decode_group, encode_group
from agentfactory.rollout.inference.teacher_client import TeacherClient
from agentfactory.rollout.token_row import ImageSpan, Row
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.batches.batch import TrainingRow, training_row
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.token_advantages import Credit, needed_scores
from agentfactory.trainers.networks import policy as policy_module
from agentfactory.trainers.teachers.teacher import check_saved_prompts, is_graded, top_k_divergence
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_metrics, update_policy
from tests.conftest import embedded_server
from tests.trainers.conftest import VOCABULARY, Make, make_groups, make_row, on_cpu
from tests.trainers.float64 import never_through_float32
from tests.trainers.launched_teachers import TEMPERATURE, in_context_rows
from tests.trainers.test_teachers import PLAIN, Recorded, check_by_hand, dense, teaching

pytestmark = pytest.mark.numbers


def in_context(recipe: TrainRecipe, **teacher: Any) -> TrainRecipe:
    return teaching(recipe, context="solution", **teacher)


def teachers_logits(folder: Path, rows: Sequence[TrainingRow]) -> list[Tensor | None]:
    """The logits of the targets after the teacher's prompt, token by token by hand; None for rows without a prompt."""
    graded = [row.in_context for row in rows if row.in_context is not None]
    for row in rows:
        theirs = row.in_context
        assert theirs is None or theirs.token_ids[theirs.targets].tolist() == row.token_ids[row.targets].tolist()
    with torch.no_grad():
        logits = iter(dense(folder, graded)[1])
    return [None if row.in_context is None else next(logits) for row in rows]


@pytest.mark.parametrize(
    ("kind", "count", "batching"),
    [("sampled", None, "tree"), ("reverse_kl", 4, "packed"), ("jensen_shannon", VOCABULARY, "padded")],
)
def test_an_update_equals_a_dense_forward_pass(
    make_recipe: Make, model_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, count: int | None, batching: str
) -> None:
    monkeypatch.setattr(policy_module, "LOGITS_PER_CHUNK", 320)
    recipe = make_recipe(batching=batching, token_budget=70, max_grad_norm=1e9, loss=PLAIN)
    recipe = in_context(recipe, divergence=kind, coefficient=0.8, top_k=count)
    rows = in_context_rows()
    assert [row.in_context is None for row in rows] == [False, False, True, False, False, False]
    with never_through_float32():
        done = Recorded(recipe, rows)
        check_by_hand(done, model_folder, teachers_logits(model_folder, rows), kind, count)


@pytest.mark.parametrize(("kind", "count"), [("sampled", None), ("forward_kl", 4)])
def test_ungraded_rows_and_empty_contexts_have_no_gradient(make_recipe: Make, kind: str, count: int | None) -> None:
    recipe = in_context(make_recipe(max_grad_norm=1e9, loss=PLAIN), divergence=kind, top_k=count)
    rows = [replace(row, streams=row.streams | {"advantage": row.targets * 0.0}) for row in in_context_rows()]
    alone = [replace(row, in_context=None) for row in rows]
    copies = [TrainingRow(row.token_ids, row.targets, {"weight": row.streams["weight"]}) for row in rows]
    same = [replace(row, in_context=copy) for row, copy in zip(rows, copies, strict=True)]
    with never_through_float32():
        for given, exact in ((alone, True), (same, False)):
            done = Recorded(recipe, given)
            largest = max(float(gradient.abs().max()) for gradient in done.gradients.values())
            # a teacher's log-probabilities are kept in float32, where those of 4 to 8 nats are rounded by 2.4e-7
            assert (largest == 0.0) if exact else (largest < 1e-6)
            assert done.update.sums["graded"] == (0.0 if exact else done.batch.tokens)
        assert max(float(g.abs().max()) for g in Recorded(recipe, rows).gradients.values()) > 1e-2


def test_rows_too_long_for_a_teacher_are_told_not_graded(make_recipe: Make, caplog: pytest.LogCaptureFixture) -> None:
    rows = in_context_rows()
    lengths = [len(row.in_context.token_ids) for row in rows if row.in_context is not None]
    recipe = in_context(make_recipe(token_budget=max(lengths) - 1))
    learner = Learner(recipe, on_cpu(), TEMPERATURE)
    scored = learner.score(rows, ["teacher"])
    graded = [len(row.in_context.token_ids) for row in scored if row.in_context is not None]
    assert graded == [length for length in lengths if length < max(lengths)]
    assert [bool(np.isinf(row.streams["teacher"]).all()) for row in scored] == [r.in_context is None for r in scored]
    assert f"1 of 6 rows of a step have more than {max(lengths) - 1} tokens with teacher.context" in caplog.text
    learner.score([replace(row, in_context=None) for row in rows], ["teacher"])
    assert "the teacher graded no row of a step" in caplog.text


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_the_teacher_has_the_weights_before_the_update(make_recipe: Make, lora: dict[str, Any] | None) -> None:
    """It follows the policy, its adapter included, and adds no network."""
    learner = Learner(in_context(make_recipe(lora=lora, learning_rate=0.1)), on_cpu(), TEMPERATURE)
    assert len(learner.networks) == 1
    own = [replace(row, streams={"weight": row.streams["weight"]}) for row in in_context_rows()]
    theirs = [row.in_context for row in own if row.in_context is not None]
    found = []
    for _ in range(2):
        scored = learner.score(in_context_rows(), ["teacher", "entropy"])
        graded = [row.streams["teacher"] for row in scored if row.in_context is not None]
        expected = [row.streams["proximal"] for row in learner.score(theirs, ["proximal"])]
        for given, wanted in zip(graded, expected, strict=True):
            np.testing.assert_allclose(given, wanted, atol=1e-5)
        found.append(np.concatenate(graded))
        update_policy(learner, learner.deal(scored), in_context(make_recipe()))
    assert np.abs(found[0] - found[1]).max() > 1e-2
    assert learner.take_seconds()["seconds/teacher"] > 0.0


def test_trls_losses_have_the_same_gradients() -> None:
    """SDPO's: the sampled token, and the most likely tokens with the tail as one more. TRL takes the policy's most
    likely tokens, and we the teacher's: they are equal if both have the same."""
    generator = torch.Generator().manual_seed(0)
    policy = (3 * torch.randn(7, 50, generator=generator, dtype=torch.float64)).requires_grad_()
    teacher = policy.detach() + 0.3 * torch.randn(7, 50, generator=generator, dtype=torch.float64)
    labels = torch.arange(7)
    logits = policy[None], teacher[None]
    trl = compute_sampled_token_self_distillation_loss(*logits, labels[None], distillation_alpha=1.0)
    own = policy.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    advantage = -(own - teacher.log_softmax(-1).gather(-1, labels[:, None])[:, 0]).detach()
    ours = -(own - own.detach()).exp() * advantage
    gradients = [torch.autograd.grad(value.sum(), policy, retain_graph=True)[0] for value in (trl, ours)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)
    # its clipped ratio is our token_truncate, of the same policy over the same behaviour
    behaviour = own.detach() + torch.linspace(-1.5, 1.5, 7, dtype=torch.float64)
    clipped = apply_importance_sampling_clipping(ours, own, behaviour, 2.0)
    torch.testing.assert_close(clipped, ours * (own.detach() - behaviour).exp().clamp(max=2.0))
    for alpha, kind in ((1.0, "reverse_kl"), (0.0, "forward_kl"), (0.5, "jensen_shannon")):
        same = teacher.topk(5).indices
        logprobs = [logits.log_softmax(-1).gather(-1, same) for logits in (policy, teacher)]
        theirs = compute_divergence(*map(add_tail_bucket, logprobs), alpha)
        mine = top_k_divergence(kind, policy, same, logprobs[1])  # type: ignore[arg-type]
        if bool((policy.topk(5).indices.sort(-1).values == same.sort(-1).values).all()):
            options = {"distillation_topk": 5, "distillation_alpha": alpha, "distillation_add_tail": True}
            whole = compute_topk_self_distillation_loss(policy[None], teacher[None], **options)[0]
            torch.testing.assert_close(theirs, whole)
        torch.testing.assert_close(mine, theirs, atol=1e-7, rtol=0)
        gradients = [torch.autograd.grad(value.sum(), policy, retain_graph=True)[0] for value in (mine, theirs)]
        torch.testing.assert_close(*gradients, atol=1e-7, rtol=0)


def test_the_teachers_row_has_the_rows_images_where_its_prompt_has_them() -> None:
    row = make_row(random.Random(0))
    first = row.mask.index(1)
    row.token_ids[:first] = range(10, 10 + first)
    row.images = [ImageSpan(at, 1, name, (1, 2, 2)) for at, name in ((1, "a"), (first - 1, "b"), (first + 7, "c"))]
    # the text comes after the first image, and before the second
    row.teacher_prompt = [*row.token_ids[:2], 60, 61, 62, *row.token_ids[2:first]]
    assert [image.offset for image in row.images_for_teacher()] == [1, first + 2, first + 10]
    row.teacher_prompt = row.token_ids[:first]
    assert row.images_for_teacher() == row.images


def test_saved_groups_need_a_text_for_the_teacher() -> None:
    row = Row([3, 4], [0, 1], [0.0, -1.0])
    groups = [Group("0", {}, [Trajectory("0.0", [], [Row(), row], Outcome.COMPLETED)], 0)]
    with pytest.raises(SettingError, match=r"teacher\.context: set, but saved has no text for a teacher.* fix: name"):
        check_saved_prompts(groups, Path("saved"))
    assert training_row(row).in_context is None
    assert is_graded({"teacher": torch.tensor([float("inf"), -1.0])}).tolist() == [False, True]
    row.teacher_prompt = [3]
    check_saved_prompts(groups, Path("saved"))


def test_more_tokens_than_the_vocabulary_are_refused(make_recipe: Make) -> None:
    recipe = in_context(make_recipe(), divergence="forward_kl", top_k=VOCABULARY + 1)
    with pytest.raises(SettingError, match=r"teacher\.top_k: got 65, .* 64 tokens; fix: lower it"):
        Learner(recipe, on_cpu(), TEMPERATURE)


# ---- a teacher behind a server


LONGEST = 90
dense_at_1 = partial(dense, temperature=1.0)
DISTILL: dict[str, Any] = {
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


@pytest.mark.processes
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
    recipe = with_url(make_recipe(**DISTILL, batching=batching), teacher_url, **settings)
    assert needed_scores(recipe) == []
    credit = Credit(graded(recipe, chains()), recipe)
    rows = credit.assign(credit.rows).rows
    done = Recorded(recipe, rows, temperature=1.0)
    # the trainer loads no teacher
    assert done.learner.networks == [done.learner.model]
    metrics = update_metrics([done.update], done.batch)
    network, policy = dense_at_1(model_folder, rows)
    with torch.no_grad():
        teacher = dense_at_1(teacher_folder, rows)[1]
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


@pytest.mark.processes
def test_rows_without_grades_are_refused(make_recipe: Make) -> None:
    recipe = with_url(make_recipe(algorithm="distill"), "http://127.0.0.1:1")
    with pytest.raises(SettingError, match=r"teacher\.url: a row of \d+ sampled tokens has no grades"):
        Credit(make_groups(1, 1), recipe)
