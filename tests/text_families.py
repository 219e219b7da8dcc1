"""Tiny random networks of every text family of transformers, for tests of the trainer and of the embedded engine."""

from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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
    # rows of tests cross all lengths at which attention changes
    **dict.fromkeys(("sliding_window_size", "window_size", "keep_window_size", "local_attention", "block_size"), 8),
    **dict.fromkeys(("attention_chunk_size", "mamba_chunk_size", "chunk_size"), 8),
    **{"index_block_size": 4, "index_topk_blocks": 2, "original_max_position_embeddings": 128},
    # large weights and low caps, so that a cap or a scale that is left out shows
    **dict.fromkeys(("initializer_range", "init_std", "embed_init_std"), 0.3),
    **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "logits_soft_cap": 2.0},
}
LATENT = {
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **{"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    # each query attends to 8 of 24 keys
    **{"index_head_dim": 32, "index_n_heads": 16, "index_topk": 8},
}
"""Fields of networks with latent attention, such as DeepSeek's, some of which select keys."""
LAYERS = ["sliding_attention", "full_attention"] * 2
DECODER = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    # larger weights give keys equal values, of which it selects any
    "doge": {"initializer_range": 0.05},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "max_window_layers": 2},
    "gemma3n_text": {
        **{"layer_types": LAYERS, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
        **{"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 16, "laurel_rank": 8},
    },
    "gemma4_text": {
        **{"layer_types": LAYERS, "num_kv_shared_layers": 2, "global_head_dim": 32, "head_dim": 16},
        **{"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 16},
    },
    "gemma4_unified_text": {"layer_types": LAYERS, "num_kv_shared_layers": 0, "global_head_dim": 32, "head_dim": 16},
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
FIXED = [], ["head_dim"], ["num_key_value_heads", "head_dim"], ["sliding_window"], ["num_hidden_layers", "num_layers"]
"""Fields that some configurations refuse, in turn."""


COMPOSITE = {
    *("emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "llama4", "mllama", "musicgen"),
    *("musicgen_melody", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "phi4_multimodal", "git", "dots3_note"),
    "moss_transcribe_diarize",
}
"""Families of several networks, whose text models are families of their own."""
NOT_BUILT = {
    *("cohere_compass_text", "dbrx"),  # transformers 5.19 builds none from their configurations
    "blt",  # of bytes in patches: a network of three networks
    *("gemma4_assistant", "gemma4_unified_assistant"),  # drafters: they read another network's states
}
"""Families that are not tested, and why."""
FAMILIES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - COMPOSITE - NOT_BUILT)
MAY_BE_NULL = ("head_dim", "num_key_value_heads")
"""Fields that some configurations leave open and their networks need."""


def _fitting(family: str) -> dict[str, Any]:
    # some configurations refuse to read fields that vary by layer
    config = CONFIG_MAPPING[family]()
    known = {**config.to_dict(), **{name: getattr(config, other) for name, other in config.attribute_map.items()}}
    fields = TINY | (LATENT if known.get("kv_lora_rank") else {})
    settable = {name for name, value in known.items() if value is not None or name in MAY_BE_NULL}
    given = {name: value for name, value in fields.items() if name in settable}
    return {name: value for name, value in {**given, **OWN.get(family, {})}.items() if value is not None}


LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [8.0] * 8},
    "original_max_position_embeddings": 32,
}
ROTATED: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}, "max_position_embeddings": 32},
    ),
}
"""Kinds of positions that depend on the longest sequence of a pass if it has more than 32 tokens: a family, and fields
of its configuration."""


def tiny_network(family: str, **fields: Any) -> PreTrainedModel:
    """Return a random network of a family, with these fields of its configuration in place of the usual ones."""
    kind, given = CONFIG_MAPPING[family], _fitting(family) | fields
    refused: Exception | None = None
    for unsettable in FIXED:
        try:
            config = kind(**{name: value for name, value in given.items() if name not in unsettable})
            break
        except Exception as error:  # each configuration has its own
            refused = error
    else:
        raise AssertionError(f"no tiny configuration: {refused}")
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config).float().eval()
    for weight in network.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.3)
    return network


def rows_of_many_lengths() -> list[list[int]]:
    """Return rows shorter and longer than all lengths at which attention changes, some with a common prefix."""
    draw = np.random.default_rng(0)
    base = draw.integers(3, 98, 100).tolist()
    kept = [(0, 3), (8, 20), (14, 29), (100, 100), (2, 7), (70, 75), (70, 73)]
    return [base[:prefix] + draw.integers(3, 98, size - prefix).tolist() for prefix, size in kept]


@torch.no_grad()
def scores_alone(network: PreTrainedModel, row: list[int]) -> torch.Tensor:
    """Return the log-probability of each token but the first, by the network's own forward pass with eager
    attention."""
    ids = torch.tensor(row)[None]
    chosen = network.config._attn_implementation
    network.set_attn_implementation("eager")
    scores = network(ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    network.set_attn_implementation(chosen)
    return scores
