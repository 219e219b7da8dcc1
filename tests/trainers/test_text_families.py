"""Log-probabilities of the trainer for every text family of transformers, compared with the model alone."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agentfactory.tools.errors import SettingError
from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.networks.policy import Policy, _check_head
from agentfactory.trainers.networks.row_layouts import resolve_batching

TINY = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_dim", "n_inner"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("n_positions", "max_position_embeddings"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"vocab_size": 99, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2, "sliding_window": 8},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "state_size": 8, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2, "lru_width": 64, "attention_window_size": 8},
    # large weights and low caps, so that a cap or a scale that is left out shows
    **{"initializer_range": 0.3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "logits_soft_cap": 2.0},
}
UNSETTABLE = ([], ["head_dim"], ["num_key_value_heads", "head_dim"], ["sliding_window"])
"""Fields that some configurations refuse, in turn."""
MOST_WEIGHTS = 30_000_000


def _fitting(family: str) -> dict[str, Any]:
    return {name: value for name, value in TINY.items() if getattr(CONFIG_MAPPING[family](), name, None) is not None}


def tiny_network(family: str) -> PreTrainedModel:
    """Return a random network of a family. Skip if its configuration cannot be made tiny in this way."""
    kind = CONFIG_MAPPING[family]
    try:
        given = _fitting(family)
        for unsettable in UNSETTABLE:
            try:
                config = kind(**{name: value for name, value in given.items() if name not in unsettable})
                break
            except Exception:
                continue
        with torch.device("meta"):
            size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
        if config.get_text_config() is not config or size > MOST_WEIGHTS:
            pytest.skip("a configuration of several parts, or too large")
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config).float().eval()
        network(torch.arange(3, 9)[None], use_cache=False)
    except Exception as error:
        pytest.skip(f"no tiny configuration: {type(error).__name__}: {str(error)[:100]}")
    return network


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
        *("recurrent_gemma", "llama4_text"),  # another name of the cap on logits; another name of the body
    ],
)
def test_log_probabilities_are_those_of_the_model_alone(family: str) -> None:
    network = tiny_network(family)
    if family == "granite":
        network.config.logits_scaling = 1.0
    _check_head(network)
    assert largest_error(network) < 1e-4


@pytest.mark.numbers
def test_rows_share_a_line_under_a_soft_cap() -> None:
    """Without sliding windows, rows of Gemma 2 are laid out as a tree, whose hidden states are compared with the
    rows'."""
    config = CONFIG_MAPPING["gemma2"](**{**_fitting("gemma2"), "layer_types": ["full_attention"] * 4})
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config).eval()
    assert resolve_batching(network, TrainConfig(steps=1)) == "tree"


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
@pytest.mark.timeout(60)
def test_every_family_is_exact_or_refused(family: str) -> None:
    network = tiny_network(family)
    try:
        _check_head(network)
    except SettingError:
        return
    assert largest_error(network) < 1e-4
