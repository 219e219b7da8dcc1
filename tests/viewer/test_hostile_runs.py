"""Run folders that somebody else has filled: nothing outside is opened, nothing hangs, nothing fills the memory."""

import json
import os
import resource
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from agentfactory.launching.run_folder import RunFolder
from agentfactory.rollout.images.store import ImageStore, url_of
from agentfactory.rollout.trajectory import Group
from agentfactory.trainers.checkpoints.checkpoint_folder import INFO, checkpoint_path
from agentfactory.viewer.html_export import export
from agentfactory.viewer.runs import growing_file
from tests.saved_groups import write_groups
from tests.viewer.browsing import asking, chain_page, view
from tests.viewer.viewer_runs import BEST, chain, credit, credited, tokenizer

SECRET = "of-another-user-7731"
_SECONDS = 30
"""Time after which an attack has made the viewer hang."""
_FILES = [
    *("metrics.jsonl", "summary.json", "trajectories/train.jsonl", "trajectories/train.arrays"),
    *("trajectories/credit.jsonl", "trajectories/eval/000040-sampled.jsonl", "images/{digest:.2}/{digest}.png"),
    *("checkpoints/step-000010/trainer_state.json", "checkpoints/step-000010/tokenizer.json"),
    *("stage/metrics.jsonl", "stage/summary.json"),
]
_KINDS = ("link", "loop", "fifo", "device", "socket", "folder", "sparse")
_FOLDERS = [
    *("trajectories", "trajectories/eval", "images", "images/{digest:.2}", "checkpoints", "checkpoints/step-000010"),
    *("stage", "stage/trajectories"),
]


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise TimeoutError("the viewer hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def full_run(folder: Path, secret: str) -> tuple[RunFolder, str]:
    """A run with every file that the viewer reads, each with a secret in it; also the digest of its image."""
    ids = tokenizer()
    run = RunFolder.create(folder, f"name: mine\ntrain: {{keep_best: {BEST}}}\nstages: [{{name: stage}}]\n")
    stage = RunFolder.create(folder / "stage", f"name: {secret}\n")
    for part in (run, stage):
        part.log({"step": 1, f"x/{secret}": 1.0})
        part.write_summary({"status": "completed", "said": secret})
    digest = ImageStore(run.images).put(Image.new("RGB", (8, 8), (7, 3, 1)))
    seen = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of(digest)}}]}]
    groups = [credited(ids), Group("seen", {"question": secret}, [chain("seen.0", seen, [], error=secret)], 1)]
    write_groups(run.trajectories / "train.jsonl", groups)
    run.note_credit([json.dumps(credit(groups[0]))])
    (run.trajectories / "eval").mkdir()
    for file in (run.trajectories / "eval" / "000040-sampled.jsonl", stage.trajectories / "rollout.jsonl"):
        write_groups(file, groups[1:])
    checkpoint = checkpoint_path(run.checkpoints, 10)
    checkpoint.mkdir()
    (checkpoint / INFO).write_text(json.dumps({"step": 10, "metrics": {BEST: 0.5}, "said": secret}))
    ids.save(str(checkpoint / "tokenizer.json"))
    return run, digest


def trained(client: TestClient) -> list[dict[str, Any]]:
    rows = client.get("/api/trajectories", params={"size": 200}).json()["rows"]
    return [row for row in rows if row["file"] == "train.jsonl"]


def all_answers(client: TestClient) -> Iterator[str]:
    """Everything that a page can ask for, with every image."""
    state = client.get("/api/state").json()
    yield json.dumps(state)
    for run in state["runs"]:
        for path in ("/api/metrics", "/api/run"):
            yield client.get(path, params={"run": run["id"]}).text
    yield client.get("/api/charts").text
    for listed in client.get("/api/trajectories", params={"text": "e"}).json()["rows"]:
        place = {name: listed[name] for name in ("run", "file", "byte")} | {"place": 0}
        yield client.get("/api/trajectory", params=place).text
        yield client.get("/api/image", params={**place, "message": 0, "part": 0}).content.decode("latin-1")


