"""Trackers and credit.jsonl, compared with metrics.jsonl: a short training on saved groups by the user's command,
resumed from its second step, and read back from the trackers' own files."""

import base64
import importlib
import importlib.util
import json
import logging
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from agentfactory.launching.run_folder import RunFolder
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.config import TrackConfig
from agentfactory.trainers.networks.policy import load_policy
from agentfactory.trainers.tracking import COLUMNS, Tracking, chosen, conversation
from tests.conftest import QUICKSTART
from tests.forked import TRAINER, Forked
from tests.project import load_and_check
from tests.saved_groups import write_groups
from tests.vision_rows import file_of
from tests.waiting import wait_for

TRACKERS = ["wandb", "tensorboard", "trackio"]
BATCH = 2
LAST = 4

Series = dict[str, dict[int, float]]
"""The last value per name and step."""


@dataclass
class Tracked:
    """A run of LAST steps: after 3 steps, it was resumed from its second."""

    output: Path
    groups: list[Group]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return list(RunFolder(self.output).read_metrics())

    @property
    def credit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in RunFolder(self.output).credit.read_text().splitlines()]

    @property
    def tracker_name(self) -> str:
        return json.loads((self.output / "tracking.json").read_text())["trackio"]


@pytest.fixture(scope="module")
def trackio_storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_DATA_DIR", str(tmp_path_factory.mktemp("wandb")))
        folder = tmp_path_factory.mktemp("trackio")
        patch.setenv("TRACKIO_DIR", str(folder))
        # its modules copy the variable when they are imported, and another test may have imported them
        storage = importlib.import_module("trackio.sqlite_storage")
        for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "trackio"]:
            for name, value in {"TRACKIO_DIR": folder, "MEDIA_DIR": folder / "media"}.items():
                if name in vars(module):
                    patch.setattr(module, name, value)
        yield storage.SQLiteStorage


@pytest.fixture(scope="module")
def tracked(
    quickstart_run: Path, warm_start: Path, trackio_storage: Any, tmp_path_factory: pytest.TempPathFactory
) -> Tracked:
    folder = tmp_path_factory.mktemp("tracking")
    groups = list(read_groups(quickstart_run / "grpo" / "trajectories" / "train.jsonl"))[: LAST * BATCH]
    for group in groups:
        group.trajectories = sorted(group.trajectories, key=lambda chain: chain.reward or 0.0)[::4]
    show(chosen(groups[:BATCH], 1)[0][1], file_of(Image.new("RGB", (20, 10), "red")))
    saved, file, output = folder / "groups.jsonl", folder / "recipe.yaml", folder / "tracked"
    write_groups(saved, groups)
    train = {"from_trajectories": str(saved), "steps": 3, "batch_size": BATCH, "checkpoint_every": 2}
    recipe = {
        "model": {"path": str(warm_start), "dtype": "float32"},
        "tools": [str(QUICKSTART / "treasure_hunt.py:TreasureHunt")],
        # one advantage for all turns of a chain, whatever the short quickstart has learned
        "train": {**train, "learning_rate": 1e-3, "advantage": {"malformed_turns": "like_others"}},
        "track": {"trackers": TRACKERS},
    }
    file.write_text(json.dumps(recipe))
    resumed = ["--resume", str(output / "checkpoints" / "step-000002"), f"train.steps={LAST}"]
    for ends, (place, extra) in enumerate(((folder / "first", []), (output, resumed)), 1):
        arguments = [str(file), *extra, f"output={place}"]
        trainer = Forked(TRAINER, *arguments, log=folder / "train.log", WANDB_MODE="offline")
        assert trainer.wait() == 0, trainer.log.read_text()
        wait_for(lambda ends=ends, place=place: len(wandb_ends(place)) == ends)
        if place != output:
            # a renamed run is still the same run
            place.rename(output)
    return Tracked(output, groups)


def show(chain: Trajectory, image: bytes) -> None:
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    chain.messages.append({"role": "tool", "content": [{"type": "image_url", "image_url": {"url": url}}]})


