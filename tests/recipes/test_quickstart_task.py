"""The quickstart's environment, tasks, transcripts, tokenizer and chat template."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import is_chat_template_prefix_preserving

from agentfactory.base.user_code.loading import load_object
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.text.tokenizer import load_tokenizer
from tests.project import load_and_check
from tests.recipes.chains import read_rows

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart"
TreasureHunt = load_object("treasure_hunt.py:TreasureHunt", QUICKSTART)
distance, opening = (load_object(f"treasure_hunt.py:{name}", QUICKSTART) for name in ("distance", "opening"))
prepare = load_object("prepare.py:prepare", QUICKSTART)


@pytest.fixture(scope="module")
def tokenizer(prepared: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(str(prepared / "model"))


def hunt(start: list[int], treasure: list[int]) -> TreasureHunt:
    environment = TreasureHunt()
    environment.reset(start=start, treasure=treasure, question="any")
    return environment


def test_the_way_to_the_treasure() -> None:
    environment = hunt([4, 4], [3, 6])
    assert opening((4, 4), (3, 6)) == "The treasure lies north-east.\nYou stand in row 4, column 4 and have 5 moves."
    assert environment.reward() == {"reward": 0.0, "success": 0.0}
    assert environment.move("north") == "The treasure lies east."
    assert environment.reward() == {"reward": pytest.approx(0.5 / 3), "success": 0.0}
    assert environment.move("east") == "The treasure lies east."
    assert environment.move("east") == "You found the treasure."
    assert environment.reward() == {"reward": 1.0, "success": 1.0}
    # a policy that does not stop there walks away from it
    assert environment.move("west") == "The treasure lies east."
    assert environment.reward() == {"reward": pytest.approx(0.5 * (1 - 1 / 3)), "success": 0.0}


@pytest.mark.slow
def test_heldout_openings_never_occur_in_training(prepared: Path) -> None:
    train, heldout = read_rows(prepared / "train.jsonl"), read_rows(prepared / "heldout.jsonl")
    transcripts = read_rows(prepared / "transcripts.jsonl")
    assert len(heldout) >= 200
    seen = {task["question"] for task in train} | {row["messages"][0]["content"] for row in transcripts}
    assert seen.isdisjoint(task["question"] for task in heldout)
    for task in train + heldout:
        assert task["question"] == opening(task["start"], task["treasure"])
        assert 2 <= distance(task["start"], task["treasure"]) <= 4


def test_transcripts_are_what_the_environment_says(prepared: Path) -> None:
    tasks = {}
    for task in read_rows(prepared / "train.jsonl"):
        tasks.setdefault(task["question"], []).append(task)
    for row in read_rows(prepared / "transcripts.jsonl")[:100]:
        question, *rest = row["messages"]
        calls = [message["tool_calls"][0]["function"] for message in rest if message.get("tool_calls")]
        said = [message["content"] for message in rest if "tool_call_id" in message]
        # an opening does not reveal the place: one of its hunts went this way
        replays = []
        for task in tasks[question["content"]]:
            environment = hunt(task["start"], task["treasure"])
            replays.append([environment.move(**call["arguments"]) for call in calls])
        assert said in replays
        assert rest[-1] == {"role": "assistant", "content": "The hunt is over."}


@pytest.mark.slow
def test_the_same_seed_prepares_the_same_files(prepared: Path, tmp_path: Path) -> None:
    for name, seed in (("again", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        prepare(tmp_path / name, seed)
    files = sorted(path.relative_to(prepared) for path in prepared.rglob("*") if path.is_file())
    assert [str(f) for f in files if f.suffix == ".jsonl"] == ["heldout.jsonl", "train.jsonl", "transcripts.jsonl"]
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (prepared / file).read_bytes(), file
    for file in ("train.jsonl", "heldout.jsonl", "transcripts.jsonl", "model/model.safetensors"):
        assert (tmp_path / "other" / file).read_bytes() != (prepared / file).read_bytes(), file


def test_the_template_is_standard_and_keeps_prefixes(prepared: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = load_renderer(load_and_check(QUICKSTART / "grpo.yaml", [f"model.path={prepared / 'model'}"]).model, "hermes")
    assert chat.info["template"] == "tokenizer"
    assert chat.info["choice"] == "append"
    assert is_chat_template_prefix_preserving(tokenizer)
    assert chat.stop_token_ids == [tokenizer.eos_token_id]
    specs = [TreasureHunt.move.spec]
    for row in read_rows(prepared / "transcripts.jsonl")[:20]:
        messages = row["messages"]
        ids = chat.open(messages[:1], specs)
        for index in range(1, len(messages), 2):
            text = tokenizer.apply_chat_template(messages[:index], tools=row["tools"], add_generation_prompt=True)
            assert ids == text["input_ids"]
            whole = tokenizer.apply_chat_template(messages[: index + 1], tools=row["tools"])["input_ids"]
            sampled = whole[len(ids) : whole.index(tokenizer.eos_token_id, len(ids)) + 1]
            parsed = chat.parse(sampled)
            assert [call.arguments for call in parsed.calls] == [
                call["function"]["arguments"] for call in messages[index].get("tool_calls", [])
            ]
            ids = ids + sampled
            if index + 1 < len(messages):
                ids += chat.extend(ids, messages[: index + 2], messages[index + 1 : index + 2], specs)
