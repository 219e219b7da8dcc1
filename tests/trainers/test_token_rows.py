"""Tokens that a network cannot tell from others, and the training of their rows beside an adapter."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentfactory.launching.merging import merge_adapter
from agentfactory.rollout.inference.embedded.engine import Engine
from agentfactory.trainers.batches.batch import training_row
from agentfactory.trainers.networks.critic import ActorCritic, Role, make_actor_critic
from agentfactory.trainers.networks.lora import TokenNeeds, adapters_off, find_alike, rows_of
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.sync.canary import canary_rows, with_tokens
from agentfactory.trainers.sync.server_control import SyncError
from agentfactory.trainers.teachers.teacher import make_reference
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.learner_state import load_state
from agentfactory.trainers.update.policy_update import update_policy
from tests.conftest import embedded_server
from tests.engine_runs import check, decode
from tests.saved_checkpoint import save_checkpoint
from tests.trainers.conftest import make_row, on_cpu
from tests.trainers.float64 import assert_equal, in_float64
from tests.untrained_tokens import CLOSE, KINDS, OPEN, change, make_needs, make_untrained, push_versions, recipe_of


@pytest.fixture(scope="module")
def needs() -> TokenNeeds:
    return make_needs()


FURTHER = [pytest.param(kind, marks=pytest.mark.extended) for kind in KINDS if kind not in ("tied", "untied")]


@pytest.fixture(scope="module", params=["tied", "untied", *FURTHER])
def dead(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, needs: TokenNeeds) -> Path:
    return make_untrained(request.param, tmp_path_factory.mktemp(request.param), needs)


def trained(model: Path, needs: TokenNeeds) -> Policy:
    return change(load_policy(recipe_of(model), needs=needs), 1).eval()


def ids_with(needs: TokenNeeds) -> Tensor:
    ids = torch.arange(24).reshape(2, 12) % 400
    ids[:, 3], ids[0, 7] = needs.tokens.written[OPEN], needs.tokens.written[CLOSE]
    return ids


PLACES = torch.tensor([3, 7, 9, 15, 23])


def score(policy: Policy, ids: Tensor) -> Tensor:
    return policy(ids, PLACES - 1, ids.flatten()[PLACES])[0]


def logprobs(network: Any, ids: Tensor) -> Tensor:
    chosen = network(ids).logits.flatten(0, 1)[PLACES - 1].log_softmax(-1)
    return chosen.gather(-1, ids.flatten()[PLACES, None]).squeeze(-1)


def test_a_run_with_an_adapter_is_refused_with_tokens_figures_and_ways_out(dead: Path, needs: TokenNeeds) -> None:
    named = rf"cannot tell {OPEN} \({needs.tokens.written[OPEN]}\), {CLOSE} \(.* from 43 other tokens .* equal to 0\.00"
    fix = r"model\.lora\.trainable_tokens=auto; or write calls without these tokens: rollout\.parser=json"
    with pytest.raises(ValueError, match=f"trainable_tokens: missing, but the network {named}.*{fix}"):
        load_policy(recipe_of(dead, None), needs=needs)
    with pytest.raises(ValueError, match=rf"got '{OPEN}', but the network cannot tell {CLOSE} "):
        load_policy(recipe_of(dead, [OPEN]), needs=needs)
    with pytest.raises(ValueError, match="got '<call>', which is no token of the vocabulary"):
        load_policy(recipe_of(dead, ["<call>"]), needs=needs)


def test_another_format_needs_no_dead_token(dead: Path) -> None:
    needs = make_needs("json")
    assert needs.tokens.written.keys() == {"<|im_end|>"}
    assert load_policy(recipe_of(dead), needs=needs).trained_tokens == []


def test_trained_rows_are_not_found(model_folder: Path, needs: TokenNeeds) -> None:
    torch.manual_seed(0)
    rows = torch.randn(600, 64)
    assert find_alike("head", rows, range(600)) == {}
    rows[5] = rows[9]
    assert find_alike("head", rows, range(600)).keys() == {5, 9}, "two of a kind are enough if they are equal"
    rows[5] = rows[9] * 1.1
    assert find_alike("head", rows, [5]) == {}, "two similar rows are told apart"
    rows[100:140] = rows[9] + 0.01 * torch.randn(40, 64)
    assert find_alike("head", rows, [9])[9].others == 41, "quantised rows are never quite equal"


def test_a_dead_token_that_ends_turns_asks_for_another_template(tmp_path: Path, needs: TokenNeeds, dead: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(dead)
    with torch.no_grad():
        for table in (network.get_input_embeddings(), network.get_output_embeddings()):
            table.weight[needs.tokens.ends] = table.weight[511].clone()
    network.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot tell .*<\|im_end\|>.*or set model\.chat_template to one with tokens"):
        load_policy(recipe_of(tmp_path, None), needs=needs)


def test_initial_rows_are_told_apart(dead: Path, needs: TokenNeeds) -> None:
    policy = load_policy(recipe_of(dead), needs=needs)
    tags = [needs.tokens.written[OPEN], needs.tokens.written[CLOSE]]
    assert sorted(policy.trained_tokens) == sorted(tags)
    for _, layer in rows_of(policy.network):
        assert find_alike("", layer.get_merged_weights(["default"]), tags) == {}
    # an explicit token that was trained begins with its own row
    policy = load_policy(recipe_of(dead, [OPEN, CLOSE, "<think>"]), needs=needs)
    token = needs.tokenizer.convert_tokens_to_ids("<think>")
    for _, layer in rows_of(policy.network):
        assert torch.equal(layer.trainable_tokens_delta["default"][2], layer.base_layer.weight[token])


def test_rows_are_computed_as_by_peft(dead: Path, needs: TokenNeeds) -> None:
    """Outputs and gradients, in float64; peft's own layers copy the whole tables."""
    policy = in_float64(trained(dead, needs))
    for _, layer in rows_of(policy.network):
        layer.trainable_tokens_original.double()
    ids = ids_with(needs)
    weights = [weight for weight in policy.parameters() if weight.requires_grad]

    def results() -> list[Tensor]:
        found = score(policy, ids)
        return [found, *torch.autograd.grad(found.sum(), weights)]

    ours = results()
    for _, layer in rows_of(policy.network):
        del layer.forward_adapters
    assert_equal(ours, results())
    rows = [name for name, weight in policy.named_parameters() if weight.requires_grad and "token_adapter" in name]
    assert len(rows) == (1 if policy.network.config.tie_word_embeddings else 2)