def wandb_records(output: Path) -> Iterator[Any]:
    """The records in wandb's offline files, oldest first, in the framing of a LevelDB log with blocks of 32 KiB. A
    separate process of wandb writes them."""
    for file in sorted(output.glob("wandb/offline-run-*/*.wandb")):
        data, place, record = file.read_bytes(), 7, b""
        assert b":W&B".startswith(data[:4])
        while place + 7 <= len(data):
            if (left := 32768 - place % 32768) < 7:
                place += left
                continue
            _, length, kind = struct.unpack("<IHB", data[place : place + 7])
            if place + 7 + length > len(data):
                break
            record += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):
                yield wandb_internal_pb2.Record.FromString(record)
                record = b""


def wandb_ends(output: Path) -> list[int]:
    """The exit status of each attempt, which is its last record."""
    return [record.exit.exit_code for record in wandb_records(output) if record.HasField("exit")]


def wandb_rows(output: Path) -> list[dict[str, Any]]:
    histories = [record.history.item for record in wandb_records(output) if record.HasField("history")]
    return [{"/".join([i.key, *i.nested_key]).strip("/"): json.loads(i.value_json) for i in row} for row in histories]


def wandb_series(run: Tracked, storage: Any) -> Series:
    rows = wandb_rows(run.output)
    return series((row["step"], row) for row in rows if "trajectories/path" not in row)


def trackio_series(run: Tracked, storage: Any) -> Series:
    rows = storage.get_logs("agentfactory", run.tracker_name)
    return series((row["step"], row) for row in rows if "trajectories" not in row)


def tensorboard_series(run: Tracked, storage: Any) -> Series:
    read = EventAccumulator(str(run.output / "tensorboard" / "agentfactory"))
    read.Reload()
    found: Series = {}
    for name in read.Tags()["scalars"]:
        events = read.Scalars(name)
        found[name] = {event.step: event.value for event in events}
        assert len(found[name]) == len(events), "what was trained again is left out"
    return found


def series(rows: Iterator[tuple[int, dict[str, Any]]]) -> Series:
    found: Series = {}
    for step, row in rows:
        for name, value in row.items():
            found.setdefault(name, {})[step] = value
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    "read",
    [tensorboard_series, *(pytest.param(read, marks=pytest.mark.extended) for read in (wandb_series, trackio_series))],
)
def test_trackers_hold_metrics(tracked: Tracked, trackio_storage: Any, read: Callable[[Tracked, Any], Series]) -> None:
    expected = series((line["step"], {k: v for k, v in line.items() if k != "step"}) for line in tracked.lines)
    assert [line["step"] for line in tracked.lines] == [1, 2, 3, 4]
    assert {"loss", "reward", "grad_norm", "mismatch/kl", "seconds/step"} <= expected.keys()
    found = read(tracked, trackio_storage)
    # and of its own at most marks of time
    assert {name for name in found.keys() - expected.keys() if not name.startswith("_")} <= {"step", "timestamp"}
    if read is tensorboard_series:
        # of its numbers, which are float32
        expected = {name: {s: float(np.float32(v)) for s, v in values.items()} for name, values in expected.items()}
    assert {name: found.get(name) for name in expected} == expected


def test_a_resumed_run_is_one_run(tracked: Tracked, trackio_storage: Any) -> None:
    runs = {record.run.run_id for record in wandb_records(tracked.output) if record.HasField("run")}
    assert runs == {json.loads((tracked.output / "tracking.json").read_text())["key"]}
    assert trackio_storage.get_runs("agentfactory") == [tracked.tracker_name]
    assert tracked.tracker_name == f"first-{runs.pop()}"


