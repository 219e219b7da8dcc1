"""A hook of the site: pages that `extra.search_boost` in mkdocs.yml names come first when their subject is searched."""

from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> None:
    """Set the weight of a page in the search, as its front matter would, which other viewers of the file show."""
    boost = config.extra["search_boost"].get(page.file.src_uri)
    if boost is not None:
        page.meta["search"] = {"boost": boost}
