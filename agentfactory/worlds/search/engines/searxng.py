"""SearXNG, a self-hosted metasearch engine. Request parameters from docs/dev/search_api.rst of its repository, result
fields from its clients. The instance must have `json` in its `search.formats`."""

from typing import Any

from agentfactory.base.errors import SettingError, short
from agentfactory.worlds.search.engines.engine import Engine, EngineOptions, Request, Results, passage, variable

_ADDRESS = "SEARXNG_URL"


class Searxng(Engine):
    """The SearXNG instance at the environment variable SEARXNG_URL. The instance sets the page size.

    Raises SettingError if the variable is not set, or is not an address.
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