def attacked(place: Path, kind: str, outside: Path) -> None:
    """Put something hostile at a place of a run; `outside` is the same place of another user's run."""
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()
    if kind == "link":
        place.symlink_to(outside)
    elif kind == "loop":
        place.symlink_to(place)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    elif kind == "socket":
        # the path of a socket has to be short
        with socket.socket(socket.AF_UNIX) as made:
            here = os.open(place.parent, os.O_RDONLY)
            made.bind(f"/proc/self/fd/{here}/{place.name}")
            os.close(here)
    elif kind == "folder":
        place.mkdir()
    else:
        place.touch()
        os.truncate(place, 60 << 30)


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        *(("metrics.jsonl", kind) for kind in _KINDS),
        *((where, "link") for where in (*_FILES[1:], *_FOLDERS)),
        *((where, "sparse") for where in _FILES[1:4]),
    ],
)
def test_nothing_outside_of_a_run_is_shown_and_what_is_refused_is_told(
    where: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where != "metrics.jsonl":
        # one line of the full length is enough
        monkeypatch.setattr(growing_file, "LINE_BYTES", 1 << 20)
    other, digest = full_run(tmp_path / "other", SECRET)
    run, _ = full_run(tmp_path / "run", "mine")
    name = where.format(digest=digest)
    attacked(run.path / name, kind, other.path / name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    follower, client = asking(run.path)
    shown = [*all_answers(client)]
    said = export([run.path], tmp_path / "page.html")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "kB"
    problems = str([shown.problems for shown in follower.runs])
    assert SECRET not in (tmp_path / "page.html").read_text() + "".join(shown)
    assert str(tmp_path) not in problems
    told = problems + "".join(shown)
    reason = {"link": "a link, which is not followed", "loop": "a link", "device": "a link", "fifo": "a FIFO"}
    reason |= {"socket": "a socket", "folder": "a folder", "sparse": "more than"}
    if name.endswith(".arrays") and kind == "sparse":
        reason["sparse"] = "its arrays are damaged"
    assert reason[kind] in told
    assert name.removeprefix("stage/") in told or "images" in name or name.endswith(".arrays")
    assert "1 run" in said or "2 runs" in said


_VALUES = "more than 100,000 values with aliases resolved"
_UNUSABLE: dict[str, str] = {
    "[" * 100_000: "more than 64 levels deep",
    "".join(f"{' ' * depth}a:\n" for depth in range(100)): "more than 64 levels deep",
    "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 9)): _VALUES,
    "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1}, ' * 9}]}}\n" for n in range(1, 9)): _VALUES,
    "a: &a [*a]": "a value contains itself",
    "a: 1" + ":1" * 250_000: "a number of 500,001 characters",
}


@pytest.mark.parametrize("text", [*_UNUSABLE], ids=range(len(_UNUSABLE)))
def test_a_recipe_that_would_take_all_memory_or_time_ends_view_with_an_error(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.create(tmp_path / "run", text)
    assert view((str(run.path), "--export", str(tmp_path / "page.html"))) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"agentfactory: {run.recipe} cannot be read: {_UNUSABLE[text]}")
    assert told.endswith("; fix: put back the recipe that the run has written\n")


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_recipe_that_is_no_file_is_an_error(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder.create(tmp_path / "run", "name: mine\n")
    private = tmp_path / "private"
    private.write_text(SECRET)
    attacked(run.recipe, kind, private)
    assert view((str(run.path), "--export", str(tmp_path / "page.html"))) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"agentfactory: {run.recipe} ")
    assert "; fix: " in told
    assert SECRET not in told


@pytest.mark.parametrize(
    "text", ['{"a": ' * 100_000, "[" * 1_000_000, "\xff\xfe", '{"step": 1' + "0" * 5000 + "}", "{}" * 9]
)
def test_json_that_nobody_writes_costs_only_itself(text: str, tmp_path: Path) -> None:
    run, _ = full_run(tmp_path / "run", "mine")
    content = text.encode("latin-1")
    for file in (run.metrics, run.credit, run.trajectories / "train.jsonl"):
        file.write_bytes(content + b"\n" + file.read_bytes())
    checkpoint = run.checkpoints / "step-000010"
    for file in (run.summary, checkpoint / INFO, checkpoint / "tokenizer.json"):
        file.write_bytes(content)
    follower, client = asking(run.path)
    assert all(all_answers(client))
    (whole, _) = follower.runs
    assert (len(whole.lines), len(whole.credit), follower.index.counts()[whole.id]) == (1, 1, 4)
    lines = [f"{name}.jsonl, byte 0" for name in ("metrics", "credit", "train")]
    for name in (*lines, "summary.json", "tokenizer.json"):
        assert name in str(whole.problems)


_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
_PIXEL = {"role": "user", "content": [_IMAGE]}


def _said(*messages: Any, **chain: Any) -> str:
    chain = {"id": "odd", "messages": messages, "rows": [], "outcome": "completed", **chain}
    return json.dumps({"id": "odd", "task": {}, "trajectories": [chain], "version": 1})


def _row(**row: Any) -> str:
    streams = {"token_ids": [1, 2, 3], "mask": [0, 1, 1], "logprobs": [0, -1.0, -1.0], "versions": []}
    return _said({"role": "user", "content": "x"}, rows=[streams | row])


def _called(arguments: Any, call_id: Any = "1") -> str:
    call = {"id": call_id, "function": {"name": "click", "arguments": arguments}}
    return _said(_PIXEL, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "x"})


