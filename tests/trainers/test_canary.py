"""The canary's scores of the same tokens, by a real server and by the trainer."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync import canary
from agentfactory.trainers.sync.canary import CANDIDATES, CONTEXTS, Canary, CanaryRow, canary_rows
from agentfactory.trainers.sync.canary_verdict import Scores
from agentfactory.trainers.sync.file_sync import FileSync
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from agentfactory.trainers.sync.weight_sync import SyncReport
from tests.conftest import embedded_server

pytestmark = pytest.mark.numbers

ROWS = canary_rows(range(64), longest=40)
BASE = SyncReport(version=0, label="default", model="policy", bytes=0, seconds=0.0, digest="")


@pytest.fixture(scope="module")
def own_server(model_folder: Path) -> Iterator[ServerControl]:
    with embedded_server(model_folder, "--max-model-len", "64") as url:
        yield ServerControl(url)


@pytest.mark.processes
def test_server_and_trainer_score_the_same_tokens(own_server: ServerControl, policy: Policy) -> None:
    trainer = canary.trainer_scores(policy, ROWS)
    assert policy.training
    with torch.no_grad():
        row = ROWS[3]
        plain = policy.network(torch.tensor([row.context])).logits[0, -1].log_softmax(-1)[row.candidates]
    assert trainer[3 * CANDIDATES : 4 * CANDIDATES] == pytest.approx(plain.double().numpy(), abs=1e-5)
    for fresh in (True, False):
        assert canary.server_scores(own_server, ROWS, BASE, fresh) == pytest.approx(trainer, abs=1e-4)


def test_the_sampled_token_among_the_candidates_is_no_trouble(own_server: ServerControl, policy: Policy) -> None:
    """A server lists the sampled token first and each token once; with few candidates it is one of them or not."""
    rows = [CanaryRow(row.context, [first, first + 1]) for row in ROWS for first in range(0, 64, 8)]
    assert canary.server_scores(own_server, rows, BASE, False) == pytest.approx(
        canary.trainer_scores(policy, rows), abs=1e-4
    )


def test_fresh_scores_pass_the_cache_by(own_server: ServerControl, policy: Policy, tmp_path: Path) -> None:
    report = FileSync([own_server], tmp_path / "first", keep_caches=True).push(0, policy, policy.gather())
    canary.server_scores(own_server, ROWS, replace(report, cache_salt=None), fresh=True)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.2)
    sync = FileSync([own_server], tmp_path / "second", keep_caches=True)
    report = sync.push(1, policy, policy.gather())
    unsalted = replace(report, cache_salt=None)
    stale, fresh = (canary.server_scores(own_server, ROWS, unsalted, fresh) for fresh in (False, True))
    expected = canary.trainer_scores(policy, ROWS)
    assert abs(stale - expected).max() > 1e-2
    assert fresh == pytest.approx(expected, abs=1e-4)
    # the salt avoids the old caches
    assert report.cache_salt == "1"
    assert canary.server_scores(own_server, ROWS, report, fresh=False) == pytest.approx(expected, abs=1e-4)


def test_what_generates_must_say_the_version(own_server: ServerControl) -> None:
    with pytest.raises(SyncError, match=r"generates with version '\w+', not with '7'"):
        Canary([own_server], ROWS, "float32").prove(replace(BASE, version=7, label="7"), np.zeros(0))


@pytest.mark.parametrize("stale", [0, 1])
def test_each_replica_behind_an_address_is_scored(monkeypatch: pytest.MonkeyPatch, stale: int) -> None:
    moved = np.ones(CONTEXTS * CANDIDATES)

    def scores(server: object, rows: object, report: SyncReport, fresh: bool, replica: int) -> Scores:
        return moved * 0.0 if replica == stale else moved * report.version

    server = ServerControl("http://127.0.0.1:9")
    monkeypatch.setattr(ServerControl, "replicas", lambda server: [0, 1])
    monkeypatch.setattr(canary, "server_scores", scores)
    judge = Canary([server], ROWS, "float32")
    judge.prove(BASE, moved * 0.0)
    with pytest.raises(SyncError, match=rf":9, replica {stale}, version 1 .*it serves other weights"):
        judge.prove(replace(BASE, version=1), moved)
