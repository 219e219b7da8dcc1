"""The policy compared with plain transformers and peft."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.networks import policy as policy_module
from agentfactory.trainers.networks.attention import BY_RUNS, attention_by_runs, use_ours
from agentfactory.trainers.networks.network import resolve_batching
from agentfactory.trainers.networks.policy import Policy, load_policy
from tests.placement.shapes import sizes
from tests.trainers.conftest import Make
from tests.trainers.float64 import assert_equal, in_float64
from tests.trainers.scored import fill_adapters

pytestmark = pytest.mark.numbers


IDS = torch.arange(24).reshape(2, 12) % 60
TARGETS = torch.tensor([3, 4, 9, 14, 23])


def score(policy: Policy, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies at TARGETS."""
    return policy(IDS, TARGETS - 1, IDS.flatten()[TARGETS], temperature=temperature)


def reference(network: torch.nn.Module, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the same from all logits of a plain transformers model."""
    distribution = torch.distributions.Categorical(logits=network(IDS).logits.flatten(0, 1)[TARGETS - 1] / temperature)
    return distribution.log_prob(IDS.flatten()[TARGETS]), distribution.entropy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_plain_transformers(make_recipe: Make, model_folder: Path, temperature: float) -> None:
    policy = in_float64(load_policy(make_recipe()))
    network = in_float64(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32))
    assert_equal(score(policy, temperature), reference(network, temperature))


def test_chunks_change_nothing(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, chunked = (in_float64(load_policy(make_recipe())) for _ in range(2))
    expected = score(whole)
    monkeypatch.setattr(policy_module, "LOGITS_PER_CHUNK", 130)  # two positions of a vocabulary of 64
    given = score(chunked)
    assert_equal(given, expected)
    expected[0].sum().backward()
    given[0].sum().backward()
    assert_equal([weight.grad for weight in chunked.parameters()], [weight.grad for weight in whole.parameters()])


def test_bfloat16_keeps_weights_and_scores_in_float32(make_recipe: Make) -> None:
    recipe = make_recipe()
    recipe.model.dtype = "bfloat16"
    policy = load_policy(recipe)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    logprob, entropy = score(policy)
    assert logprob.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprob, score(load_policy(make_recipe()))[0], atol=0.3, rtol=0.1)
    assert {value.dtype for value in policy.gather().values()} == {torch.bfloat16}


def test_adapter_is_loaded_by_peft(make_recipe: Make, model_folder: Path, tmp_path: Path) -> None:
    policy = in_float64(load_policy(make_recipe(lora={"rank": 3})))
    trainable = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)
    fill_adapters(policy, 0.1, torch.Generator().manual_seed(0))
    policy.eval()
    state = policy.gather()
    policy.save_adapter(tmp_path, state)
    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(in_float64(network), tmp_path, autocast_adapter_dtype=False)
    assert loaded.peft_config["default"].lora_alpha == 6
    assert_equal(score(policy), reference(loaded))
    assert not torch.allclose(score(policy)[0], score(in_float64(load_policy(make_recipe())))[0], atol=1e-3)


def test_seed_decides_the_adapter(make_recipe: Make) -> None:
    recipe = make_recipe(lora={"rank": 2})
    first, again, other = (load_policy(recipe.model_copy(update={"seed": seed})).gather() for seed in (1, 1, 2))
    name = next(name for name in first if "lora_A" in name)
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_refusals_name_the_field(make_recipe: Make, tmp_path: Path) -> None:
    half = make_recipe()
    half.model.dtype = "float16"
    with pytest.raises(ValueError, match=r"model.dtype: float16"):
        load_policy(half)
    policy = load_policy(make_recipe(lora={"rank": 2}))
    policy.save_adapter(tmp_path / "adapter", policy.gather())
    recipe = make_recipe()
    recipe.model.path = str(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"model.path: .* LoRA adapter"):
        load_policy(recipe)
    scaled = GraniteConfig(**sizes(16, 16, 1, 2, 2, 32), logits_scaling=4.0, initializer_range=0.5)
    GraniteForCausalLM(scaled).save_pretrained(tmp_path / "granite")
    recipe.model.path = str(tmp_path / "granite")
    with pytest.raises(ValueError, match=r"model.path: GraniteForCausalLM changes its logits"):
        load_policy(recipe)


def test_entropy_has_a_gradient_only_when_asked(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = in_float64(load_policy(make_recipe()))
    assert not score(policy)[1].requires_grad
    labels = IDS.flatten()[TARGETS]
    expected = torch.autograd.grad(reference(policy.network, 0.6)[1].sum(), list(policy.network.parameters()))
    for chunk in (policy_module.LOGITS_PER_CHUNK, 130):
        monkeypatch.setattr(policy_module, "LOGITS_PER_CHUNK", chunk)
        _, entropy = policy(IDS, TARGETS - 1, labels, temperature=0.6, entropy_gradient=True)
        given = torch.autograd.grad(entropy.sum(), list(policy.network.parameters()))
        assert_equal(given, expected)
    with torch.no_grad():
        assert not policy(IDS, TARGETS - 1, labels, entropy_gradient=True)[1].requires_grad


def tree() -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and ends of a line: a trunk of 5, then branches of 4 and 3."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7]])
    return IDS[1:], positions, torch.tensor([[12] * 5 + [9] * 4 + [12] * 3])


@pytest.mark.processes
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("flex_attention", marks=pytest.mark.long)])
def test_every_attention_sees_a_token_s_own_rows(make_recipe: Make, attention: str) -> None:
    """flex_attention has no backward pass on a CPU, and no float64: its forward pass is called like the policy's
    own."""
    policy = load_policy(make_recipe())
    same = partial(torch.testing.assert_close, atol=1e-4, rtol=0)
    if attention == "sdpa":
        policy, same = in_float64(policy), assert_equal
    else:
        policy.network.set_attn_implementation(attention)
        use_ours(policy.network)
    ids, positions, ends = tree()
    first, second = ids[:, :9], torch.cat([ids[:, :5], ids[:, 9:]], 1)
    with torch.no_grad():
        hidden = policy.hidden(ids, positions, ends)
        network = AutoModelForCausalLM.from_pretrained(policy.network.config._name_or_path, dtype=torch.float32)
        alone = network.model.to(policy.dtype)
        same(hidden[:, :9], alone(first).last_hidden_state)
        same(hidden[:, 9:], alone(second).last_hidden_state[:, 5:])


def test_flash_attention_finds_packed_rows_by_their_positions(make_recipe: Make) -> None:
    """sdpa under another name, since the kernels need a GPU: it finds sequences by their positions as well."""
    AttentionInterface.register("flash_attention_by_sdpa", sdpa_attention_forward)
    AttentionMaskInterface.register("flash_attention_by_sdpa", sdpa_mask)
    policy = in_float64(load_policy(make_recipe()))
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0]])
    ends = torch.tensor([[6] * 6 + [11] * 5 + [12]])
    with torch.no_grad():
        expected = policy.hidden(IDS[:1], positions, ends)
        # its public method makes transformers look for the kernels
        policy.network.config._attn_implementation = "flash_attention_by_sdpa"
        assert_equal(policy.hidden(IDS[:1], positions, ends), expected)


@pytest.mark.parametrize(
    ("config", "batching"),
    [
        (Qwen3Config, "tree"),
        (LlamaConfig, "tree"),
        (GPT2Config, "tree"),
        (MistralConfig, "padded"),  # a sliding window
        (Gemma3TextConfig, "padded"),  # one in most layers
        (BloomConfig, "padded"),  # distances instead of positions
        (MambaConfig, "padded"),  # a state instead of attention
    ],
)
def test_rows_share_lines_where_that_is_exact(config: Any, batching: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    network = AutoModelForCausalLM.from_config(config(vocab_size=64, **sizes))
    assert resolve_batching(network, TrainConfig(steps=1)) == batching
    for asked in ("tree", "packed"):
        train = TrainConfig(steps=1, batching=asked)
        if batching == "tree":
            assert resolve_batching(network, train) == asked
        else:
            with pytest.raises(ValueError, match=rf"train.batching: {asked} would be wrong: {type(network).__name__} "):
                resolve_batching(network, train)
    assert resolve_batching(network, TrainConfig(steps=1, batching="padded")) == "padded"


def test_a_network_that_ignores_who_sees_whom_is_found_out(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(*inputs: Any, runs: Any = None, **options: Any) -> Any:
        return attention_by_runs(*inputs, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, BY_RUNS, blind)
    network = load_policy(make_recipe()).network
    assert resolve_batching(network, TrainConfig(steps=1)) == "padded"
    with pytest.raises(ValueError, match="other results, by"):
        resolve_batching(network, TrainConfig(steps=1, batching="tree"))
    with torch.no_grad():
        next(network.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="other results, by nan"):
        resolve_batching(network, TrainConfig(steps=1, batching="tree"))


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_attention_that_takes_no_tree(make_recipe: Make, attention: Any) -> None:
    network = load_policy(make_recipe()).network
    assert resolve_batching(network, TrainConfig(steps=1, attention=attention)) == "padded"
    with pytest.raises(ValueError, match=rf"train.attention={attention} does not support tree rows"):
        resolve_batching(network, TrainConfig(steps=1, attention=attention, batching="tree"))
    if attention != "eager":
        assert resolve_batching(network, TrainConfig(steps=1, attention=attention, batching="packed")) == "packed"


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 2}, marks=pytest.mark.extended)])
def test_options_keep_gradient(make_recipe: Make, monkeypatch: pytest.MonkeyPatch, lora: dict[str, int] | None) -> None:
    """Only the tensors kept for the backward pass change: fewer per layer, and none if they are offloaded."""
    # inductor takes half a minute: tests/gpu covers it
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    kept: dict[str, int] = {}
    found: dict[str, dict[str, Tensor]] = {}
    options: dict[str, dict[str, Any]] = {"none": {}, "checkpointing": {"gradient_checkpointing": True}}
    options |= {"offload": {"gradient_checkpointing": "offload"}, "compile": {"compile": True}}
    options["all"] = options["offload"] | options["compile"]
    for name, train in options.items():
        policy = in_float64(load_policy(make_recipe(lora=lora, **train)))
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(0 if tensor.is_leaf else tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logprob, _ = score(policy)
        kept[name] = sum(sizes)
        logprob.sum().backward()
        found[name] = {n: weight.grad for n, weight in policy.named_parameters() if weight.requires_grad}
    assert kept["checkpointing"] < 0.5 * kept["none"]
    assert kept["offload"] < kept["checkpointing"]
    for name in options:
        assert_equal(found[name], found["none"])


MISSING = r"model\.lora\.target_modules: got .*, but 'qproj' fits no module of the network; fix: use .*, q_proj"


@pytest.mark.parametrize(
    ("problem", "settings"),
    [
        ("train.attention: flex_attention needs a CUDA GPU", {"attention": "flex_attention"}),
        ("train.attention: flash_attention_2 needs a", {"attention": "flash_attention_2", "batching": "padded"}),
        ("train.liger: true needs a CUDA GPU, and this process trains on the CPU", {"liger": True}),
        # peft ignores such a name in a list
        (MISSING, {"lora": {"rank": 3, "target_modules": ["q_proj", "qproj"]}}),
        (MISSING, {"lora": {"rank": 3, "target_modules": "qproj"}}),
    ],
)
def test_settings_that_cannot_work_are_refused(make_recipe: Make, problem: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=problem):
        load_policy(make_recipe(**settings))