def test_the_reference_has_the_rows_off(dead: Path, needs: TokenNeeds) -> None:
    policy, ids = trained(dead, needs), ids_with(needs)
    base = AutoModelForCausalLM.from_pretrained(dead)
    with adapters_off(policy.model):
        torch.testing.assert_close(score(policy, ids), logprobs(base, ids))
    assert not torch.allclose(score(policy, ids), logprobs(base, ids), atol=0.1)


def test_a_critic_has_rows_of_its_own(dead: Path, needs: TokenNeeds) -> None:
    recipe = recipe_of(dead, advantage={"estimator": "gae"})
    policy = load_policy(recipe, needs=needs)
    both: ActorCritic = make_actor_critic(recipe, policy)
    for role in Role:
        rows = [p for n, p in both.named_parameters() if "token_adapter" in n and p.requires_grad and p.ndim == 2]
        assert len(both.parameters_of(role)) > 0
    assert len(rows) == (2 if policy.network.config.tie_word_embeddings else 4)
    ids = ids_with(needs)
    places = torch.tensor([3, 7, 9])
    both.critic.head.data.fill_(0.1)
    both(Role.CRITIC, ids, places, places).sum().backward()
    named = {name for name, p in both.named_parameters() if p.grad is not None and "token_adapter" in name}
    assert named
    assert all(name.endswith(".critic") for name in named)


