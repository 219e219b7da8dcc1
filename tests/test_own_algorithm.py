"""Execute docs/add-an-algorithm.md and docs/add-a-sync-backend.md: an estimator, a policy loss, a source of rows and
backends in the user's own files."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from agentfactory.base.errors import SettingError
from agentfactory.rollout.config import DataConfig
from agentfactory.rollout.data import load_tasks
from agentfactory.trainers.config import AdvantageConfig, LossConfig
from agentfactory.trainers.loop.advantages import ChainRewards, Estimator
from agentfactory.trainers.update.losses import PolicyLoss
from tests.conftest import QUICKSTART, REPOSITORY
from tests.project import Command, load_and_check

pytestmark = pytest.mark.extended

PAGE = REPOSITORY / "docs" / "add-an-algorithm.md"


def steps_of_a_run(own: str, quickstart: Path, folder: Path, agentfactory: Command) -> list[dict[str, Any]]:
    """Train the quickstart's fine-tuned model with further sections of the recipe in the folder `run`; return the
    metrics of its steps."""
    (model,) = (quickstart / "sft" / "checkpoints").iterdir()
    rest = f"extends: {QUICKSTART / 'grpo.yaml'}\nprepare: null\nmodel: {{path: {model}}}\neval: {{data: null}}\n"
    (folder / "recipe.yaml").write_text(textwrap.dedent(own) + rest)
    agentfactory("train", "recipe.yaml", "output=run", status=0)
    return [line for line in map(json.loads, (folder / "run" / "metrics.jsonl").open()) if "loss" in line]


def write_page(page: Path, folder: Path) -> None:
    for block in page.read_text(encoding="utf-8").split("```python\n")[1:]:
        text = block.split("```")[0]
        (folder / text.partition("\n")[0].removeprefix("# ")).write_text(text)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_page(PAGE, tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def rewards(*of_group: float) -> list[ChainRewards]:
    return [ChainRewards(reward, [], [], [0.0, reward]) for reward in of_group]


def test_maxrl_is_the_advantage_over_the_mean(files: Path) -> None:
    config = AdvantageConfig(estimator="maxrl.py:maxrl", options={"least": 0.1})
    advantages, targets = Estimator(config)([rewards(1.0, 0.0, 0.0, 0.0), rewards(0.1, 0.1), rewards(1.0, 1.0)])
    assert advantages == [[3.0, 3.0], *[[-1.0, -1.0]] * 3, *[[0.0, 0.0]] * 4]
    assert targets == []


SCALED = """
from agentfactory.trainers.loop.advantages import grpo_advantages

def with_scale(rewards, scale="group"): return grpo_advantages(rewards, scale)
def without(rewards): return grpo_advantages(rewards, "none")
def of_groups(groups, scale): return [[float(len(scale))] * chain.tokens for group in groups for chain in group]
"""


@pytest.mark.parametrize("scale", ["group", "none"])
def test_an_estimator_that_takes_the_scale_is_treated_as_ours(files: Path, scale: str) -> None:
    (files / "scaled.py").write_text(SCALED)
    turns = [[0.0, 4.0], [2.0, 2.0]]
    group = [ChainRewards(float(n), turns[n], [1, 3], [0.0] * 3) for n in range(2)]

    def advantages(estimator: str, **options: str) -> list[list[float]]:
        return Estimator(AdvantageConfig.model_validate({"estimator": estimator, "options": options}))([group])[0]

    assert advantages("scaled.py:with_scale", scale=scale) == advantages("grpo", scale=scale)
    assert advantages("scaled.py:with_scale") == advantages("grpo")
    assert (advantages("scaled.py:without") == advantages("grpo", scale=scale)) is (scale == "none")
    assert advantages("scaled.py:of_groups", scale=scale) == [[float(len(scale))] * 3] * 2


def test_topr_holds_back_what_was_bad(files: Path) -> None:
    logprob = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-2.0, -2.0, 0.0], dtype=torch.float64)
    advantage = torch.tensor([2.0, -2.0, -2.0], dtype=torch.float64)
    terms, clipped = PolicyLoss(LossConfig(policy="topr.py:topr"))(
        logprob=logprob, behaviour=behaviour, advantage=advantage
    )
    (gradient,) = torch.autograd.grad(terms.sum(), logprob)
    assert gradient.tolist() == pytest.approx([-2.0, 2.0, 2.0 * torch.tensor(-1.0, dtype=torch.float64).exp().item()])
    assert clipped.tolist() == [False, True, False]


def test_rows_of_a_source(files: Path) -> None:
    config = DataConfig(source="sums.py:sums", options={"count": 30}, limit=20, columns={"solution": "answer"})
    tasks = load_tasks(config)
    assert len(tasks) == 20
    assert all({*task} == {"question", "solution"} for task in tasks)
    assert tasks == load_tasks(config)


OWN = """
import itertools
import numpy as np

def none(rewards): return None
def short(rewards): return [0.0]
def both(rewards, groups): return []
async def waits(rewards): return []
def per_chain(groups): return [0.0, 1.0]
def raises(rewards): return {}["zz"]
def nothing(scores): return []
def wants(rewards, power): return rewards

