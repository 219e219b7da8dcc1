"""Wikipedia's own API: full-text search with the beginning of each article. Format from
https://www.mediawiki.org/wiki/API:Search and Extension:TextExtracts; the parameters of `extracts` are from a wiki's
generated help, the shape of the answer from clients."""

from typing import Any

from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.worlds.search.engines.engine import Engine, Request, Results, passage


class Wikipedia(Engine):
    """English Wikipedia's articles."""

    name = "wikipedia"
    address = "https://en.wikipedia.org/w/api.php"
    page_size = 20
    per_second = 5.0
    query_characters = 300

    def request(self, query: str, count: int, page: int, secret: str) -> Request:
        """See Engine."""
        parameters: dict[str, str | int] = {"action": "query", "format": "json", "formatversion": 2, "redirects": 1}
        parameters |= {"generator": "search", "gsrsearch": query, "gsrlimit": count, "gsroffset": page * count}
        parameters |= {"prop": "extracts|info", "exintro": 1, "explaintext": 1, "exlimit": "max", "inprop": "url"}
        return Request(self.address, parameters)

    def read(self, answer: Any) -> Results:
        """See Engine. Pages are unsorted, each with its rank in `index`; an answer without results has no `query`."""
        if error := answer.get("error"):
            raise ToolInfrastructureError(f"{self.name}: {error['code']}")
        found = sorted(answer.get("query", {}).get("pages", []), key=lambda page: page["index"])
        passages = [passage(each["fullurl"], each["title"], each.get("extract")) for each in found]
        return Results(passages, "gsroffset" in answer.get("continue", {}))