def test_peft_loads_and_our_export_merges_what_is_written(dead: Path, needs: TokenNeeds, tmp_path: Path) -> None:
    policy, ids = trained(dead, needs), ids_with(needs)
    expected = score(policy, ids)
    policy.save_adapter(tmp_path / "adapter", policy.gather())
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(dead), tmp_path / "adapter")
    torch.testing.assert_close(logprobs(loaded, ids), expected, atol=1e-4, rtol=0)
    (tmp_path / "merged").mkdir()
    merge_adapter(tmp_path / "adapter", str(dead), "float32", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.tie_word_embeddings == policy.network.config.tie_word_embeddings
    torch.testing.assert_close(logprobs(merged, ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("quantization", [None, pytest.param("nf4", marks=pytest.mark.extended)])
def test_rows_are_trained_and_restored(dead: Path, needs: TokenNeeds, tmp_path: Path, quantization: str | None) -> None:
    recipe = recipe_of(dead, quantization=quantization, learning_rate=1e-2)
    learner = Learner(recipe, on_cpu(), needs=needs)
    before = {name: value.clone() for name, value in learner.policy.gather().items()}
    rng = random.Random(0)
    rows = [make_row(rng) for _ in range(4)]
    for row in rows:
        row.token_ids[-2:] = needs.tokens.written[OPEN], needs.tokens.written[CLOSE]
        row.mask[-2:] = 1, 1
    update_policy(learner, learner.deal([training_row(row, 1.0) for row in rows]), recipe)
    learner.schedule.step()
    after = learner.policy.gather()
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert [name for name in changed if name.endswith("trainable_tokens_delta")]
    path = save_checkpoint(tmp_path, 1, learner, needs.tokenizer, {})
    again = Learner(recipe, on_cpu(), needs=needs)
    load_state(path, again)
    for name, value in again.policy.gather().items():
        assert torch.equal(value, after[name]), name


def test_the_embedded_engine_serves_the_rows(dead: Path, needs: TokenNeeds, tmp_path: Path) -> None:
    policy = trained(dead, needs)
    policy.save_adapter(tmp_path, policy.gather())
    engine = Engine(AutoModelForCausalLM.from_pretrained(dead), max_num_seqs=4, max_model_len=64)
    adapter = engine.adapters.load("rows", str(tmp_path))
    prompts = [ids_with(needs)[number % 2].numpy() for number in range(4)]
    requests = decode(engine, prompts, 3, adapters=(None, adapter))
    base = AutoModelForCausalLM.from_pretrained(dead)
    for number, request in enumerate(requests):
        if request.adapter is None:
            check(base, request, 1e-4)
            continue
        ids = torch.tensor([[*prompts[number], *request.tokens]])
        places = torch.arange(len(prompts[number]), ids.shape[1])
        expected = policy(ids, places - 1, ids[0][places])[0]
        torch.testing.assert_close(torch.tensor(request.logprobs), expected, atol=1e-4, rtol=0)


def test_the_canary_sees_the_rows() -> None:
    rows = canary_rows(range(10, 400), 144)
    for number, row in enumerate(rows):
        watched = with_tokens(row, [450, 451, 452, 453, 454], number)
        assert len(watched.candidates) == len(set(watched.candidates)) == len(row.candidates)
        assert len({450, 451, 452, 453, 454} & {*watched.candidates}) == 4
        assert len({450, 451, 452, 453, 454} & {*watched.context}) == (4 if number % 2 == 0 else 0)
        assert len(watched.context) == len(row.context)
    assert with_tokens(rows[0], [], 0) == rows[0]


def test_rows_go_on_with_their_adapter(dead: Path, needs: TokenNeeds, tmp_path: Path) -> None:
    before, ids = trained(dead, needs), ids_with(needs)
    before.save_adapter(tmp_path, before.gather())
    recipe = recipe_of(dead, loss={"kl": {"coefficient": 0.1}})
    recipe.model.lora.from_ = str(tmp_path)
    policy = load_policy(recipe, needs=needs).eval()
    torch.testing.assert_close(score(policy, ids), score(before, ids), atol=1e-5, rtol=0)
    reference = make_reference(recipe, policy, on_cpu())
    inputs = (ids, PLACES - 1, ids.flatten()[PLACES])
    began = reference.logprobs(policy, *inputs)
    assert torch.equal(began, score(policy, ids)), "the KL divergence of the first step is exactly 0"
    change(policy, 2)
    assert (score(policy, ids) - began).abs().max() > 0.01
    assert torch.equal(reference.logprobs(policy, *inputs), began)
    assert policy.gather().keys() == before.gather().keys(), "the reference is neither saved nor sent"


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_pushed_rows_are_proven(kind: str, needs: TokenNeeds, tmp_path: Path) -> None:
    """On the embedded engine; tests/vllm/vllm_token_rows.py does the same on vLLM."""
    model = make_untrained(kind, tmp_path / "model", needs)
    with embedded_server(model, "--max-model-len", "160") as url:
        metrics = push_versions(model, needs, url, tmp_path / "sync")
        assert metrics["sync/provable"] == 1.0
        assert metrics["sync/canary_slope"] == pytest.approx(1.0, abs=0.01)
        for number, lost in enumerate(["lm_head", "embed_tokens"]):
            with pytest.raises(SyncError, match=r"it does not have these rows|from the trainer's at the start"):
                push_versions(model, needs, url, tmp_path / f"lost{number}", lost)
