"""Log-probabilities of the trainer for every text family of transformers, compared with the model alone."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agentfactory.tools.errors import SettingError
from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.networks.network import apply_options
from agentfactory.trainers.networks.policy import Policy, check_head
from agentfactory.trainers.networks.row_layouts import resolve_batching


def largest_error(network: Any) -> float:
    """Return the largest deviation of the trainer's log-probabilities, with the attention that transformers chooses,
    from the network's own with eager attention, on two rows longer than a sliding window."""
    ids = torch.randint(3, 98, (2, 24), generator=torch.Generator().manual_seed(0))
    chosen = network.config._attn_implementation
    sources = torch.tensor([place for place in range(48) if place % 24 != 23])
    labels = ids.flatten()[sources + 1]
    with torch.no_grad():
        network.set_attn_implementation("eager")
        alone = network(ids, use_cache=False).logits.log_softmax(-1).flatten(0, 1)[sources, labels]
        network.set_attn_implementation(chosen)
        ours, _ = Policy(network, torch.float32)(ids, sources, labels)
    return float((ours - alone).abs().max())


@pytest.mark.numbers
@pytest.mark.parametrize(
    "family",
    [
        *("gemma2", "vaultgemma"),  # a soft cap on attention scores, which torch's kernels lack
        *("gemma3_text", "granite", "gpt_oss"),  # sliding windows; scaled residuals and scores; sinks
        *("deepseek_v3", "deepseek_v32"),  # latent attention; selected keys
        *("recurrent_gemma", "llama4_text"),  # another name of the cap on logits; another name of the body
    ],
)
def test_log_probabilities_are_those_of_the_model_alone(family: str) -> None:
    network = tiny_network(family)
    if family == "granite":
        network.config.logits_scaling = 1.0
    check_head(network)
    assert largest_error(network) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["rembert", "cohere"])
def test_a_network_whose_head_is_not_supported_is_refused(family: str, dtype: torch.dtype) -> None:
    with pytest.raises(SettingError, match=r"model\.path: .*; fix: train another model"):
        check_head(tiny_network(family).to(dtype))


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "recurrent_gemma", "gpt_oss", "deepseek_v3"])
def test_families_are_accepted_in_bfloat16(family: str) -> None:
    check_head(tiny_network(family).to(torch.bfloat16))


def test_rounding_that_deep_layers_amplify_is_no_fault() -> None:
    """As in pretrained networks of 24 layers, whose log-probabilities differ by .8 between kinds of attention."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 24, "initializer_range": 0.2}
    config = CONFIG_MAPPING["qwen2"](vocab_size=128, num_attention_heads=4, num_key_value_heads=2, **sizes)
    network = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    ids, scores = torch.arange(8)[None], []
    for kind in ("eager", "sdpa"):
        network.set_attn_implementation(kind)
        with torch.no_grad():
            scores.append(network(ids).logits.float().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None]))
    assert (scores[0] - scores[1]).abs().max() > 0.1
    check_head(network)


def test_only_attention_that_selects_keys_is_chosen() -> None:
    network, train = tiny_network("deepseek_v32"), TrainConfig(steps=1, attention="flex_attention")
    assert resolve_batching(network, TrainConfig(steps=1)) == "padded"
    with pytest.raises(SettingError, match=r"train\.attention: flex_attention would ignore the keys that .* selects"):
        apply_options(network, train, "cpu")


@pytest.mark.numbers
def test_rows_share_a_line_under_a_soft_cap() -> None:
    """Without sliding windows, rows of Gemma 2 are laid out as a tree, whose hidden states are compared with the
    rows'."""
    config = CONFIG_MAPPING["gemma2"](**{**_fitting("gemma2"), "layer_types": ["full_attention"] * 4})
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config).eval()
    assert resolve_batching(network, TrainConfig(steps=1)) == "tree"


@pytest.mark.long
@pytest.mark.parametrize("family", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - COMPOSITE - NOT_BUILT))
def test_every_family_is_exact_or_refused(family: str) -> None:
    network = tiny_network(family)
    try:
        check_head(network)
    except SettingError:
        return
    assert largest_error(network) < 1e-4
