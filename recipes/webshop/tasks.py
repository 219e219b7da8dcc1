"""The tasks of WebShop's splits, for `data.source`."""

from agentfactory.tools.webshop.environment import webshop_tasks as tasks

__all__ = ["tasks"]
