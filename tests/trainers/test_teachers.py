"""Teachers: divergences, and whole updates with them, compared with dense forward passes in float64 and with TRL."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl.experimental.gkd import GKDTrainer

from agentfactory.base.errors import SettingError
from agentfactory.trainers.batches.batch import Batch, TrainingRow
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.token_advantages import needed_scores
from agentfactory.trainers.networks import policy as policy_module
from agentfactory.trainers.networks.policy import load_policy
from agentfactory.trainers.teachers.teacher import Teacher, divergence, make_teacher, top_k, top_k_divergence
from agentfactory.trainers.update.learner import Learner, Terms, Update
from agentfactory.trainers.update.policy_update import update_metrics, update_policy
from tests.trainers.conftest import VOCABULARY, Make, on_cpu
from tests.trainers.float64 import in_float64, never_through_float32
from tests.trainers.launched_teachers import TEMPERATURE, exercise, make_rows
from tests.trainers.ranks import on_ranks
from tests.trainers.scored import fill_adapters

pytestmark = pytest.mark.numbers

EXACT = {"reverse_kl": 1.0, "forward_kl": 0.0, "jensen_shannon": 0.5}
"""Divergence -> beta of TRL's GKD."""


def teaching(recipe: TrainRecipe, **teacher: Any) -> TrainRecipe:
    data = recipe.model_dump(mode="json", by_alias=True) | {"teacher": teacher}
    data["rollout"]["temperature"] = TEMPERATURE
    return TrainRecipe.model_validate_json(json.dumps(data), strict=True)


def with_teacher(recipe: TrainRecipe, folder: Path, **teacher: Any) -> TrainRecipe:
    return teaching(recipe, model=str(folder), **teacher)


