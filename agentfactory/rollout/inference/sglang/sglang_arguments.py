"""The front's arguments beyond those that all engines share, built from a recipe."""

from agentfactory.rollout.config import RolloutRecipe

_OURS = ("--api-key", "--config", "--dp-size", "--data-parallel-size", "--weight-version")
"""SGLang's flags that the front sets itself, or with which it cannot work."""


def sglang_arguments(recipe: RolloutRecipe) -> list[str]:
    """Return the arguments; `server.options.args` comes last."""
    options = recipe.server.sglang
    flags = ["--python", options.python] if options.python is not None else []
    if options.attach is not None:
        key = ["--attach-key-env", options.attach_key_env] if options.attach_key_env is not None else []
        return [*flags, "--attach", options.attach, *key]
    if options.tensor_parallel_size > 1:
        flags += ["--tp-size", str(options.tensor_parallel_size)]
    if options.mem_fraction_static is not None:
        flags += ["--mem-fraction-static", str(options.mem_fraction_static)]
    return [*flags, *options.args]


def refused_flag(args: list[str]) -> str | None:
    """Return the first of `server.options.args` that the front cannot pass on; None if there is none."""
    return next((flag for flag in args if flag.partition("=")[0] in _OURS), None)