_ODD = [
    *(_row(token_ids=[-1, 2, 3]), _row(token_ids=[2**40, 2, 3]), _row(mask=[1]), _row(mask="x"), _row(versions=["x"])),
    *(_row(versions=[{"version": "1", "start": "a", "end": []}]), _row(turn_ends="x"), _row(logprobs=None)),
    _row(versions=[{"version": "1", "start": -5, "end": 2**50}]),
    *(_said({"role": "user", "content": ["a", 5, None]}), _said({"role": "user", "content": {"a": 1}})),
    *(_said({"role": {"a": 1}, "content": 10**400}), _said({"role": "user", "content": [{"type": []}]})),
    _said({"role": "user", "content": [{"type": "image_url", "image_url": "here"}]}),
    *(_said(turns="1.5"), _said(turns=10**400), _said(timeline=[{"activity": "model", "start": 0, "end": 10**400}])),
    *(_said(turn_rewards="x"), _said(workspaces=5), _said(metrics=[]), _said(reward="inf")),
    *(_called({"bbox_2d": [0, 0, 10**400, 1]}), _called({"x": 10**400, "y": 1}), _called({"x": 1, "y": 1}, ["1"])),
]


_CREDIT = [[], None, {"c0": ["x"]}, {"c0": 5}, {"c0": [{"row": -9, "targets": [1], "advantage": [5]}]}]


def test_chains_and_credit_that_no_run_saves_cost_only_themselves(tmp_path: Path) -> None:
    run, _ = full_run(tmp_path / "run", "mine")
    for chains in _CREDIT:
        run.credit.write_text(json.dumps({"group": "credited", "step": 4, "chains": chains}) + "\n")
        assert all(all_answers(asking(run.path)[1]))
    file = run.trajectories / "train.jsonl"
    file.write_text("".join(f"{line}\n" for line in _ODD) + file.read_text())
    assert view((str(run.path), "--export", str(tmp_path / "page.html"))) == 0
    assert "the tower" in (tmp_path / "page.html").read_text()
    follower, client = asking(run.path)
    assert all(all_answers(client))
    rows = [row for row in trained(client) if row["chain"] == "odd"]
    refused = [one for one in follower.runs[0].problems if "not a saved group" in one]
    assert len(rows) + len(refused) == len(_ODD)
    for row in rows:
        assert "it cannot be shown" in chain_page(client, row).get("error", "it cannot be shown")


_OFTEN = [{"type": "Replace", "pattern": {"String": "o"}, "content": "oo"}] * 40
_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
_PAD = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x", "pad_to_multiple_of": None}


