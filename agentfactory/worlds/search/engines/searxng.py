"""SearXNG, a metasearch engine that people host themselves. Format: docs/dev/search_api.rst of its repository (the
parameters, read there); the fields of results are those of its clients. `json` has to be among its `search.formats`."""

from typing import Any

from agentfactory.tools.errors import SettingError, short
from agentfactory.worlds.search.engines.engine import Engine, EngineOptions, Request, Results, passage, variable

_ADDRESS = "SEARXNG_URL"


class Searxng(Engine):
    """An instance of SearXNG, whose address is the environment variable SEARXNG_URL. It decides on the length of pages.

    Raises SettingError if the variable is not set, or is no address.
    """

    name = "searxng"
    page_size = 100
    per_second = 5.0
    query_characters = 500

    def __init__(self, options: EngineOptions | None = None) -> None:
        self._instance = variable(self.name, _ADDRESS).rstrip("/")
        if not self._instance.startswith(("http://", "https://")):
            problem = f"{_ADDRESS} is {short(self._instance)}"
            raise SettingError("source", problem, "write an address, such as http://127.0.0.1:8080")
        super().__init__(options)

    def request(self, query: str, count: int, page: int, secret: str) -> Request:
        """See Engine."""
        return Request(f"{self._instance}/search", {"q": query, "format": "json", "pageno": page + 1})

    def read(self, answer: Any) -> Results:
        """See Engine."""
        found = answer["results"]
        passages = [passage(each["url"], each["title"], each.get("content"), each.get("score")) for each in found]
        return Results(passages, bool(found))
