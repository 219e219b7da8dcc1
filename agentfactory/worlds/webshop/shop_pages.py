"""WebShop's pages: their texts, and the effects of searches and clicks. Pure functions of a `Visit`.

Texts follow the published environment's text mode: a page's visible texts, joined by ` [SEP] `.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from agentfactory.worlds.webshop.goals import Goal
from agentfactory.worlds.webshop.shop import Shop

RESULTS_PER_PAGE = 10
SEPARATOR = " [SEP] "
_BACK_TO_SEARCH, _PREVIOUS, _NEXT, _BUY_NOW = "Back to Search", "< Prev", "Next >", "Buy Now"


class Page(StrEnum):
    SEARCH = "search"
    RESULTS = "results"
    ITEM = "item"
    DESCRIPTION = "Description"
    FEATURES = "Features"
    REVIEWS = "Reviews"
    ATTRIBUTES = "Attributes"
    DONE = "done"


_PARTS = (Page.DESCRIPTION, Page.FEATURES, Page.REVIEWS)
"""The subpages of an item's page, besides `Attributes`, which depends on the layout."""


@dataclass(slots=True)
class Visit:
    """The state of one shopper, a few hundred bytes."""

    goal: Goal
    page: Page = Page.SEARCH
    keywords: str = ""
    number: int = 1
    asin: str = ""
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    results_per_page: int = RESULTS_PER_PAGE
    show_attributes: bool = False
    """True if an item's page links to its attributes, query and categories."""


def search(visit: Visit, keywords: str) -> None:
    """Go to the first page of results, from any page. Empty keywords do nothing."""
    if keywords and visit.page is not Page.DONE:
        _show_results(visit, keywords.lower(), 1)


def click(visit: Visit, target: str, shop: Shop, layout: Layout) -> None:
    """Click a button, a product or an option of the page by its text, in any case. Any other target does nothing."""
    target = target.lower()
    if target not in clickable(visit, shop, layout) or target == "search":
        return
    part = next((page for page in (*_PARTS, Page.ATTRIBUTES) if page.lower() == target), None)
    if target == _BUY_NOW.lower():
        visit.page = Page.DONE
    elif target == _BACK_TO_SEARCH.lower():
        visit.page, visit.keywords, visit.number, visit.asin, visit.options = Page.SEARCH, "", 1, "", {}
    elif target in (_NEXT.lower(), _PREVIOUS.lower()) and visit.page is Page.RESULTS:
        _show_results(visit, visit.keywords, visit.number + (1 if target == _NEXT.lower() else -1))
    elif target == _PREVIOUS.lower() and visit.page is Page.ITEM:
        _show_results(visit, visit.keywords, visit.number)
    elif target == _PREVIOUS.lower():
        visit.page = Page.ITEM
    elif part is not None and visit.page is Page.ITEM:
        visit.page = part
    elif visit.page is Page.RESULTS:
        visit.page = Page.ITEM
        visit.asin = next(asin for asin in _asins(visit, shop, layout) if asin.lower() == target)
    else:
        # if two options share a value, the page sets the last one
        names = [name for name, values in shop.product(visit.asin).options.items() if target in values]
        visit.options = {**visit.options, names[-1]: target}


def clickable(visit: Visit, shop: Shop, layout: Layout) -> list[str]:
    """Return the clickable texts in lower case: buttons, then products, then options."""
    match visit.page:
        case Page.SEARCH:
            return ["search"]
        case Page.DONE:
            return []
        case Page.RESULTS:
            found = _buttons(visit) + list(_asins(visit, shop, layout))
        case Page.ITEM:
            values = [value for values in shop.product(visit.asin).options.values() for value in values]
            found = [_BACK_TO_SEARCH, _PREVIOUS, *_parts(layout), _BUY_NOW, *values]
        case _:
            found = [_BACK_TO_SEARCH, _PREVIOUS]
    return list(dict.fromkeys(text.lower() for text in found))


def render(visit: Visit, shop: Shop, layout: Layout) -> str:
    return SEPARATOR.join(text.strip() for text in _texts(visit, shop, layout) if text.strip())


def _texts(visit: Visit, shop: Shop, layout: Layout) -> list[str]:
    instruction = ["Instruction:", visit.goal.instruction]
    match visit.page:
        case Page.SEARCH:
            return ["WebShop", *instruction, "Search"]
        case Page.DONE:
            return ["Thank you for shopping with us!", "asin", visit.asin, "options", str(visit.options)]
        case Page.RESULTS:
            products = [shop.product(asin) for asin in _asins(visit, shop, layout)]
            cells = [text for product in products for text in (product.asin, product.title, product.price_tag)]
            first, *others = _buttons(visit)
            count = f"Page {visit.number} (Total results: {shop.total(visit.keywords)})"
            return [*instruction, first, count, *others, *cells]
    product = shop.product(visit.asin)
    back = [*instruction, _BACK_TO_SEARCH, _PREVIOUS]
    match visit.page:
        case Page.ITEM:
            options = [text for name, values in product.options.items() for text in (name, *values)]
            price = f"Price: {product.price_tag}"
            # the published files contain no ratings or reviews
            return [*back, *options, product.title, price, "Rating: N.A.", *_parts(layout), _BUY_NOW]
        case Page.DESCRIPTION:
            return [*back, product.description]
        case Page.FEATURES:
            return [*back, *product.bullets]
        case Page.ATTRIBUTES:
            return [*back, *product.attributes, product.category, product.query, product.product_category]
        case _:
            return back


def _show_results(visit: Visit, keywords: str, number: int) -> None:
    visit.page, visit.keywords, visit.number, visit.asin, visit.options = Page.RESULTS, keywords, number, "", {}


def _asins(visit: Visit, shop: Shop, layout: Layout) -> tuple[str, ...]:
    return shop.search(visit.keywords, (visit.number - 1) * layout.results_per_page, layout.results_per_page)


def _buttons(visit: Visit) -> list[str]:
    return [_BACK_TO_SEARCH, *([_PREVIOUS] if visit.number > 1 else []), _NEXT]


def _parts(layout: Layout) -> list[Page]:
    return [*_PARTS, Page.ATTRIBUTES] if layout.show_attributes else [*_PARTS]
