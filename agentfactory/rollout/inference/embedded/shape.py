"""The shape of a model's attention, from its configuration."""

from typing import Any

from agentfactory.rollout.inference.embedded.request import UnsupportedModel

_KINDS = {"full_attention", "sliding_attention"}


def sliding_window(config: Any) -> int | None:
    """Return the number of tokens that a token sees in layers with a sliding window; None without such layers. Raises
    UnsupportedModel for layers of other kinds."""
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS):
        raise UnsupportedModel(f"layers of type {', '.join(others)}; only {' and '.join(sorted(_KINDS))} are supported")
    return int(config.sliding_window) if has_sliding_window(config) else None


def has_sliding_window(config: Any) -> bool:
    """Return whether some layers have a sliding window: those that the configuration names, or all of them."""
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is not None and (kinds is None or "sliding_attention" in kinds)


def head_width(config: Any) -> int:
    """Return the width of a head's keys in the cache. DeepSeek's latent attention has values of another one."""
    width: int | None = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    return width or config.hidden_size // config.num_attention_heads
