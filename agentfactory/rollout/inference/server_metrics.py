"""The load of each replica, parsed from and written to a metrics page with vLLM's metric names."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

METRICS_ROUTE = "/metrics"
LOAD_FIX = "start vLLM without --disable-log-stats, or SGLang with --enable-metrics"
REPLICA_HEADER = "X-data-parallel-rank"
"""Request header with the rank of the replica that must answer. Without it, vLLM chooses the least loaded replica."""


@dataclass(frozen=True)
class Load:
    """The load of one replica: waiting and running requests, the share of its KV cache in use, and token counts since
    its start: prompt tokens, generated tokens, and prompt tokens found in the prefix cache."""

    waiting: float
    running: float
    cache: float
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    cached_tokens: float = 0.0
    blocks: float = 0.0
    """Blocks of the KV cache, of `block_size` tokens each; 0 if the server does not report them."""
    block_size: float = 0.0


_FIELDS = {
    "waiting": "vllm:num_requests_waiting",
    "running": "vllm:num_requests_running",
    "cache": "vllm:kv_cache_usage_perc",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
}
_CACHE = "vllm:cache_config_info"
"""Has the size of the cache as labels."""


def parse_loads(text: str) -> list[Load]:
    """Parse the load of each replica behind an address, in order of rank, from a Prometheus page in vLLM's format.
    Raises ValueError if a count of tokens is missing. Gauges are 0 that several API servers have not yet set."""
    values: dict[str, dict[int, float]] = {name: {} for name in _FIELDS.values()}
    caches: dict[int, dict[str, float]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        if name == _CACHE:
            labels = dict(re.findall(r'(\w+)="(\d+)"', rest))
            size = {"blocks": labels.get("num_gpu_blocks", 0), "block_size": labels.get("block_size", 0)}
            caches[int(labels.get("engine", 0))] = {field: float(value) for field, value in size.items()}
        elif name in values:
            _, found, label = rest.partition('engine="')
            values[name][int(label.partition('"')[0]) if found else 0] = float(line.rpartition(" ")[2])
        elif (bare := line.partition(" "))[0] in values:
            values[bare[0]][0] = float(bare[2])
    ranks = sorted({rank for found in values.values() for rank in found})
    for name in values:
        if not ranks or (name.endswith("_total") and sorted(values[name]) != ranks):
            raise ValueError(f"the server's {METRICS_ROUTE} has no {name}")
    return [
        Load(**{field: values[name].get(rank, 0.0) for field, name in _FIELDS.items()}, **caches.get(rank, {}))
        for rank in ranks
    ]


def combined(loads: Sequence[Load]) -> Load:
    """Return the combined load of several replicas: sums, and the maximum for the cache."""
    sums = {field: sum(getattr(load, field) for load in loads) for field in _FIELDS}
    return Load(**{**sums, "cache": max(load.cache for load in loads)})


def write_load(load: Load) -> str:
    """Write the page that `parse_loads` reads."""
    kinds = {name: "counter" if name.endswith("_total") else "gauge" for name in _FIELDS.values()}
    page = "".join(f"# TYPE {name} {kinds[name]}\n{name} {getattr(load, field)}\n" for field, name in _FIELDS.items())
    size = f'block_size="{load.block_size:.0f}",num_gpu_blocks="{load.blocks:.0f}"'
    return f"{page}# TYPE {_CACHE} gauge\n{_CACHE}{{{size}}} 1.0\n"
