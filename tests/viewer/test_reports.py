"""The viewer's table of runs, the findings of an audit at their tokens, and what a replay has found."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from agentfactory.audit.reports import REPLAYS, save_replay
from agentfactory.rollout.groups.group_files import append_group, delete_groups, read_groups
from tests.viewer.browsing import api, asking, chain_page, opened, run_id, trajectory, viewing, when_read

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def runs(quickstart_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with a wrong mask, which was audited and whose first chain was ranked; and another with another seed."""
    folder = tmp_path_factory.mktemp("reports")
    faulty, other = folder / "faulty", folder / "other"
    for copy in (faulty, other):
        shutil.copytree(quickstart_run, copy, symlinks=True)
    file = faulty / "grpo" / "trajectories" / "train.jsonl"
    groups = list(read_groups(file))
    delete_groups(file)
    for group in groups:
        row = group.trajectories[0].rows[0]
        row.mask = np.array(row.mask)
        row.mask[5] = 1
        append_group(file, group)
    # not in this process, where the browser's event loop runs
    command = [sys.executable, "-m", "agentfactory", "audit", str(faulty)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    recipe = other / "grpo" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("seed: 0", "seed: 7", 1))
    found = {"figure": "success", "mean": 0.5, "interval": [0.25, 0.75], "chains": 16}
    turns = [{"turn": 2, "effect": -0.75, "before": found}, {"turn": 1, "effect": 0.25, "before": found}]
    save_replay(faulty / "grpo", {"chain": groups[0].trajectories[0].id, "figure": "success", "turns": turns})
    replayed = {"chain": groups[0].trajectories[0].id, "turn": 2, "exact": True, "results": {"as it was": found}}
    save_replay(faulty / "grpo", replayed)
    return faulty, other


@pytest.fixture(scope="module")
def url(runs: tuple[Path, Path]) -> Iterator[str]:
    with viewing(*runs) as address:
        when_read(address)
        yield address


@pytest.fixture(params=[1400, 390])
def page(browser: "Browser", request: pytest.FixtureRequest) -> "Iterator[Page]":
    context = browser.new_context(viewport={"width": request.param, "height": 900})
    with opened(context) as page:
        yield page
        assert page.evaluate("document.documentElement.scrollWidth") <= request.param
    context.close()


@pytest.mark.processes
def test_a_finding_opens_the_chain_at_the_token(page: "Page", url: str) -> None:
    page.goto(f"{url}#/run/{run_id(url, 'faulty/grpo')}")
    finding = page.locator(".finding.wrong").first
    finding.wait_for()
    assert "masks differ from the sampled tokens" in finding.inner_text()
    link = finding.locator("a").first
    assert ", token 5" in link.inner_text()
    link.click()
    pointed = page.locator(".tokens .pointed")
    pointed.wait_for()
    assert pointed.get_attribute("data-i") == "5"


@pytest.mark.processes
def test_a_chain_shows_what_hung_on_its_turns(page: "Page", url: str, runs: tuple[Path, Path]) -> None:
    run = run_id(url, "faulty/grpo")
    name = json.loads((runs[0] / "grpo" / REPLAYS).read_text().splitlines()[0])["chain"]
    rows = api(url, f"/api/trajectories?run={run}&group={name.partition('.')[0]}")["rows"]
    page.goto(url + trajectory(next(row for row in rows if row["chain"] == name)))
    effects = page.locator(".message .effect")
    effects.first.wait_for()
    assert effects.all_inner_texts() == ["effect +0.25", "effect −0.75"]
    assert "turn 2, as it was\nsuccess 0.50 [0.25, 0.75], 16 continuations" in page.locator("#replays").inner_text()
    page.locator("button.replay").nth(1).click()
    shown = page.locator('.message[data-turn="1"] .command pre').inner_text()
    assert shown == f"agentfactory replay {runs[0]} {name} --turn 2"


def test_the_table_has_figures_and_differing_settings(runs: tuple[Path, Path]) -> None:
    _, client = asking(*runs)
    table = client.get("/api/runs").json()
    assert table["keys"] == ["seed"]
    by_label = {row["label"]: row for row in table["rows"]}
    assert [by_label[name]["settings"] for name in ("faulty/grpo", "other/grpo")] == [["0"], ["7"]]
    assert [by_label[name]["audit"] for name in ("faulty/grpo", "other/grpo")] == ["wrong", None]
    assert by_label["other/grpo"]["figures"]["success_after"] >= 0


@pytest.mark.parametrize("text", ["{", "[1]", '{"findings": 3}', '{"findings": [1, {"evidence": [2, {"chain": {}}]}]}'])
def test_a_damaged_report_is_told_or_shown_as_far_as_can_be(runs: tuple[Path, Path], tmp_path: Path, text: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs[1] / "grpo", run, symlinks=True)
    (run / "audit.json").write_text(text)
    (run / REPLAYS).write_text("{")
    _, client = asking(run)
    (row,) = client.get("/api/runs").json()["rows"]
    answer = client.get("/api/audit", params={"run": row["run"]})
    assert answer.status_code in (200, 404)
    assert chain_page(client)["replays"] == []
