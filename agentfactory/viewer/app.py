"""The server of the page: static files, and the data of the runs as JSON."""

import hashlib
from functools import cache, partial
from importlib import resources
from typing import Any
from urllib.parse import urlencode

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentfactory.viewer.access import Guard
from agentfactory.viewer.charts import charts, series_of
from agentfactory.viewer.runs.follower import Follower
from agentfactory.viewer.runs.query import BadQuery, Query
from agentfactory.viewer.runs.recipe_difference import difference
from agentfactory.viewer.runs.reports import audit_of, table_of
from agentfactory.viewer.runs.run_data import Run
from agentfactory.viewer.runs.text_search import SECONDS, TextSearches
from agentfactory.viewer.trajectories.trajectory_page import Chain, NotThere, find_chain, image_of, page_of

SCRIPTS = [
    *("elements.js", "source.js", "curves.js", "rewards.js", "list.js", "tokens.js", "waterfall.js", "film.js"),
    *("replay.js", "trajectory.js", "audit.js", "recipes.js", "runs.js", "main.js"),
]

PLOTLY = "plotly.js"

_ANSWERS = (
    *("state", "metrics", "charts", "run", "runs", "recipes", "audit"),
    *("trajectories", "rewards", "trajectory", "image"),
)
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


def page_file(name: str) -> str:
    return (resources.files("agentfactory.viewer") / "page" / name).read_text(encoding="utf-8")


def make_app(follower: Follower, port: int) -> Guard:
    """Return the application, for a server on this port of the loopback interface."""
    answers = _Answers(follower)
    routes = [
        Route("/", partial(_static, "index.html")),
        Route("/plotly.js", partial(_static, PLOTLY)),
        *(Route(f"/{name}", partial(_static, name)) for name in ["style.css", *SCRIPTS]),
        *(Route(f"/api/{name}", getattr(answers, name)) for name in _ANSWERS),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={BadQuery: _refuse, NotThere: _refuse}), port)


def _static(name: str, request: Request) -> Response:
    tag, body = _file(name)
    return _unless_known(tag, body, _KINDS[name[name.rindex(".") :]], request)


def plotly_script() -> str:
    # `view` checks that it is installed
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


@cache
def _file(name: str) -> tuple[str, bytes]:
    body = (plotly_script() if name == PLOTLY else page_file(name)).encode()
    return _tag(body), body


def _tag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _unless_known(tag: str, body: bytes, kind: str, request: Request) -> Response:
    """Return the body, or status 304 if the browser already has it."""
    headers = {"etag": tag, "cache-control": "no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=kind, headers=headers)


def _json(data: Any) -> bytes:
    # browsers do not accept NaN in JSON
    return to_json(data, inf_nan_mode="null")


def _refuse(request: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, NotThere) else 400
    return Response(_json({"error": str(error)}), status, media_type="application/json")


class _Answers:
    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._searches = TextSearches(follower.index)

    def state(self, request: Request) -> Response:
        """Return the current state; the page polls it, and it rarely changes."""
        self._follower.asked()
        body = _json(self._follower.state())
        return _unless_known(_tag(body), body, "application/json", request)

    def metrics(self, request: Request) -> Response:
        """Return a run's metrics from line `from` on; all of them if the file has restarted since `generation`."""
        run = self._run(request)
        # read in the opposite order of replacement, so that old lines are never sent with a new generation
        generation, lines = run.generation, run.lines
        start = _integer(request, "from") if _integer(request, "generation") == generation else 0
        return _answer({"generation": generation, **series_of(lines, start)})

    def charts(self, request: Request) -> Response:
        return _answer(charts(names_of(self._follower.runs)))

    def run(self, request: Request) -> Response:
        run = self._run(request)
        recipe = self._recipe(run)
        told = {"label": run.label, "path": str(run.path), "best": run.best, "summary": run.summary()}
        return _answer({**told, "recipe": recipe})

    def recipes(self, request: Request) -> Response:
        runs = [self._run(request, name) for name in ("run", "other")]
        one, other = (self._recipe(run) for run in runs)
        return _answer({"labels": [run.label for run in runs], **difference(one, other, [run.folder for run in runs])})

    def runs(self, request: Request) -> Response:
        return _answer(table_of(self._follower.runs))

    def audit(self, request: Request) -> Response:
        run = self._run(request)
        try:
            report = audit_of(run, self._follower.index)
        except (OSError, ValueError) as error:
            raise NotThere(f"{run.label}: its audit cannot be read: {error}") from None
        return _answer({"path": str(run.path), "report": report})

    def trajectories(self, request: Request) -> Response:
        """Return one page of chains or groups. `unsearched` is the number of chains that may still contain the text."""
        query = Query.parse(request.query_params)
        search, left = self._search(query)
        index = self._follower.index
        return _answer({**index.page(query, search), "facets": index.facets(), "unsearched": left})

    def rewards(self, request: Request) -> Response:
        query = Query.parse(request.query_params)
        search, _ = self._search(query)
        return _answer(self._follower.index.rewards(query, search))

    def _search(self, query: Query) -> tuple[int | None, int]:
        """Search for a query's text a little further; return the search's number, and the number of chains left."""
        if not query.text:
            return None, 0
        searching = self._searches.get(query.text)
        return searching.number, searching.go_on(self._follower.index, self._follower.bytes_of, SECONDS)

    def trajectory(self, request: Request) -> Response:
        chain = self._chain(request)

        def address(message: int, part: int, url: str) -> str:
            return "api/image?" + urlencode({**dict(request.query_params), "message": message, "part": part})

        # an exported page has no paths
        return _answer({**page_of(self._follower, chain, address), "path": str(chain.run.folder.whole)})

    def image(self, request: Request) -> Response:
        kind, data = image_of(self._chain(request), _integer(request, "message"), _integer(request, "part"))
        return _unless_known(_tag(data), data, kind, request)

    def _run(self, request: Request, name: str = "run") -> Run:
        run = self._follower.run(request.query_params.get(name, ""))
        if run is None:
            raise NotThere("no such run")
        return run

    def _recipe(self, run: Run) -> str:
        try:
            return run.recipe()
        except (OSError, ValueError) as error:
            raise NotThere(f"{run.label}: its recipe cannot be read: {error}") from None

    def _chain(self, request: Request) -> Chain:
        run, file = (request.query_params.get(name, "") for name in ("run", "file"))
        return find_chain(self._follower, run, file, _integer(request, "byte"), _integer(request, "place"))


def names_of(runs: list[Run]) -> list[str]:
    # the reading thread only appends lines, so iterating over a copy is safe
    return list(dict.fromkeys(name for run in runs for line in list(run.lines) for name in line))


def _answer(data: Any) -> Response:
    return Response(_json(data), media_type="application/json", headers={"cache-control": "no-store"})


def _integer(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise BadQuery(f"{name}: got {text[:100]!r}; use a number")
    return int(text)