def detached(logprob): return logprob.detach()
def endless_loss(logprob): return logprob / 0.0

def endless():
    return ({"question": str(i)} for i in itertools.count())
def broken(): raise KeyError("path")
def array(): return [{"question": "a", "image": np.zeros(2)}]
def whole(): return "rows"
class Rows:
    def __init__(self, most=2): self.most = most
    def __iter__(self): return iter([{"question": "q", "answer": (1, 2)}] * self.most)
"""


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"estimator": "own.py:gone"}, "estimator: unknown: .* defines no gone; .*; fix: "),
        ({"estimator": "own.py:both"}, "takes both rewards and groups; fix: take groups alone"),
        ({"estimator": "own.py:waits"}, "is an async function; fix: name a plain function"),
        ({"estimator": "own.py:nothing"}, "takes none of rewards, batch_rewards, groups; fix: "),
        ({"estimator": "own.py:wants", "options": {"powr": 2}}, r"'power' without a value; fix: set .*options\.power"),
        ({"estimator": "own.py:short", "options": {"x": 2}}, r"options\.x: own.py:short has no such option; .* none"),
    ],
)
def test_a_function_that_does_not_fit_is_refused(files: Path, settings: dict[str, object], told: str) -> None:
    with pytest.raises(SettingError, match=told) as refused:
        Estimator(AdvantageConfig.model_validate(settings))
    assert refused.value.field.startswith("train.advantage.")


@pytest.mark.parametrize("name", ["short", "none", "per_chain"])
def test_a_result_of_another_shape_is_refused(files: Path, name: str) -> None:
    with pytest.raises(SettingError, match=rf"train\.advantage\.estimator: own\.py:{name} .*return"):
        Estimator(AdvantageConfig(estimator=f"own.py:{name}"))([rewards(0.0, 1.0)])


def test_what_a_function_raises_is_told_with_its_name(files: Path) -> None:
    line = next(number for number, text in enumerate(OWN.splitlines(), 1) if text.startswith("def raises("))
    with pytest.raises(SettingError, match=rf"own\.py:raises failed: KeyError: 'zz' \(own\.py, line {line}\)"):
        Estimator(AdvantageConfig(estimator="own.py:raises"))([rewards(0.0, 1.0)])


@pytest.mark.parametrize(("name", "told"), [("detached", "no gradient"), ("endless_loss", "not finite")])
def test_terms_that_teach_nothing_are_refused(files: Path, name: str, told: str) -> None:
    logprob = torch.zeros(3, requires_grad=True)
    with pytest.raises(SettingError, match=rf"train\.loss\.policy: .*own\.py:{name}.*{told}|{told}.*own\.py:{name}"):
        PolicyLoss(LossConfig(policy=f"own.py:{name}"))(logprob=logprob)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("broken", "own.py:broken failed: KeyError: 'path'"),
        ("array", "own.py:array returned non-JSON rows: .*ndarray"),
        ("whole", "own.py:whole returned 'rows'; fix: return or yield rows"),
    ],
)
def test_a_source_without_rows_is_refused(files: Path, name: str, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        load_tasks(DataConfig(source=f"own.py:{name}"))


def test_a_class_and_an_endless_generator_are_sources_too(files: Path) -> None:
    assert (
        load_tasks(DataConfig(source="own.py:Rows", options={"most": 3})) == [{"question": "q", "answer": [1, 2]}] * 3
    )
    assert len(load_tasks(DataConfig(source="own.py:endless", limit=5))) == 5


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("train.advantage.estimator=maxrl", r"estimator: got 'maxrl'; fix: use grpo, .*FILE\.py"),
        ("train.loss.policy=topr", r"policy: got 'topr'; fix: use clip, .*FILE\.py"),
        (
            "train.loss.policy=topr.py:topr train.loss.options.clip_low=0.1",
            "clip_low: .*topr.py:topr has no such option",
        ),
        (
            "train.advantage.estimator=maxrl.py:maxrl train.advantage.options.lest=0.05",
            "options.lest: .*maxrl.py:maxrl has no such option; fix: remove it; its options are least",
        ),
        ("data.source=sums.py:sums", "data: got path=.* and source=.*; fix: set one"),
        (
            "data.path=null data.source=sums.py:sums data.options.counts=3",
            r"data\.source: .* a parameter 'count' without a value; fix: set data\.options\.count",
        ),
    ],
)
def test_recipes_that_are_refused(files: Path, project: Path, overrides: str, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        load_and_check("recipe.yaml", overrides.split())


@pytest.mark.parametrize("algorithm", ["dapo", "gspo", "dr_grpo", "ppo"])
def test_an_algorithms_other_defaults_stay(files: Path, project: Path, algorithm: str) -> None:
    own = ["train.advantage.estimator=maxrl.py:maxrl", "train.loss.policy=topr.py:topr"]
    made, plain = (load_and_check("recipe.yaml", [f"train.algorithm={algorithm}", *more]) for more in (own, []))
    assert made.train.loss.options == {}
    assert made.train.loss.normaliser == plain.train.loss.normaliser
    assert (made.rollout.equal_rewards == "refill") is (algorithm == "dapo")
    assert load_and_check("recipe.yaml", ["train.advantage={estimator: grpo, options: null}"])


@pytest.mark.long
def test_a_run_by_the_pages_algorithm_on_rows_of_its_own(
    quickstart_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agentfactory: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    write_page(PAGE, tmp_path)
    (tmp_path / "hunts.py").write_text(
        textwrap.dedent(f"""
        import json

        def hunts(most):
            with open({str(quickstart_run / "prepared" / "train.jsonl")!r}) as lines:
                for line, _ in zip(lines, range(most)):
                    yield json.loads(line)
        """)
    )
    own = """
        data: {path: null, source: hunts.py:hunts, options: {most: 64}}
        train:
          steps: 3
          batch_size: 2
          advantage: {estimator: maxrl.py:maxrl, options: {least: 0.01}}
          loss: {policy: topr.py:topr, mismatch: {correction: none}}
        """
    steps = steps_of_a_run(own, quickstart_run, tmp_path, agentfactory)
    assert [line["step"] for line in steps] == [1, 2, 3]
    # each token's credit follows from the reward's own formula
    credited = {}
    for line in map(json.loads, (tmp_path / "run" / "trajectories" / "credit.jsonl").open()):
        credited[line["group"]] = {name: entries[0]["advantage"][0] for name, entries in line["chains"].items()}
    compared = 0
    for group in map(json.loads, (tmp_path / "run" / "trajectories" / "train.jsonl").open()):
        known = {t["id"]: t["reward"] for t in group["trajectories"] if t["reward"] is not None}
        mean = sum(known.values()) / max(len(known), 1)
        for name, advantage in credited.get(group["id"], {}).items():
            expected = (known[name] - mean) / mean if mean > 0.01 else 0.0
            if not next(t for t in group["trajectories"] if t["id"] == name).get("malformed_turns"):
                assert advantage == pytest.approx(expected, abs=1e-5)
                compared += 1
    assert compared > 20
    agentfactory("train", "recipe.yaml", "output=run", "--resume", "train.steps=4", status=0)
    other = agentfactory(
        "train", "recipe.yaml", "output=run", "--resume", "train.steps=5", "train.advantage.options.least=0.2"
    )
    assert other.returncode == 2
    assert "train.advantage.options.least: got 0.2, but " in other.stderr


# ---- docs/add-a-sync-backend.md


SYNC_PAGE = REPOSITORY / "docs" / "add-a-sync-backend.md"

OWN_BACKENDS = """
class Adapters:
    adapters, routes, transfer, engines = True, ("/v1/load_lora_adapter",), None, ("vllm",)
    def __init__(self, servers, speed): pass

