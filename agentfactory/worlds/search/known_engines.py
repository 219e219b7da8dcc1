"""The online engines: how each is asked, and how its answer is read."""

from typing import Any

from agentfactory.base.errors import SettingError, short
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.worlds.search.engine import Engine, EngineOptions, Request, Results, passage, variable


class Serper(Engine):
    """Google's results through Serper. The format is that of its clients (langchain's GoogleSerperAPIWrapper, Open
    WebUI's search_serper), because its documentation needs an account; it is not verified against the service."""

    name = "serper"
    address = "https://google.serper.dev/search"
    key = "SERPER_API_KEY"
    page_size = 10
    per_second = 5.0
    query_characters = 2000

    def request(self, query: str, count: int, page: int, secret: str) -> Request:
        body = {"q": query, "num": count, "page": page + 1}
        return Request(self.address, body=body, headers={"X-API-KEY": secret})

    def read(self, answer: Any) -> Results:
        found = answer["organic"]
        return Results([passage(each["link"], each["title"], each.get("snippet")) for each in found], bool(found))


class Tavily(Engine):
    """Tavily's search: text for language models, in one page
    (https://docs.tavily.com/api-reference/endpoint/search)."""

    name = "tavily"
    address = "https://api.tavily.com/search"
    key = "TAVILY_API_KEY"
    page_size = 20
    per_second = 1.5
    query_characters = 400

    def request(self, query: str, count: int, page: int, secret: str) -> Request:
        body = {"query": query, "max_results": count, "search_depth": "basic"}
        return Request(self.address, body=body, headers={"Authorization": f"Bearer {secret}"})

    def read(self, answer: Any) -> Results:
        found = [passage(each["url"], each["title"], each["content"], each.get("score")) for each in answer["results"]]
        return Results(found, more=False)


_ADDRESS = "SEARXNG_URL"


class Searxng(Engine):
    """The SearXNG instance at the environment variable SEARXNG_URL, with `json` in its `search.formats`. It sets the
    page size. Parameters are those of docs/dev/search_api.rst in its repository, result fields those of its clients.
    Raises SettingError if the variable is not set, or is not an address."""

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
        return Request(f"{self._instance}/search", {"q": query, "format": "json", "pageno": page + 1})

    def read(self, answer: Any) -> Results:
        found = answer["results"]
        passages = [passage(each["url"], each["title"], each.get("content"), each.get("score")) for each in found]
        return Results(passages, bool(found))


class Wikipedia(Engine):
    """English Wikipedia's articles: full-text search with the beginning of each
    (https://www.mediawiki.org/wiki/API:Search and Extension:TextExtracts; the answer's shape is that of clients)."""

    name = "wikipedia"
    address = "https://en.wikipedia.org/w/api.php"
    page_size = 20
    per_second = 5.0
    query_characters = 300

    def request(self, query: str, count: int, page: int, secret: str) -> Request:
        parameters: dict[str, str | int] = {"action": "query", "format": "json", "formatversion": 2, "redirects": 1}
        parameters |= {"generator": "search", "gsrsearch": query, "gsrlimit": count, "gsroffset": page * count}
        parameters |= {"prop": "extracts|info", "exintro": 1, "explaintext": 1, "exlimit": "max", "inprop": "url"}
        return Request(self.address, parameters)

    def read(self, answer: Any) -> Results:
        """Pages are unsorted, each with its rank in `index`; an answer without results has no `query`."""
        if error := answer.get("error"):
            raise ToolInfrastructureError(f"{self.name}: {error['code']}")
        found = sorted(answer.get("query", {}).get("pages", []), key=lambda page: page["index"])
        passages = [passage(each["fullurl"], each["title"], each.get("extract")) for each in found]
        return Results(passages, "gsroffset" in answer.get("continue", {}))


_MOST_WORDS = 50


class Brave(Engine):
    """Brave's web search (https://api-dashboard.search.brave.com/api-reference/web/search/get)."""

    name = "brave"
    address = "https://api.search.brave.com/res/v1/web/search"
    key = "BRAVE_API_KEY"
    page_size = 20
    per_second = 1.0
    query_characters = 400

    def request(self, query: str, count: int, page: int, secret: str) -> Request:
        words = " ".join(query.split()[:_MOST_WORDS])
        parameters: dict[str, str | int] = {"q": words, "count": count, "offset": page, "result_filter": "web"}
        headers = {"X-Subscription-Token": secret}
        return Request(self.address, parameters, headers=headers)

    def read(self, answer: Any) -> Results:
        """An answer without results has no `web`."""
        found = answer.get("web", {}).get("results", [])
        passages = [passage(each["url"], each["title"], each.get("description")) for each in found]
        return Results(passages, bool(answer["query"].get("more_results_available")))
