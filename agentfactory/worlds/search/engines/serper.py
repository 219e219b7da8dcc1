"""Serper, an API for Google's results. Its documentation needs an account, so the format is taken from its clients
(langchain's GoogleSerperAPIWrapper, Open WebUI's search_serper); it is not verified against the service."""

from typing import Any

from agentfactory.worlds.search.engines.engine import Engine, Request, Results, passage


class Serper(Engine):
    """Google's results through Serper."""

    name = "serper"
    address = "https://google.serper.dev/search"
    key = "SERPER_API_KEY"
    page_size = 10
    per_second = 5.0
    query_characters = 2000

    def request(self, query: str, count: int, page: int, secret: str) -> Request:
        """See Engine."""
        body = {"q": query, "num": count, "page": page + 1}
        return Request(self.address, body=body, headers={"X-API-KEY": secret})

    def read(self, answer: Any) -> Results:
        """See Engine."""
        found = answer["organic"]
        return Results([passage(each["link"], each["title"], each.get("snippet")) for each in found], bool(found))
