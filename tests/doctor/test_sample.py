"""`agentfactory doctor RECIPE --sample N`: a real model is sampled, its look and advice are said, nothing is left."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.findings import Finding
from agentfactory.commands import sample_command
from agentfactory.launching.child_processes import ChildFailed
from tests.project import Command

CALLS_NOTHING = "train.steps=3", "train.batch_size=2", "rollout.group_size=4", "rollout.max_tokens=8"


@pytest.mark.extended
@pytest.mark.processes
def test_a_look_before_training(project: Path, agentfactory: Command, warm_start: Path, warm_server: str) -> None:
    """The quickstart's model in another task, where it calls no tool that exists and all rewards are 0."""
    before = {*Path(tempfile.gettempdir()).glob("agentfactory-look-*")}
    there = [f"model.path={warm_start}", f"server.url={warm_server}", "rollout.max_total_tokens=1024"]
    result = agentfactory("doctor", "recipe.yaml", "--sample", "6", *there, *CALLS_NOTHING)
    assert result.returncode == 0, result.stdout + result.stderr
    out = result.stdout
    assert f"sampling 6 chains in 2 groups with policy at {warm_server}\n" in out
    assert f"ok       first look: 6 chains of 1 task with policy at {warm_server}\n         calls: " in out
    assert "calls: 0 of 6 chains called a tool, " in out
    assert "warning  tool calls: no chain of 6 in 2 groups called a tool, though search is offered; " in out
    assert "\n         rewards: all 0; they differ in 0 of 2 groups: none would teach\n" in out
    # the chains' lengths, not half of what the limits allow
    assert re.search(r"\nok       time: a step takes about .* sampled of \d+ tokens \(those sampled\)", out)
    assert out.count("\n         first turn (reward 0) ") == 3
    assert "\nwarning  equal rewards: the rewards of all 6 chains in 2 groups are 0: such groups teach nothing\n" in out
    assert "\n         fix: easier rows of data" in out
    assert not (project / "runs").exists()
    assert {*Path(tempfile.gettempdir()).glob("agentfactory-look-*")} == before


@pytest.mark.parametrize(
    ("error", "left"),
    [(KeyboardInterrupt(), 0), (SettingError("data", "no such file", "name one"), 0), (ChildFailed("it died"), 1)],
)
def test_only_a_failure_leaves_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, left: int
) -> None:
    def look(*_: object) -> Iterator[Finding]:
        raise error
        yield

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("load_recipe", "check_recipe"):
        monkeypatch.setattr(sample_command, name, lambda *_, **__: None)
    monkeypatch.setattr(sample_command, "_look", look)
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
        (finding,) = sample_command.sample("recipe.yaml", [], 4, print)
        assert (str(tmp_path) in (finding.fix or "")) == bool(left)
    assert len([*tmp_path.iterdir()]) == left
