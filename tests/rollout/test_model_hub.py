"""The hub out of reach: silent, without an address, forbidden or busy."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from agentfactory.base.errors import SettingError
from agentfactory.rollout import model_hub
from agentfactory.rollout.model_hub import HubName, check_answers, check_names, use_hub_if_it_answers
from tests.http_pages import serving

MODEL = HubName("model.path", "an-organisation/a-model", "model")
ROWS = HubName("data.path", "an-organisation/rows", "dataset")


@contextmanager
def hub(status: int, headers: dict[str, str] | None = None) -> Iterator[str]:
    """The address of a hub, and a proxy, that gives this answer to every request."""
    about = {"id": MODEL.name, "modelId": MODEL.name, "gated": False, "siblings": [], "tags": []}
    body = json.dumps(about).encode()
    with serving(lambda request: (status, headers or {}, body if request.command == "GET" else b"")) as url:
        yield url


@contextmanager
def bound(listens: bool) -> Iterator[str]:
    """The address of a server that never answers, and one at which nobody listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


silent, nobody = partial(bound, True), partial(bound, False)


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without downloads, which has not asked the hub yet."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_hub, "_why_offline", model_hub._why_offline)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("NO_PROXY", "")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    def forget() -> None:
        model_hub._refusal_of.cache_clear()
        model_hub._refusal_of_hub.cache_clear()
        close_session()  # it has the proxies of when it was opened

    forget()
    yield
    forget()


def download(name: HubName) -> None:
    """Put the files of a name into the cache of downloads."""
    folder = Path(constants.HF_HUB_CACHE) / f"{name.kind}s--{name.name.replace('/', '--')}" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()


def refusal(*names: HubName) -> str:
    with pytest.raises(SettingError) as error:
        check_names(names)
    return str(error.value)


def test_what_the_hub_has_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(200) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        check_names([MODEL, ROWS])
        check_answers("--push")
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        (silent, "no answer within 0.5 s; fix: correct HF_ENDPOINT, or"),
        (lambda: nullcontext("https://nowhere.invalid"), "[Errno -"),
        (partial(hub, 403), "its answer is 403 Forbidden; fix: correct HF_ENDPOINT, or"),
        (
            partial(hub, 429),
            "its answer is 429 Too Many Requests; fix: wait some minutes, log in by `hf auth login`, or",
        ),
    ],
)
def test_a_hub_that_does_not_answer(serve: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_hub, "_ASK_SECONDS", 0.5)
    with serve() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        assert f"the hub cannot be reached: {url}: {said}" in refusal(MODEL)


@pytest.mark.parametrize(
    ("serve", "address", "said"),
    [
        (nobody, "URL", "https://huggingface.co through the proxy URL (HTTPS_PROXY): [Errno 111]"),
        (nobody, "http://user:secret@HOST", "through the proxy URL (HTTPS_PROXY): [Errno 111]"),
        (partial(hub, 403), "URL", "through the proxy URL (HTTPS_PROXY): 403 Forbidden; fix: correct HTTPS_PROXY, or"),
        (nobody, "nonsense:port", "be reached: HTTPS_PROXY: 'http://nonsense:port' is no address of a proxy"),
    ],
)
def test_a_proxy_that_does_not_pass(serve: Any, address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    with serve() as url:
        monkeypatch.setenv("HTTPS_PROXY", address.replace("URL", url).replace("HOST", url.removeprefix("http://")))
        told = refusal(MODEL)
    assert said.replace("URL", url) in told
    assert "secret" not in told


@pytest.mark.parametrize("headers", [{}, {"X-Error-Code": "RepoNotFound"}])
def test_a_name_that_the_hub_does_not_know(headers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(404, headers) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        told = f"model.path: {MODEL.name} is not on the hub, or private; fix: correct the name, or `hf auth login`"
        assert refusal(MODEL) == told
        use_hub_if_it_answers(MODEL.name)
    assert not constants.HF_HUB_OFFLINE


def test_downloads_are_used_without_the_hub(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    download(MODEL)
    with nobody() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        check_names([MODEL])
        assert capfd.readouterr().err == (
            f"agentfactory: the hub cannot be reached: {url}: [Errno 111] Connection refused; only earlier downloads "
            "are used\n"
        )
        assert constants.HF_HUB_OFFLINE
        assert os.environ["HF_HUB_OFFLINE"] == "1", "for the processes of the run"
        # the variable is ours: the reason is the hub's
        assert "is not on this machine, and the hub cannot be reached" in refusal(MODEL, ROWS)
