"""Execute docs/add-a-sync-backend.md: backends in the user's own files."""

from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from tests.conftest import REPOSITORY
from tests.project import Command, load_and_check
from tests.test_own_algorithm import steps_of_a_run, write_page

pytestmark = [pytest.mark.processes, pytest.mark.extended]

PAGE = REPOSITORY / "docs" / "add-a-sync-backend.md"

OWN = """
class Adapters:
    adapters, routes, transfer, engines = True, ("/v1/load_lora_adapter",), None, ("vllm",)
    def __init__(self, servers, speed): pass

class OneGpu:
    devices = "one"
    def __init__(self, servers): pass
"""
FAST = ["sync.backend=own.py:Adapters", "sync.options.speed=1"]


@pytest.fixture
def files(project: Path) -> None:
    write_page(PAGE, project)
    (project / "own.py").write_text(OWN)


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
@pytest.mark.usefixtures("files")
def test_backends_that_are_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(SettingError, match=told):
        load_and_check("recipe.yaml", overrides, lacks=[])


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
    write_page(PAGE, tmp_path)
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
