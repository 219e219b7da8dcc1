"""The browsing recipe: chains that search, open pages and name their source, with scripted turns on local pages."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.trajectory import Outcome, Trajectory
from agentfactory.worlds.search.known_engines import Wikipedia
from tests.conftest import REPOSITORY
from tests.project import load_and_check
from tests.scripted_chains import call, scripted_chains
from tests.worlds.browse.site import PAGES, PRIVATE, Handler, site

pytestmark = pytest.mark.processes

RECIPES = REPOSITORY / "recipes" / "browsing"
QUESTIONS = [json.loads(line) for line in (RECIPES / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
RIVER = QUESTIONS[1]


@cache
def recipe() -> Recipe:
    return load_and_check(RECIPES / "7b-qlora-24gb-timeshare.yaml", lacks=[])


@pytest.fixture
async def address(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The address of the atlas, and of a Wikipedia whose articles are its pages."""

    async def find(request: web.Request) -> web.Response:
        titles = {"karsund.html": "Karsund", "people/halvard.html": "Halvard Øye"}
        host = f"http://{request.host}"
        pages = [
            {"title": title, "fullurl": f"{host}/{path}", "extract": f"About {title}.", "index": index}
            for index, (path, title) in enumerate(titles.items(), 1)
            if title.lower() in request.query["gsrsearch"].lower()
        ]
        return web.json_response({"query": {"pages": pages}} if pages else {})

    routes: dict[str, Handler | str | Path] = {
        f"/{path.relative_to(PAGES)}": path for path in PAGES.rglob("*") if path.is_file()
    }
    async with site({**routes, "/w/api.php": find}, PRIVATE) as served:
        monkeypatch.setattr(Wikipedia, "address", f"http://127.0.0.1:{served.port}/w/api.php")
        yield f"http://127.0.0.1:{served.port}"


@asynccontextmanager
async def chains(folder: Path, address: str, texts: list[str]) -> AsyncIterator[Any]:
    taken = recipe()
    servers = {name: server.model_dump() for name, server in taken.mcp_servers.items()}
    servers["search"]["options"]["engine"] = {"cache": str(folder / "cache"), "calls_per_second": 1000.0}
    servers["browse"]["options"] |= {"cache": str(folder / "cache"), "allow_hosts": [address.removeprefix("http://")]}
    fields = {
        "tools": [],
        "mcp_servers": servers,
        "rewards": [entry.model_dump() for entry in taken.rewards],
        "rollout": {"max_turns": taken.rollout.max_turns},
    }
    async with scripted_chains(folder, texts, **fields) as opened:
        yield opened


async def play(folder: Path, address: str, texts: list[str], row: dict[str, Any] = RIVER) -> Trajectory:
    async with chains(folder, address, texts) as opened:
        trajectory = await opened.run(**row)
        opened.check(trajectory)
        return trajectory


async def test_a_chain_searches_reads_two_pages_and_names_its_source(tmp_path: Path, address: str) -> None:
    texts = [
        call("search", query="Halvard Øye engineer"),
        call("browse", url=f"{address}/people/halvard.html"),
        call("follow", link=1),
        f"<answer>Tovla</answer> <source>{address}/veidnes.html</source>",
    ]
    trajectory = await play(tmp_path, address, texts)
    assert trajectory.outcome is Outcome.COMPLETED
    assert trajectory.reward == 1.0
    results = [message for message in trajectory.messages if message["role"] == "tool"]
    assert results[0]["content"] == f'Doc 1(Title: "Halvard Øye") About Halvard Øye. ({address}/people/halvard.html)'
    assert "The river Tovla meets the sea here." in results[2]["content"]
    wanted = {"success": 1.0, "source_opened": 1.0, "source_says_it": 1.0, "pages_opened": 2.0}
    assert {name: trajectory.metrics[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("answer", "source", "reward", "opened", "says"),
    [
        ("the Tovla.", "veidnes.html", 1.0, 1, 1),
        ("Tovla", "people/halvard.html", 0.7, 1, 0),  # opened, but the answer does not name it
        ("Tovla", "karsund.html", 0.7, 0, 0),  # not opened
        ("Tovla", "", 0.7, 0, 0),
        ("Glomma", "veidnes.html", 0.0, 1, 1),
        ("", "veidnes.html", 0.0, 1, 1),
    ],
)
async def test_rewards_by_hand(
    tmp_path: Path, address: str, answer: str, source: str, reward: float, opened: int, says: int
) -> None:
    texts = [
        call("browse", url=f"{address}/people/halvard.html"),
        call("follow", link=1),
        f"<answer>{answer}</answer><source>{address}/{source}</source>",
    ]
    trajectory = await play(tmp_path, address, texts)
    assert trajectory.reward == pytest.approx(reward)
    assert (trajectory.metrics["source_opened"], trajectory.metrics["source_says_it"]) == (opened, says)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("find_on_page", {"text": "Tovla"}), ("browse", {"url": "ftp://Tovla/"}), ("browse", {"url": "{source}?Tovla"})],
)
async def test_what_the_model_wrote_itself_is_not_said_by_the_page(
    tmp_path: Path, address: str, name: str, arguments: dict[str, str]
) -> None:
    source = f"{address}/people/halvard.html"
    arguments = {key: value.format(source=source) for key, value in arguments.items()}
    last = arguments["url"] if arguments.get("url", "").startswith(source) else source
    texts = [call("browse", url=source), call(name, **arguments), f"<answer>Tovla</answer><source>{last}</source>"]
    trajectory = await play(tmp_path, address, texts)
    assert trajectory.reward == pytest.approx(0.7)
    assert (trajectory.metrics["source_opened"], trajectory.metrics["source_says_it"]) == (1, 0)
