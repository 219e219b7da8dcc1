"""The retrieval server in its own process, queried by a client written for Search-R1's servers, and by ours."""

import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from agentfactory.base.http.server_keys import key_header
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.worlds.search.sources import RetrievalClient
from tests.tools.conftest import running
from tests.waiting import wait_for
from tests.worlds.search.corpora import PLAYS, index_of

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def retrieval(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    folder = index_of(tmp_path_factory.mktemp("retrieval"))
    with running("-m", "agentfactory", "index", "serve", str(folder), "--port", "0") as (process, address):
        yield address, process


def _post(address: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json", **key_header(address)})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_client_written_against_search_r1_reads_our_answers(retrieval: tuple[str, Any]) -> None:
    address, _ = retrieval
    assert address.startswith("http://127.0.0.1:")
    body = {"queries": ["scottish general", "a wager", "zyzzyva"], "topk": 2, "return_scores": True}
    status, answer = _post(address, body)
    assert status == 200
    told = []
    for found in answer["result"]:
        text = ""
        for number, item in enumerate(found):
            title, *rest = item["document"]["contents"].split("\n")
            text += f"Doc {number + 1}(Title: {title}) {chr(10).join(rest)}\n"
            assert item["score"] > 0
        told.append(text)
    general = "A tragedy by William Shakespeare about a Scottish general and his wife."
    assert told[0].startswith(f'Doc 1(Title: "Macbeth") {general}\n')
    assert told[1].startswith('Doc 1(Title: "Faust") A tragedy by Goethe')
    assert told[2] == ""


def test_bad_requests_are_refused_and_hostile_queries_are_not(retrieval: tuple[str, Any]) -> None:
    address, _ = retrieval
    for body, field in ((b"{", None), ({}, "queries"), ({"queries": "hamlet"}, "queries")):
        status, answer = _post(address, body)
        assert status == 422
        assert field is None or answer["detail"][0]["loc"] == [field]
    hostile = ["", '"', "title: hamlet AND", "a" * 10_000, "\x00", "hamlet \ud800", "東京", "((((", "\\"]
    status, answer = _post(address, {"queries": hostile})
    assert status == 200
    assert [len(found) for found in answer["result"]] == [0, 0, 3, 0, 0, 1, 1, 0, 0]
    assert answer["result"][2][0]["id"] == "h"


async def test_our_client_reads_our_server_until_it_ends(retrieval: tuple[str, "subprocess.Popen[str]"]) -> None:
    address, process = retrieval
    client = RetrievalClient(address, retry_seconds=0.3)
    (found,) = await client.search("wager", 3)
    assert (found.contents, found.url) == (PLAYS[2].contents, PLAYS[2].url)
    assert (found.score or 0) > 0
    process.send_signal(signal.SIGTERM)
    assert wait_for(lambda: process.poll() is not None)
    with pytest.raises(ToolInfrastructureError, match="does not answer"):
        await client.search("wager", 3)
    await client.close()
