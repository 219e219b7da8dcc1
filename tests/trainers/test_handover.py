"""Weights that another thread's stream makes or reads: each is ordered after what it needs, by more than the CPU.

CUDA's streams are doubles: one per thread, as vLLM's `current_stream` sets them, each with the work that is ordered
before what it gets next."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.sync.content_proof import Content
from agentfactory.trainers.sync.nccl_sync import NcclSync, VllmGroup
from agentfactory.trainers.sync.weight_sync import on_each

STATE = {f"w{number}": torch.full((4,), float(number)) for number in range(5)}


class Stream:
    def __init__(self) -> None:
        self.before: set[str] = set()

    def record_event(self) -> frozenset[str]:
        return frozenset(self.before)

    def wait_event(self, event: frozenset[str]) -> None:
        self.before |= event

    def synchronize(self) -> None:
        """The CPU waits; other streams do not."""


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    own = threading.local()

    def current(*_: object) -> Stream:
        own.stream = getattr(own, "stream", None) or Stream()
        return own.stream

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    return current


class Gathered(Weights):
    """Sharded weights, each of which the gathering thread's stream makes."""

    def __init__(self, stream: Any) -> None:
        super().__init__(STATE.items())
        self.sharded, self._stream = True, stream

    def _gather(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in STATE.items():
            assert "step" in self._stream().before
            self._stream().before.add(name)
            yield name, value


def test_gathered_weights_are_made_before_they_are_read(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    stream().before.add("step")
    for name, _ in Gathered(stream).stream():
        assert name in stream().before


def test_digests_follow_the_weights(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def matches(self: Content, layout: Any, *_: object) -> bool:
        assert layout.names[0] in stream().before
        read.append(layout.names[0])
        return True

    monkeypatch.setattr(Content, "_matches", matches)
    meta = {name: value.to("meta") for name, value in STATE.items()}
    content = Content(meta, {"": {name: "sha" for name in STATE}}, keep=False)

    def made() -> Iterator[tuple[str, Tensor]]:
        for name, value in STATE.items():
            stream().before.add(name)
            yield name, value

    for _ in content.passing(made()):
        pass
    content.check({"other.weight": "sha"})
    assert read == [*STATE]


def test_servers_are_filled_after_the_step_and_before_the_next(stream: Any) -> None:
    stream().before.add("step")
    servers: Any = ["one", "two"]

    def fill(server: str) -> None:
        assert "step" in stream().before
        stream().before.add(server)

    on_each(servers, fill)
    assert {"one", "two"} <= stream().before


def test_a_broadcast_follows_the_step_and_each_weight(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    threads, sent = set(), []

    class Communicator:
        def broadcast(self, buffer: Tensor, src: int, stream: Stream) -> None:
            threads.add(threading.get_ident())
            sent.append(set(stream.before))

        def destroy(self) -> None: ...

    def opened(*_: object) -> VllmGroup:
        threads.add(threading.get_ident())
        group = object.__new__(VllmGroup)
        group._communicator, group.device = Communicator(), torch.device("cpu")
        return group

    def get(path: str) -> Any:
        return {"/get_world_size": {"world_size": 1}, "/v1/models": {"data": [{"id": "m"}]}}[path]

    server: Any = SimpleNamespace(url="http://127.0.0.1:1", get=get, post=lambda *_: {"checksums": {}})
    sync = NcclSync([server], open_group=opened, buffer_bytes=1)
    monkeypatch.setattr(sync, "_load", lambda servers, version, content, transfer: transfer())
    stream().before.add("step")
    for version in (1, 2):
        sync.push(version, SimpleNamespace(), Gathered(stream))  # type: ignore[arg-type]
        sync._last = None
    assert [{"step", name} <= before for name, before in zip([*STATE] * 2, sent, strict=True)] == [True] * 10
    assert len(threads) == 1, "one thread sends, and has joined the group"
