"""The recipes that search: chains with scripted turns on local pages that name their source, and in Search-R1's two
formats on our small file; their rewards and data."""

import json
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentfactory.base.user_code.loading import load_object
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.trajectory import Outcome, Trajectory
from agentfactory.worlds.search.corpus import Corpus
from agentfactory.worlds.search.known_engines import Wikipedia
from agentfactory.worlds.search.local_index import build_index
from tests.conftest import REPOSITORY
from tests.project import load_and_check
from tests.recipes.chains import read_rows
from tests.scripted_chains import call, scripted_chains
from tests.worlds.browse.site import PAGES, PRIVATE, Handler, site

# the check of a recipe asks the server's Python whether it has vLLM
pytestmark = pytest.mark.processes

BROWSING = REPOSITORY / "recipes" / "browsing"
RIVER = read_rows(BROWSING / "questions.jsonl")[1]


@cache
def recipe(file: Path) -> Recipe:
    return load_and_check(file, lacks=[])


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


async def play(folder: Path, address: str, texts: list[str]) -> Trajectory:
    taken = recipe(BROWSING / "7b-qlora-24gb-timeshare.yaml")
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
        trajectory = await opened.run(**RIVER)
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
async def test_own_words_are_no_page(tmp_path: Path, address: str, name: str, arguments: dict[str, str]) -> None:
    source = f"{address}/people/halvard.html"
    arguments = {key: value.format(source=source) for key, value in arguments.items()}
    last = arguments["url"] if arguments.get("url", "").startswith(source) else source
    texts = [call("browse", url=source), call(name, **arguments), f"<answer>Tovla</answer><source>{last}</source>"]
    trajectory = await play(tmp_path, address, texts)
    assert trajectory.reward == pytest.approx(0.7)
    assert (trajectory.metrics["source_opened"], trajectory.metrics["source_says_it"]) == (1, 0)


# ---- Search-R1


SEARCH = REPOSITORY / "recipes" / "search_r1"
QUESTIONS = read_rows(SEARCH / "questions.jsonl")
PROMPT = "Answer with <search> query </search> and <answer> Beijing </answer>. Question: "


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus") / "index"
    build_index(Corpus(str(SEARCH / "passages.jsonl")), folder)
    return str(folder)


async def act(folder: Path, name: str, source: str, texts: list[str], **task: Any) -> tuple[Trajectory, list[str]]:
    """Run a chain with the recipe's tools, limits, rewards and format; return its trajectory, and the texts of its
    trained and of its masked tokens."""
    taken = recipe(SEARCH / name)
    server = taken.mcp_servers["search"].model_copy(update={"options": {"source": source, "count": 3}})
    fields = {
        "tools": [],
        "mcp_servers": {"search": server.model_dump()},
        "limits": taken.limits.model_dump(),
        "rewards": [entry.model_dump() for entry in taken.rewards],
        "rollout": {"parser": taken.rollout.parser, "max_turns": taken.rollout.max_turns},
    }
    async with scripted_chains(folder, texts, **fields) as chains:
        trajectory = await chains.run(**task)
        chains.check(trajectory)
        (row,) = trajectory.rows
        pairs = list(zip(row.token_ids, row.mask, strict=True))
        return trajectory, [
            chains.tokenizer.decode([token for token, sampled in pairs if sampled == wanted]) for wanted in (1, 0)
        ]


TWO_HOPS = QUESTIONS[4]
WRITTEN = {
    "3b-lora-24gb.yaml": '<tool_call>\n{"name": "search", "arguments": {"query": "QUERY"}}\n</tool_call>',
    "3b-lora-24gb-tags.yaml": "<search> QUERY </search>",
}


@pytest.mark.parametrize("name", WRITTEN)
async def test_a_chain_searches_twice_and_answers(tmp_path: Path, index: str, name: str) -> None:
    queries = ["lighthouse of Varnholm", 'Where was "Ottilie Brandt born?']
    texts = [f"I search. {WRITTEN[name].replace('QUERY', query.replace(chr(34), ''))}" for query in queries]
    trajectory, (trained, context) = await act(
        tmp_path, name, index, [*texts, "So it is <answer> Kessel. </answer>"], **TWO_HOPS
    )
    assert trajectory.outcome is Outcome.COMPLETED
    assert (trajectory.reward, trajectory.metrics["success"]) == (1.0, 1.0)
    assert trajectory.metrics["tool/search/calls"] == 2
    found = 'Doc 1(Title: "Varnholm") Varnholm is a harbour town'
    assert found in context
    assert "(1832-1904)" in context
    assert found not in trained
    assert "Kessel. </answer>" in trained
    assert ("<information>" in context) == ("tags" in name)


@pytest.mark.parametrize(
    ("answer", "exact", "f1"),
    [
        ("<answer>Mount Corvin</answer>", 1, 1.0),
        ("<answer>the mount corvin.</answer>", 1, 1.0),
        ("<answer>Corvin</answer>", 1, 1.0),
        ("<answer>Beijing</answer> or rather <answer>Corvin</answer>", 1, 1.0),
        ("<answer>Mount Corvin in Hallen</answer>", 0, 2 * (2 / 4) * 1 / (2 / 4 + 1)),
        ("<answer>Mount Etna</answer>", 0, 2 * (1 / 2) * (1 / 2) / (1 / 2 + 1 / 2)),
        ("<answer>Etna</answer>", 0, 0.0),
        ("<answer></answer>", 0, 0.0),
        ("Mount Corvin", 0, 0.0),  # not marked as the answer
    ],
)
async def test_search_r1s_rewards_by_hand(tmp_path: Path, index: str, answer: str, exact: int, f1: float) -> None:
    row = QUESTIONS[5]
    trajectory, _ = await act(tmp_path, "3b-lora-24gb.yaml", index, [f"So: {answer}"], **row)
    assert trajectory.reward == exact
    assert trajectory.metrics["success"] == exact
    assert trajectory.metrics["reward/f1"] == pytest.approx(f1)


def test_the_held_out_questions_are_those_of_the_test_split(tmp_path: Path) -> None:
    rows = [
        {
            **row,
            "id": f"test_{number}",
            "data_source": name,
            "prompt": [{"role": "user", "content": PROMPT + row["question"]}],
        }
        for name in ("nq", "triviaqa", "hotpotqa")
        for number, row in enumerate(QUESTIONS)
    ]
    for split, some in (("train", rows[:1]), ("test", rows)):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    held_out = load_object("search_r1.py:held_out", SEARCH)
    found = list(held_out(3, path=str(tmp_path)))
    assert [row["data_source"] for row in found] == ["nq"] * 3 + ["hotpotqa"] * 3
    assert found[1] == {**QUESTIONS[1], "data_source": "nq"}
    (first, *_) = held_out(3, prompt=True, path=str(tmp_path))
    assert first["messages"] == rows[0]["prompt"]
    assert "question" not in first
    assert len(list(held_out(100, path=str(tmp_path)))) == 16
