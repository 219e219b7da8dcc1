"""The front's arguments beyond those that all engines share, built from a recipe."""

from agentfactory.rollout.config import RolloutRecipe

_OURS = {
    **dict.fromkeys(("--model-path", "--model"), "set model.path"),
    **dict.fromkeys(("--host", "--port", "--api-key", "--config"), "remove it"),
    **dict.fromkeys(("--served-model-name", "--weight-version"), "remove it"),
    "--dtype": "set model.dtype",
    "--context-length": "set server.max_model_len",
    "--max-running-requests": "set server.max_num_seqs",
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size", "--tp"), "set server.options.tensor_parallel_size"),
    "--mem-fraction-static": "set server.options.gpu_memory_utilization",
    **dict.fromkeys(("--dp-size", "--data-parallel-size", "--dp"), "remove it: replicas are not supported"),
    "--quantization": "remove it: quantised weights cannot be proven",
    "--disaggregation-mode": "remove it: servers that share turns are not supported",
}
"""SGLang's flags that the front sets itself, or with which it cannot work -> what to do instead."""


def sglang_arguments(recipe: RolloutRecipe) -> list[str]:
    """Return the arguments; `server.options.args` comes last."""
    options = recipe.server.sglang
    flags = ["--python", options.python] if options.python is not None else []
    if options.attach is not None:
        return [*flags, "--attach", options.attach]
    if options.tensor_parallel_size > 1:
        flags += ["--tp-size", str(options.tensor_parallel_size)]
    if options.gpu_memory_utilization is not None:
        flags += ["--mem-fraction-static", str(options.gpu_memory_utilization)]
    return [*flags, *options.args]


def refused_flag(args: list[str]) -> tuple[str, str] | None:
    """Return the first of `server.options.args` that the front cannot pass on, and the fix; None if there is none."""
    names = (flag.partition("=")[0] for flag in args)
    return next(((name, _OURS[name]) for name in names if name in _OURS), None)