def test_tables_hold_chains_and_their_images(tracked: Tracked, trackio_storage: Any) -> None:
    step = tracked.groups[:BATCH]
    expected = [[chain.id, chain.reward, conversation(chain.messages)] for _, chain in chosen(step, 4)]
    assert len(expected) == 4
    places = [COLUMNS.index(name) for name in ("chain", "reward", "conversation")]

    rows = [row for row in wandb_rows(tracked.output) if "trajectories/path" in row]
    # the third is of both attempts
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4]
    (file,) = tracked.output.glob(f"wandb/*/files/{rows[0]['trajectories/path']}")
    table = json.loads(file.read_text())
    assert table["columns"] == [*COLUMNS, "image_1"]
    assert [[row[place] for place in places] for row in table["data"]] == expected
    # what goes up with the table
    (file,) = [
        entry.local_path
        for record in wandb_records(tracked.output)
        if record.HasField("artifact")
        for entry in record.artifact.manifest.contents
        if entry.path.startswith("media/images/")
    ]
    assert Image.open(file).getpixel((0, 0)) == (255, 0, 0)

    logs = [row for row in trackio_storage.get_logs("agentfactory", tracked.tracker_name) if "trajectories" in row]
    first = logs[0]["trajectories"]["_value"]
    assert [[row[COLUMNS[place]] for place in places] for row in first] == expected
    (image,) = [row["image_1"]["file_path"] for row in first if row["image_1"]]
    media = importlib.import_module("trackio.utils").MEDIA_DIR
    assert Image.open(media / image).convert("RGB").getpixel((0, 0)) == (255, 0, 0)


def test_credit_is_what_the_trainer_used(tracked: Tracked) -> None:
    """A line per group, in order, although a step was trained twice; log-probabilities match independent code."""
    assert [line["group"] for line in tracked.credit] == [group.id for group in tracked.groups]
    assert [line["step"] for line in tracked.credit] == [1, 1, 2, 2, 3, 3, 4, 4]
    recipe = load_and_check(tracked.output / "recipe.yaml")
    policy = load_policy(recipe, "cpu")
    for line, group in zip(tracked.credit[:BATCH], tracked.groups, strict=False):
        rewards = torch.tensor([chain.reward for chain in group.trajectories])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for chain, advantage in zip(group.trajectories, advantages.tolist(), strict=True):
            for credited in line["chains"][chain.id]:
                row = chain.rows[credited["row"]]
                targets = torch.tensor(credited["targets"])
                assert targets.tolist() == [place for place, trained in enumerate(row.mask) if trained]
                assert credited["advantage"] == pytest.approx([advantage] * len(targets), abs=1e-3)
                ids = torch.tensor([row.token_ids.tolist()])
                with torch.no_grad():
                    logprobs = policy.network(ids).logits[0].log_softmax(-1)[targets - 1, ids[0, targets]]
                assert credited["proximal"] == pytest.approx(logprobs.tolist(), abs=1e-4)


def test_a_tracker_that_does_not_start_says_why(accelerator: Accelerator, tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(ValueError, match=r"tensorboard does not start: .*Not a directory.*fix: make .* writable"):
        Tracking(TrackConfig(trackers=["tensorboard"]), "run", tmp_path, {})


def test_what_a_tracker_does_not_take_does_not_end_the_run(
    accelerator: Accelerator,
    trackio_storage: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRACKIO_PROJECT", "faults")
    chain = Trajectory("c", [], [], Outcome.COMPLETED, reward=1.0)
    show(chain, b"no picture")
    # a key in the recipe is only for this machine
    server = {
        "env": {"KEY": "s3cret", "OTHER": "${OTHER}", "LOGIN": "${USER}:s3cret"},
        "headers": {"Authorization": "Bearer s3cret"},
        "url": "https://me:s3cret@tools.org:8443/mcp?key=s3cret",
    }
    recipe = {"mcp_servers": {"one": server, "two": {"url": "http://[${HOST}]/mcp"}}}
    with Tracking(TrackConfig(trackers=["trackio"]), "run", tmp_path, recipe) as tracking:
        with caplog.at_level(logging.WARNING):
            tracking.note_groups(1, [Group("g", {}, [chain])])
        tracking.log({"step": 1, "loss": 0.5})
    assert "trackio did not accept a record, which metrics.jsonl has: the image is damaged" in caplog.text
    (name,) = trackio_storage.get_runs("faults")
    assert [row["loss"] for row in trackio_storage.get_logs("faults", name)] == [0.5]
    config = json.dumps(trackio_storage.get_run_config("faults", name))
    assert "s3cret" not in config
    assert "${OTHER}" in config
    assert "https://tools.org:8443/mcp?(not shown)" in config


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    """An accelerator, from which accelerate's trackers get the process index."""
    return Accelerator(cpu=True)
