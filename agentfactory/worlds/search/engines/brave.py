"""Brave Search. Format from https://api-dashboard.search.brave.com/api-reference/web/search/get."""

from typing import Any

from agentfactory.worlds.search.engines.engine import Engine, Request, Results, passage

_MOST_WORDS = 50


class Brave(Engine):
    """Brave's web search."""

    name = "brave"
    address = "https://api.search.brave.com/res/v1/web/search"
    key = "BRAVE_API_KEY"
    page_size = 20
    per_second = 1.0
    query_characters = 400

    def request(self, query: str, count: int, page: int, secret: str) -> Request:
        """See Engine."""
        words = " ".join(query.split()[:_MOST_WORDS])
        parameters: dict[str, str | int] = {"q": words, "count": count, "offset": page, "result_filter": "web"}
        headers = {"X-Subscription-Token": secret}
        return Request(self.address, parameters, headers=headers)

    def read(self, answer: Any) -> Results:
        """See Engine. An answer without results has no `web`."""
        found = answer.get("web", {}).get("results", [])
        passages = [passage(each["url"], each["title"], each.get("description")) for each in found]
        return Results(passages, bool(answer["query"].get("more_results_available")))
