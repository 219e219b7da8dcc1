"""`WebShop`: an environment for searching a shop and buying the product that an instruction describes."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.processes.threads import run_in_thread
from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.tool import finish, tool
from agentfactory.worlds.webshop import shop_pages as pages
from agentfactory.worlds.webshop.goals import GoalKind, Split
from agentfactory.worlds.webshop.reward import Score, score
from agentfactory.worlds.webshop.shop import Shop, ShopConfig, open_shop
from agentfactory.worlds.webshop.shop_pages import Layout, Page, Visit

QUESTION = (
    "Buy the product that the instruction asks for: search, click a product, click its options, then click Buy Now."
)
"""The `question` of a data row, followed in the prompt by the shop's first page with the instruction."""


class WebShop(Environment):
    """WebShop (Yao et al., 2022): the reward of a purchase is between 0 and 1, and 0 if nothing is bought.

    The data row's `goal` is the number of a goal in the published order: 0-499 test, 500-1499 eval, 1500 and up train.
    `webshop_tasks` makes such rows. All instances of a process share products and index.

    Args:
        data: folder of WebShop's data files, or the file items_shuffle*.json in it; null: our own catalogue.
        goals: `human` or `synthetic`.
        seed: seed of prices and price bounds.
        products: number of products from the start of the file; null: all.
        cache: folder for the built database and index; null: agentfactory/webshop in the user's cache folder.
        results_per_page: products per page of results.
        show_attributes: whether an item's page links to a page with its attributes and categories.
        show_actions: whether each page ends with a list of its clickable texts.

    Raises:
        SettingError: an option is out of range, or a data file is missing or cannot be read.
    """

    def __init__(
        self,
        data: str | None = None,
        goals: str = "human",
        seed: int = 0,
        products: int | None = None,
        cache: str | None = None,
        results_per_page: int = pages.RESULTS_PER_PAGE,
        show_attributes: bool = False,
        show_actions: bool = False,
    ) -> None:
        _check_count("results_per_page", results_per_page)
        self._shop = _shop(data, goals, seed, products, cache)
        self._layout = Layout(results_per_page, show_attributes)
        self._show_actions = show_actions
        self._visit: Visit | None = None
        self._score: Score | None = None
        self._shown = ""

    def reset(self, goal: int, **task: Any) -> str:
        """Begin at the search page with goal number `goal`. Raises ValueError if there is no such goal."""
        self.release()
        if type(goal) is not int or not 0 <= goal < self._shop.goals:
            raise ValueError(f"goal: got {goal!r}; the shop has the goals 0 to {self._shop.goals - 1}")
        self._visit = Visit(self._shop.goal(goal))
        return self._page()

    @tool
    def search(self, keywords: str) -> str:
        """Search the shop. Shows the first page of products.

        Args:
            keywords: Words that describe the product.
        """
        pages.search(self._here(), keywords)
        return self._page()

    @tool
    async def click(self, target: str) -> Any:
        """Click a button, a product's code or an option on the current page.

        Args:
            target: Its text, such as Next >, B09QKP7XQL, blue or Buy Now.
        """
        visit = self._here()
        pages.click(visit, target, self._shop, self._layout)
        if visit.page is not Page.DONE:
            return self._page()
        price, product, nouns = self._shop.price(visit.asin), self._shop.product(visit.asin), self._shop.nouns
        # in a thread, because spaCy takes milliseconds
        judged = self._score = await run_in_thread(lambda: score(visit.goal, product, price, visit.options, nouns))
        text = f"{self._page()}{pages.SEPARATOR}Your score (min 0.0, max 1.0){pages.SEPARATOR}{judged.reward}"
        return finish({"observation": text, "price": price, "nouns": nouns.name})

    def reward(self) -> dict[str, float]:
        """Return `reward`, `success` (1.0 if the reward is 1), `bought`, and after a purchase its components."""
        judged = self._score
        if judged is None:
            return {"reward": 0.0, "success": 0.0, "bought": 0.0}
        return {**asdict(judged), "success": float(judged.reward == 1), "bought": 1.0}

    def anchor(self) -> list[Any] | None:
        """Return the page and the chosen options, which the page does not show; None after a purchase."""
        visit = self._here()
        return None if visit.page is Page.DONE else [self._shown, visit.options]

    def release(self) -> None:
        self._visit = self._score = None

    def _here(self) -> Visit:
        assert self._visit is not None, "reset() begins a visit"
        return self._visit

    def _page(self) -> str:
        visit = self._here()
        text = pages.render(visit, self._shop, self._layout)
        if self._show_actions and visit.page is not Page.DONE:
            text += f"\nClickable: {', '.join(pages.clickable(visit, self._shop, self._layout))}"
        self._shown = text
        return text


def webshop_tasks(
    split: str,
    data: str | None = None,
    goals: str = "human",
    seed: int = 0,
    products: int | None = None,
    cache: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Return a lazy iterator over a split's data rows: `question`, `goal` (its number) and `instruction`. The other
    arguments must equal the environment's options.

    Raises SettingError if there is no such split, or it has no goals.
    """
    if split not in tuple(Split):
        raise SettingError("split", f"got {split!r}", f"use one of {', '.join(Split)}")
    shop = _shop(data, goals, seed, products, cache)
    numbers = Split(split).numbers(shop.goals)
    if not numbers:
        problem = f"the shop has {shop.goals} {goals} goals, all of them in the splits before {split}"
        raise SettingError("split", problem, "use another split, synthetic goals or more products")
    return ({"question": QUESTION, "goal": number, "instruction": shop.goal(number).instruction} for number in numbers)


def _shop(data: str | None, goals: str, seed: int, products: int | None, cache: str | None) -> Shop:
    if goals not in tuple(GoalKind):
        raise SettingError("goals", f"got {goals!r}", f"use one of {', '.join(GoalKind)}")
    if products is not None:
        _check_count("products", products)
    folders = (None if folder is None else Path(folder).expanduser() for folder in (data, cache))
    data_folder, cache_folder = folders
    return open_shop(ShopConfig(data_folder, GoalKind(goals), seed, products, cache_folder))


def _check_count(name: str, count: Any) -> None:
    if type(count) is not int or count < 1:
        raise SettingError(name, f"got {count!r}", "give a whole number from 1")