@pytest.mark.parametrize(
    "parts",
    [
        # this one ends a process that encodes a single text
        {"padding": {"strategy": {"Fixed": 2_000_000_000}, **_PAD}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a"}, "content": "a" * 10**7}},
        {"decoder": {"type": "Sequence", "decoders": _OFTEN}},
        {"decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 1}},
        {"decoder": {"type": "Replace", "pattern": {"Regex": "(o+)+$x|(o*)*y"}, "content": "b"}},
        {"added_tokens": [{"id": 0, "content": "e" * 10**6, **_FLAGS}]},
        {"truncation": {"max_length": 0, "stride": 5, "strategy": "LongestFirst", "direction": "Right"}},
    ],
    ids=lambda parts: next(iter(parts)),
)
def test_what_a_tokenizer_would_add_to_texts_takes_no_memory(parts: dict[str, Any], tmp_path: Path) -> None:
    run, _ = full_run(tmp_path / "run", "mine")
    file = run.checkpoints / "step-000010" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    follower, client = asking(run.path)
    shown = chain_page(client, trained(client)[0])["tokenizer"]
    told = str([shown.problems for shown in follower.runs])
    assert shown is not any(name in parts for name in ("decoder", "added_tokens"))
    assert ("tokenizer.json is not a tokenizer: it" in told) is not shown
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18, "kB"


@pytest.mark.parametrize("name", ["metrics.jsonl", "trajectories/train.jsonl"])
def test_a_line_of_very_many_values_is_left_out(name: str, tmp_path: Path) -> None:
    run, _ = full_run(tmp_path / "run", "mine")
    file = run.path / name
    file.write_text('{"x": [' + "[]," * (5 << 20) + "[]]}\n" + file.read_text())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    follower, _ = asking(run.path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18, "kB"
    assert f"{name}, byte 0: " in str(follower.runs[0].problems)
    assert "values" in str(follower.runs[0].problems)


def test_a_stage_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    run, _ = full_run(tmp_path / "run", "mine")
    (run.path / "stage").rename(run.path / "\x1b[31mstage")
    follower, _ = asking(run.path)
    assert [shown.label for shown in follower.runs] == ["run", "run/\\x1b[31mstage"]


def test_an_export_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    run, _ = full_run(tmp_path / "run", "mine")
    shutil.rmtree(run.checkpoints / "step-000010")
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("[]")
    run.recipe.write_text(f"name: x\nmodel: {{path: {model}}}\n")
    with (run.trajectories / "train.jsonl").open("a") as file:
        file.write(_said({"role": "user", "content": "x"}, workspaces=[str(tmp_path / "kept")]) + "\n")
    export([run.path], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "tokenizer.json is not a tokenizer" in page
    assert str(tmp_path) not in page


def test_a_file_that_is_replaced_while_it_is_read_leads_nowhere(tmp_path: Path) -> None:
    run, _ = full_run(tmp_path / "run", "mine")
    other, _ = full_run(tmp_path / "other", SECRET)
    ended = threading.Event()

    def swap() -> None:
        aside, links = run.path / "aside", [run.path / name for name in ("to-recipe", "to-metrics", "to-folder")]
        targets = (run.recipe, run.metrics, run.trajectories)
        aside.mkdir()
        for target in targets:
            (shutil.copytree if target.is_dir() else shutil.copy)(target, aside / target.name)
        while not ended.is_set():
            for target, link in zip(targets, links, strict=True):
                link.symlink_to(other.path / target.name)
                if target.is_dir():
                    target.rename(aside / "was")
                    link.rename(target)
                    target.unlink()
                    (aside / "was").rename(target)
                else:
                    link.rename(target)
                    shutil.copy(aside / target.name, link)
                    link.rename(target)

    follower, client = asking(run.path)
    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        reads = refusals = 0
        while not (reads and refusals):
            follower.read_some()
            shown = "".join(all_answers(client))
            assert SECRET not in shown
            reads += '"recipe":"name: mine' in shown
            refusals += "is a link, which is not followed" in shown
    finally:
        ended.set()
        swapping.join()


def test_a_model_that_another_users_recipe_names_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = full_run(tmp_path / "run", "mine")
    shutil.rmtree(run.checkpoints / "step-000010")
    model = tmp_path / "model"
    model.mkdir()
    tokenizer().save(str(model / "tokenizer.json"))
    for owner, is_read in ((os.geteuid(), True), (os.geteuid() + 1, False)):
        run.recipe.write_text(f"name: {owner}\nmodel: {{path: {model}}}\n")
        monkeypatch.setattr(os, "geteuid", lambda owner=owner: owner)
        follower, client = asking(run.path)
        assert chain_page(client, trained(client)[0])["tokenizer"] is is_read
        told = str([problem for shown in follower.runs for problem in shown.problems])
        assert ("the recipe is another user's" in told) is not is_read
    # nor is a FIFO in the folder that one's own recipe names
    monkeypatch.undo()
    (model / "tokenizer.json").unlink()
    os.mkfifo(model / "tokenizer.json")
    follower, client = asking(run.path)
    assert chain_page(client, trained(client)[0])["tokenizer"] is False
    assert "tokenizer.json is a FIFO" in str([shown.problems for shown in follower.runs])
