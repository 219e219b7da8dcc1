"""Scripted shoppers, which act on a shop only through its two tools."""

from collections.abc import Awaitable, Callable

from agentfactory.worlds.webshop.goals import Goal

Act = Callable[[str, str], Awaitable[str]]
"""A function that calls a tool by name with its argument and returns the page."""


async def shop_perfectly(goal: Goal, act: Act) -> str:
    """Search for the goal's product by its title, look through the pages of results for it, choose the options, buy."""
    page = await act("search", goal.title)
    while goal.asin not in page.split(" [SEP] "):
        assert "$" in page, f"{goal.asin} is not among the results"
        page = await act("click", "Next >")
    await act("click", goal.asin)
    options = goal.options.values() if isinstance(goal.options, dict) else goal.options
    for value in options:
        await act("click", value)
    return await act("click", "Buy Now")


async def shop_in_vain(goal: Goal, act: Act) -> str:
    for tool, argument in (("search", ""), ("click", "search"), ("click", goal.asin), ("click", "Buy Now")):
        page = await act(tool, argument)
    return page