def by_hand(kind: str, policy: Tensor, teacher: Tensor) -> Tensor:
    p, q = policy.softmax(-1), teacher.softmax(-1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    if kind == "reverse_kl":
        return kl(p, q)
    if kind == "forward_kl":
        return kl(q, p)
    mixture = (q + p) / 2
    return (kl(q, mixture) + kl(p, mixture)) / 2


def draw() -> tuple[Tensor, Tensor]:
    """Logits of policy and teacher."""
    generator = torch.Generator().manual_seed(0)
    policy, teacher = (3 * torch.randn(7, 50, generator=generator, dtype=torch.float64) for _ in range(2))
    return policy.requires_grad_(), teacher


def same_with_gradients(policy: Tensor, *values: Tensor) -> None:
    for other in values[1:]:
        torch.testing.assert_close(values[0], other, atol=1e-9, rtol=0)
        gradients = [torch.autograd.grad(v.sum(), policy, retain_graph=True)[0] for v in (values[0], other)]
        torch.testing.assert_close(*gradients, atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", EXACT)
def test_divergences_equal_their_definition_and_trls(kind: str) -> None:
    policy, teacher = draw()
    ours = divergence(kind, policy / TEMPERATURE, teacher / TEMPERATURE)  # type: ignore[arg-type]
    hand = by_hand(kind, policy / TEMPERATURE, teacher / TEMPERATURE)
    trl = GKDTrainer.generalized_jsd_loss(policy, teacher, None, EXACT[kind], TEMPERATURE, reduction="sum")
    assert bool((ours > 0.1).all())
    same_with_gradients(policy, ours, hand)
    same_with_gradients(policy, ours.sum(), trl)


@pytest.mark.parametrize("kind", EXACT)
def test_the_divergence_over_the_most_likely_tokens_equals_sums_by_hand(kind: str) -> None:
    policy, teacher = draw()
    found = top_k(teacher, 5)
    tokens = found[:, 0].long()
    assert tokens.tolist() == teacher.argsort(-1, descending=True)[:, :5].tolist()
    ours = top_k_divergence(kind, policy, tokens, found[:, 1])  # type: ignore[arg-type]

    def merged(logits: Tensor) -> Tensor:
        kept = logits.softmax(-1).gather(-1, tokens)
        return torch.cat([kept, 1 - kept.sum(-1, keepdim=True)], -1).log()

    hand = by_hand(kind, merged(policy), merged(teacher))
    same_with_gradients(policy, ours, hand)
    exact = divergence(kind, policy, teacher)  # type: ignore[arg-type]
    assert bool((ours < exact).all())
    assert bool((ours > 0.01).all())
    # with the whole vocabulary, also where more tokens are asked for, it is the divergence itself
    for k in (50, 60):
        found = top_k(teacher, k)
        whole = top_k_divergence(kind, policy, found[:, 0].long(), found[:, 1])  # type: ignore[arg-type]
        same_with_gradients(policy, whole, exact)


def test_tokens_outside_the_policys_vocabulary_belong_to_the_rest() -> None:
    policy = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    theirs = torch.tensor([[0.5, 0.2, 0.1], [0.5, 0.2, 0.1], [0.5, 0.2, 0.1]], dtype=torch.float64).log()
    tokens = torch.tensor([[4, 0, 2], [4, -1, 2], [-1, 12, -1]])
    found = top_k_divergence("reverse_kl", policy, tokens, theirs)
    p = policy.softmax(-1)
    whole = torch.stack([p[0, 4], p[0, 0], p[0, 2], 1 - p[0, 4] - p[0, 0] - p[0, 2]])
    part = torch.stack([p[1, 4], p[1, 2], 1 - p[1, 4] - p[1, 2]])
    hand = [(whole * (whole / torch.tensor([0.5, 0.2, 0.1, 0.2])).log()).sum()]
    hand += [(part * (part / torch.tensor([0.5, 0.1, 0.4])).log()).sum(), torch.zeros((), dtype=torch.float64)]
    torch.testing.assert_close(found, torch.stack(hand), atol=1e-7, rtol=0)
    (gradient,) = torch.autograd.grad(found[2], policy)
    assert gradient.tolist() == torch.zeros(3, 10).tolist()


class Recorded:
    """An update that keeps its gradients and changes no weight, with the recipe's networks in float64."""

    def __init__(self, recipe: TrainRecipe, rows: list[TrainingRow], temperature: float = TEMPERATURE) -> None:
        self.learner = Learner(recipe, on_cpu(), temperature)
        for network in self.learner.networks:
            in_float64(network)
        self.learner.optimizer.step = self.learner.optimizer.zero_grad = lambda: None
        names = needed_scores(recipe)
        self.rows = self.learner.score(rows, names) if names else rows
        self.batch: Batch = self.learner.deal(self.rows)
        report = self.learner._report

        def kept(terms: list[Terms], normaliser: float, norm: float) -> Update:
            # the report itself is in float32
            self.loss = torch.stack([part.loss.detach() for part in terms]).sum() / normaliser
            return report(terms, normaliser, norm)

        self.learner._report = kept  # type: ignore[method-assign]
        self.update = update_policy(self.learner, self.batch, recipe).updates[0]
        trained = self.learner.policy.network.named_parameters()
        self.gradients = {name: weight.grad for name, weight in trained if weight.grad is not None}


def dense(folder: Path, rows: list[TrainingRow], temperature: float = TEMPERATURE) -> tuple[Any, list[Tensor]]:
    network: Any = in_float64(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    logits = []
    for row in rows:
        whole = network(torch.from_numpy(row.token_ids)[None], use_cache=False).logits[0]
        logits.append(whole[torch.from_numpy(row.targets) - 1] / temperature)
    return network, logits


def as_stored(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32).astype(np.float64))


def check_by_hand(done: Recorded, folder: Path, teacher: list[Tensor | None], kind: str, count: int | None) -> None:
    """Compare loss, gradients and divergence of an update with a dense forward pass of the policy; `teacher` are the
    teacher's logits of each row's targets, None for rows that it does not grade."""
    assert len(done.batch.micro_batches) > 1
    network, policy = dense(folder, done.rows)
    terms, kls = [], []
    for row, logits, theirs in zip(done.rows, policy, teacher, strict=True):
        labels = torch.from_numpy(row.token_ids[row.targets])[:, None]
        own = logits.log_softmax(-1).gather(-1, labels)[:, 0]
        advantage = as_stored(row.streams["advantage"])
        if theirs is not None and kind == "sampled":
            # all rows of the teacher's head count, as where it samples itself
            scored = row.streams["teacher"]
            expected = theirs.log_softmax(-1).gather(-1, labels)[:, 0]
            torch.testing.assert_close(torch.from_numpy(scored), expected, atol=1e-9, rtol=0)
            kls.append(own.detach() - as_stored(scored))
            advantage = advantage - 0.8 * kls[-1]
            if "most" in row.streams:
                least, most = (torch.from_numpy(row.streams[name]) for name in ("least", "most"))
                advantage = torch.maximum(torch.minimum(advantage, most), least)
        elif theirs is not None:
            compared = [logits, theirs[:, :VOCABULARY]]
            if count is not None:
                best = compared[1].softmax(-1).topk(count)
                kept = [compared[0].softmax(-1).gather(-1, best.indices), best.values]
                if count < VOCABULARY:
                    kept = [torch.cat([values, 1 - values.sum(-1, keepdim=True)], -1) for values in kept]
                compared = [values.log() for values in kept]
            found = by_hand(kind, *compared)
            kls.append(found.detach())
            terms.append(0.8 * found)
        terms.append(-(own - own.detach()).exp() * advantage)
    loss = torch.cat(terms).sum() / done.batch.tokens
    loss.backward()
    # log-probabilities of several tokens are stored in float32
    tolerance = 1e-9 if count is None else 1e-6
    torch.testing.assert_close(done.loss, loss.detach(), atol=tolerance, rtol=0)
    expected_gradients = {name: weight.grad for name, weight in network.named_parameters()}
    assert max(float(value.abs().max()) for value in expected_gradients.values()) > 1e-2
    torch.testing.assert_close(done.gradients, expected_gradients, atol=tolerance, rtol=0)
    reported = update_metrics([done.update], done.batch)["teacher/kl"]
    assert reported == pytest.approx(float(torch.cat(kls).mean()), abs=1e-5)
    assert abs(reported) > 1e-2


PLAIN = {"behaviour_kl": 0.0, "mismatch": {"correction": "none"}}


@pytest.mark.parametrize(
    ("kind", "count", "batching"),
    [
        *(("reverse_kl", None, "padded"), ("forward_kl", None, "packed"), ("jensen_shannon", None, "tree")),
        *(("sampled", None, "tree"), ("sampled", None, "padded"), ("reverse_kl", 4, "tree")),
    ],
)
def test_an_update_equals_a_dense_forward_pass(
    make_recipe: Make,
    model_folder: Path,
    teacher_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    count: int | None,
    batching: str,
) -> None:
    # five positions of a vocabulary of 64 at a time
    monkeypatch.setattr(policy_module, "LOGITS_PER_CHUNK", 320)
    algorithm = {"batching": batching, "token_budget": 60, "max_grad_norm": 1e9, "loss": PLAIN}
    recipe = make_recipe(**algorithm)
    recipe = with_teacher(recipe, teacher_folder, divergence=kind, coefficient=0.8, top_k=count)
    rows = make_rows()
    if kind == "sampled":
        # as for a malformed turn, and for tokens that top_entropy leaves out
        rng = np.random.default_rng(1)
        for row in rows:
            shape = row.streams["advantage"].shape
            left_out = rng.random(shape) < 0.3
            bounds = np.where(rng.random(shape) < 0.3, -0.5, np.inf)
            row.streams["most"] = np.where(left_out, 0.0, bounds)
            row.streams["least"] = np.where(left_out, 0.0, -np.inf)
    with never_through_float32():
        done = Recorded(recipe, rows)
        with torch.no_grad():
            teacher = dense(teacher_folder, rows)[1]
        check_by_hand(done, model_folder, [*teacher], kind, count)


@pytest.mark.parametrize("kind", ["reverse_kl", "sampled"])
def test_the_base_of_an_adapter_teaches_without_further_weights(
    make_recipe: Make, model_folder: Path, teacher_folder: Path, kind: str, tmp_path: Path
) -> None:
    """It grades as a copy of the base does, also after the adapter has changed."""
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    found = []
    for folder in (model_folder, copy):
        recipe = with_teacher(make_recipe(lora={"rank": 4}, loss=PLAIN), folder, divergence=kind)
        learner = Learner(recipe, on_cpu(), TEMPERATURE)
        assert len(learner.networks) == (1 if folder == model_folder else 2)
        for network in learner.networks:
            in_float64(network)
        learner.optimizer.step = lambda: None
        rows = make_rows()
        results = []
        for _ in range(2):
            scored = learner.score(rows, ["teacher"]) if kind == "sampled" else rows
            blank = [replace(row, streams=row.streams | {"advantage": row.targets * 0.0}) for row in scored]
            batch = learner.deal(blank)
            update = update_policy(learner, batch, recipe).updates
            results.append((update_metrics(update, batch)["teacher/kl"], update[0].grad_norm))
            generator = torch.Generator().manual_seed(3)
            fill_adapters(learner.policy, 0.3, generator)
        found.append(results)
    # an adapter begins as its base: there is nothing to learn from it yet
    assert found[0][0] == pytest.approx((0.0, 0.0), abs=1e-6)
    assert abs(found[0][1][0]) > 1e-2
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-6)


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "count", "machines"),
    [("ddp", 2, 1), ("fsdp2", 2, 1), pytest.param("hsdp", 4, 2, marks=pytest.mark.long)],
)
def test_several_processes_equal_one(
    make_recipe: Make,
    teacher_folder: Path,
    model_folder: Path,
    tmp_path: Path,
    strategy: str,
    count: int,
    machines: int,
) -> None:
    """Also with more in the teacher's context, where it is the policy itself."""
    cases: list[tuple[Any, dict[str, Any]]] = [
        (None, {"model": str(teacher_folder)}),
        ({"rank": 4}, {"divergence": "reverse_kl", "top_k": 4, "model": str(model_folder)}),
        (None, {"context": "solution", "divergence": "forward_kl", "top_k": 4}),
        ({"rank": 4}, {"context": "solution"}),
    ]
    if strategy == "ddp":
        cases.append(({"rank": 4}, {"divergence": "reverse_kl", "model": str(teacher_folder)}))
    one, several = [], []
    for lora, teacher in cases:
        for strategies, made in (({}, one), ({"strategy": strategy, "processes": count}, several)):
            recipe = make_recipe(lora=lora, loss=PLAIN, token_budget=70, max_grad_norm=1e9, **strategies)
            made.append(teaching(recipe, **teacher))
    expected = [exercise(recipe, on_cpu()) for recipe in one]
    found = on_ranks(exercise, several, tmp_path, strategy, count=count, machines=machines)[0]
    for given, wanted in zip(found, expected, strict=True):
        assert given["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        assert given["kl"] == pytest.approx(wanted["kl"], abs=1e-5)
        torch.testing.assert_close(given["gradients"], wanted["gradients"], atol=1e-5, rtol=1e-5)


def test_a_token_that_a_teacher_lacks_is_refused_where_a_chain_has_it(make_recipe: Make, teacher_folder: Path) -> None:
    recipe = with_teacher(make_recipe(), teacher_folder)
    policy = load_policy(recipe)
    frozen = make_teacher(recipe, policy, on_cpu())._frozen
    teacher = Teacher(recipe.teacher, frozen, VOCABULARY, {7: "<think>"})
    ids = torch.tensor([[3, 4, 5, 6]])
    places = torch.tensor([1, 2])
    teacher.logprobs(policy, ids, places, torch.tensor([5, 6]))
    with pytest.raises(SettingError, match=r"has no token '<think>' \(7\), which the policy's chains contain"):
        teacher.logprobs(policy, ids, places, torch.tensor([5, 7]))
