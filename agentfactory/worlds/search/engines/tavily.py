"""Tavily. Format from https://docs.tavily.com/api-reference/endpoint/search."""

from typing import Any

from agentfactory.worlds.search.engines.engine import Engine, Request, Results, passage


class Tavily(Engine):
    """Tavily's search, which returns text meant for language models, in a single page of results."""

    name = "tavily"
    address = "https://api.tavily.com/search"
    key = "TAVILY_API_KEY"
    page_size = 20
    per_second = 1.5
    query_characters = 400

    def request(self, query: str, count: int, page: int, secret: str) -> Request:
        """See Engine."""
        body = {"query": query, "max_results": count, "search_depth": "basic"}
        return Request(self.address, body=body, headers={"Authorization": f"Bearer {secret}"})

    def read(self, answer: Any) -> Results:
        """See Engine."""
        found = [passage(each["url"], each["title"], each["content"], each.get("score")) for each in answer["results"]]
        return Results(found, more=False)