class OneGpu:
    devices = "one"
    def __init__(self, servers): pass
"""
FAST = ["sync.backend=own.py:Adapters", "sync.options.speed=1"]


@pytest.fixture
def sync_files(project: Path) -> None:
    write_page(SYNC_PAGE, project)
    (project / "own.py").write_text(OWN_BACKENDS)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["sync.backend=rsync"], r"sync\.backend: got 'rsync'; fix: use auto, file, .*FILE\.py:NAME of a class"),
        (FAST, "but every weight is trained"),
        ([*FAST, "model.lora.rank=8"], r"own\.py:Adapters', which server\.engine=embedded does not support"),
        (["sync.backend=copied.py:Copied", "model.lora.rank=8", "sync.options={command: [a], target: b}"], "an adapt"),
        (["sync.backend=own.py:OneGpu", "server.engine=vllm", "placement.mode=separate"], "it is for one GPU"),
    ],
)
@pytest.mark.usefixtures("sync_files")
def test_backends_that_are_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(SettingError, match=told):
        load_and_check("recipe.yaml", overrides, lacks=[])


@pytest.mark.processes
@pytest.mark.parametrize(
    "sync",
    [
        pytest.param("{backend: ram_disk.py:RamDisk, options: {where: FOLDER}}", id="RamDisk"),
        pytest.param(
            "{backend: copied.py:Copied, options: {command: [cp], target: FOLDER/policy.safetensors}}",
            id="Copied",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_run_by_the_pages_backend(
    sync: str, quickstart_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agentfactory: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    write_page(SYNC_PAGE, tmp_path)
    (tmp_path / "place").mkdir()
    own = f"""
        data: {{path: {quickstart_run / "prepared" / "train.jsonl"}}}
        sync: {sync.replace("FOLDER", str(tmp_path / "place"))}
        train: {{steps: 2, batch_size: 2, warmup_steps: 0}}
        """
    steps = steps_of_a_run(own, quickstart_run, tmp_path, agentfactory)
    assert [line["sync/canary_slope"] == pytest.approx(1.0, abs=1e-3) for line in steps] == [True, True]
    assert all(line["sync/bytes"] > 1e5 for line in steps)
    left = [path.name for path in (tmp_path / "place").iterdir()]
    assert left == ([] if "RamDisk" in sync else ["policy.safetensors"])
