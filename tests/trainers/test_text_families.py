"""Log-probabilities of the trainer for every text family of transformers, compared with the model alone."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agentfactory.tools.errors import SettingError
from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.networks.network import apply_options
from agentfactory.trainers.networks.policy import Policy, check_head
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
    **{"bos_token_id": 1, "eos_token_id": 2, "lru_width": 64, "attention_window_size": 8, "rotary_dim": 8},
    # large weights and low caps, so that a cap or a scale that is left out shows
    **{"initializer_range": 0.3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "logits_soft_cap": 2.0},
}
LATENT = {
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **{"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    # each query attends to 8 of 24 keys
    **{"index_head_dim": 32, "index_n_heads": 2, "index_topk": 8},
}
"""Fields of networks with latent attention, such as DeepSeek's, some of which select keys."""
LAYERS = ["sliding_attention", "full_attention"] * 2
DECODER = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "max_window_layers": 2},
    "gemma3n_text": {
        **{"layer_types": LAYERS, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4},
        **{"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 16, "laurel_rank": 8},
    },
    "gemma4_text": {
        **{"layer_types": LAYERS, "num_kv_shared_layers": 0, "global_head_dim": 16, "head_dim": 16},
        **{"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 16},
    },
    "gemma4_unified_text": {"layer_types": LAYERS, "num_kv_shared_layers": 0, "global_head_dim": 16, "head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "plbart": {**DECODER, "is_decoder": True, "is_encoder_decoder": False},
    "qwen4_exp_text": {
        **{"layer_types": ["linear_attention", "indexed_attention"] * 2},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2},
        # each query attends to 8 of 24 keys
        **{"linear_num_value_heads": 4, "indexer_head_dim": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1},
        **{"indexer_budget": 8, "indexer_compress_ratio": 2},
    },
    "reformer": {
        **{"is_decoder": True, "attention_head_size": 16, "feed_forward_size": 96, "axial_pos_shape": [8, 16]},
        **{"axial_pos_embds_dim": [32, 32], "attn_layers": ["local", "local"], "local_attn_chunk_length": 8},
    },
    "whisper": {**DECODER, "max_source_positions": 8, "begin_suppress_tokens": None, "decoder_start_token_id": 1},
    "xlnet": {"d_inner": 96, "max_position_embeddings": None},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "zamba": {
        **{"num_hidden_layers": 8, "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
        **{"mamba_dt_rank": 8, "use_mamba_kernels": False},
    },
    "zaya": {"layer_types": ["hybrid"] * 4, "num_experts_per_tok": 1, "router_hidden_size": 32},
}
"""Fields that single families need in addition, or that take back one of the above (None)."""
UNSETTABLE = (
    [],
    ["head_dim"],
    ["num_key_value_heads", "head_dim"],
    ["sliding_window"],
    ["num_hidden_layers", "num_layers"],
)
"""Fields that some configurations refuse, in turn."""


COMPOSITE = {
    *("emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "llama4", "mllama", "musicgen"),
    *("musicgen_melody", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "phi4_multimodal", "git"),
}
"""Families of several networks, whose text models are families of their own."""
NOT_BUILT = {
    *("cohere_compass_text", "dbrx"),  # transformers 5.19 builds none from their configurations
    "blt",  # of bytes in patches: a network of three networks
    *("gemma4_assistant", "gemma4_unified_assistant"),  # drafters: they read another network's states
}
"""Families that are not tested, and why."""
MAY_BE_NULL = ("head_dim", "num_key_value_heads")
"""Fields that some configurations leave open and their networks need."""


def _fitting(family: str) -> dict[str, Any]:
    # some configurations refuse to read fields that vary by layer
    config = CONFIG_MAPPING[family]()
    known = {**config.to_dict(), **{name: getattr(config, other) for name, other in config.attribute_map.items()}}
    fields = TINY | (LATENT if known.get("kv_lora_rank") else {})
    given = {name: value for name, value in fields.items() if known.get(name) is not None or _is_open(name, known)}
    return {name: value for name, value in {**given, **OWN.get(family, {})}.items() if value is not None}


def _is_open(name: str, known: dict[str, Any]) -> bool:
    return name in known and name in MAY_BE_NULL


def tiny_network(family: str) -> PreTrainedModel:
    """Return a random network of a family."""
    kind, given = CONFIG_MAPPING[family], _fitting(family)
    refused: Exception | None = None
    for unsettable in UNSETTABLE:
        try:
            config = kind(**{name: value for name, value in given.items() if name not in unsettable})
            break
        except Exception as error:  # each configuration has its own
            refused = error
    else:
        raise AssertionError(f"no tiny configuration: {refused}")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().eval()


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


@pytest.mark.parametrize("family", ["rembert", "cohere"])
def test_a_network_whose_head_is_not_supported_is_refused(family: str) -> None:
    with pytest.raises(SettingError, match=r"model\.path: .*; fix: train another model"):
        check_head(tiny_network(family))


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
