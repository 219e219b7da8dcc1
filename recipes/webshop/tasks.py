"""The tasks of WebShop's splits, for `data.source`."""

from typing import Any

from agentfactory.tools.webshop.environment import webshop_tasks


def tasks(split: str, data: str | None = None, goals: str = "human", seed: int = 0) -> list[dict[str, Any]]:
    """Return the rows of `test`, `eval` or `train`; the other options are those of the environment `webshop`."""
    return webshop_tasks(split, data, goals, seed)
