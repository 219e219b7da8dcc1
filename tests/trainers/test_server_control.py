"""Control of inference servers: checks at the start, and waiting while none answers."""

import time
from typing import Any

import pytest

from agentfactory.trainers.sync.canary import Canary
from agentfactory.trainers.sync.proven_push import RetryingSync
from agentfactory.trainers.sync.server_control import ServerControl, ServerGoneError, SyncError
from agentfactory.trainers.sync.weight_sync import SyncReport

NOWHERE = ServerControl("http://127.0.0.1:9")
CANARY = Canary([NOWHERE], [], "float32")
REPORT = SyncReport(3, "3", "policy", 1, 0.1, "00")


def test_a_missing_route_names_the_switch_that_turns_it_on(server: ServerControl) -> None:
    with pytest.raises(SyncError, match=r"lacks /collective_rpc; start vLLM >= 0.32 with VLLM_SERVER_DEV_MODE=1$"):
        server.require(["/pause", "/collective_rpc"])
    with pytest.raises(SyncError, match=r"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora$"):
        server.require(["/v1/load_lora_adapter_from_the_moon"])
    with pytest.raises(ServerGoneError, match="ConnectionRefusedError"):
        NOWHERE.require([])


class Sleeper:
    def __init__(self, answers_from: int) -> None:
        self.answers_from = answers_from
        self.asked = 0

    def restore(self, *_: Any) -> SyncReport:
        self.asked += 1
        if self.asked < self.answers_from:
            NOWHERE.get("/health")
        return REPORT

    push = restore


@pytest.mark.slow
def test_a_version_waits_for_a_server_as_long_as_the_recipe_says() -> None:
    policy: Any = None
    sleeper = Sleeper(answers_from=3)
    assert RetryingSync(sleeper, CANARY, retry_seconds=30.0).push(3, policy, {}) is REPORT
    assert sleeper.asked == 3
    started = time.monotonic()
    with pytest.raises(ServerGoneError, match=r"127.0.0.1:9/health.*no server answered for 0.6 s"):
        RetryingSync(Sleeper(answers_from=99), CANARY, retry_seconds=0.6).push(3, policy, {})
    assert time.monotonic() - started < 20


def test_a_server_that_is_gone_again_is_not_proven() -> None:
    sync = RetryingSync(Sleeper(answers_from=2), CANARY, retry_seconds=1.0)
    assert sync.bring_back(NOWHERE.url) is False
    assert sync.bring_back(NOWHERE.url) is True
