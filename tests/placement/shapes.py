"""Sizes of models."""


def sizes(hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int) -> dict[str, int]:
    """The sizes of a configuration of transformers."""
    attention = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "num_hidden_layers": layers}
    return {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocabulary, **attention}


SEVEN = sizes(3584, 18944, 28, 28, 4, 152064)
"""Those of Qwen2.5-7B: 7,615,616,512 weights, as its authors count."""
