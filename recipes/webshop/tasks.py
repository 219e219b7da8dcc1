"""The tasks of WebShop's splits, for `data.source`."""

from agentfactory.worlds.webshop.webshop import webshop_tasks as tasks

__all__ = ["tasks"]
