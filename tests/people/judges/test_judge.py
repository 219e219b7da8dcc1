"""The reward `judge`: its request, its score, and its failures."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agentfactory.base.errors import SettingError
from agentfactory.rollout.images.parts import data_url, image_part, text_part
from agentfactory.rollout.images.store import ImageStore, url_of
from agentfactory.rollout.rewards import RewardError
from tests.people.judges.conftest import JudgeServer
from tests.rollout.test_reward_library import load, said, score

PROMPT = "Question: {question}\nAnswer: {prediction}\nRight: {answer}\nWrite Score: and a number from 0 to 10."


async def test_a_judge_is_asked_and_its_number_scaled(judge: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge.answer = lambda prompt: "<think>Score: 3?</think> **Score:** 7.5/10" if "{x}" in prompt else "Score: 0"
    options = {"url": judge.url, "model": "m", "prompt": PROMPT, "best": 10, "parameters": {"max_tokens": 5}}
    options |= {"api_key_env": "JUDGE_KEY", "system": "Be fair."}
    row = {"question": "2+2?", "answer": "4"}
    # the model's text is inserted unchanged
    assert (await score("judge", "four {x} {answer}", row, **options)).reward == 0.75
    assert (await score("judge", "five", row, **options)).reward == 0.0
    question = "Question: 2+2?\nAnswer: four {x} {answer}\nRight: 4\nWrite Score: and a number from 0 to 10."
    messages = [{"role": "system", "content": "Be fair."}, {"role": "user", "content": question}]
    assert judge.requests[0] == {"model": "m", "messages": messages, "max_tokens": 5}
    assert judge.authorizations == ["Bearer secret"] * 2


async def test_a_judge_that_sees_gets_the_images_where_they_stood(judge: JudgeServer, tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    digests = [store.put(Image.new("RGB", (32, 32), colour)) for colour in ("red", "blue")]
    first, second = (image_part(url_of(digest)) for digest in digests)
    chain = said("<image 0>", "red")
    chain.messages[0]["content"] = [first, text_part("what?")]
    chain.messages[2]["content"] = [text_part("here:"), second]
    options = {"url": judge.url, "model": "m", "prompt": "Say:\n{conversation}\nSo?"}
    async with load("judge", **options, images=True) as rewards:
        await rewards.score(chain, {"images": ["ours.png"]}, None, [str(store.path(digest)) for digest in digests])
    async with load("judge", **options) as rewards:
        await rewards.score(chain, {}, None, [])
    seeing, blind = (request["messages"][-1]["content"] for request in judge.requests)
    shown = [image_part(data_url(store.png(digest))) for digest in digests]
    told = ["Say:\nuser: ", "\nwhat?\n\nassistant: <image 0>\n\ntool: here:\n"]
    assert seeing[:4] == [text_part(told[0]), shown[0], text_part(told[1]), shown[1]]
    assert seeing[4]["text"].startswith("\n\nassistant: red")
    assert seeing[4]["text"].endswith("\nSo?")
    assert len(seeing) == 5
    assert blind.startswith("Say:\nuser: [image]\nwhat?\n\nassistant: <image 0>\n\ntool: here:\n[image]\n\n")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("I like it", "no number that matches"),
        ("Score: 11", "the judge gave 11, which is not between 0 and 10"),
        (401, "no verdict from .*status 401: not now; .*fix: options.api_key_env must name the variable"),
        (500, "no verdict from .*status 500"),
        ({"error": "overloaded"}, "no verdict from .*not a chat completion with a text: .*overloaded"),
        ({"choices": [{"message": {"content": None}}]}, "no verdict from .*not a chat completion"),
    ],
)
async def test_a_judge_without_a_verdict_is_an_error(judge: JudgeServer, answer: Any, message: str) -> None:
    judge.answer = lambda prompt: answer
    options = {"url": judge.url, "model": "m", "prompt": "{prediction}", "api_key_env": "PATH"}
    with pytest.raises(RewardError, match=f"judge: {message}"):
        await score("judge", "a", {}, **options, best=10, retries=1)
    assert len(judge.requests) == (1 if isinstance(answer, str) or answer == 401 else 2)


@pytest.mark.parametrize(
    ("changed", "option", "message"),
    [
        ({"url": "localhost:8000"}, "url", "not an address; start it with http:// or https://"),
        ({"url": "http://me:secret@host/v1"}, "url", "which errors would save; name a key by api_key_env"),
        ({"prompt": "{0}"}, "prompt", "not the name of a field; double literal braces"),
        ({"api_key_env": "NO_SUCH_KEY"}, "api_key_env", "got 'NO_SUCH_KEY': this environment variable is not set"),
        ({"best": float("inf")}, "", "best and worst are inf and 0; write two numbers"),
        ({"images": True}, "", r"images are sent in \{conversation\}, which the prompt lacks"),
    ],
)
def test_options_of_a_judge_that_cannot_work(changed: dict[str, Any], option: str, message: str) -> None:
    with pytest.raises(SettingError, match=message) as refused:
        load("judge", **{"url": "http://u", "model": "m", "prompt": "{prediction}", **changed})
    assert refused.value.field == f"rewards.0.options.{option}".rstrip(".")


def test_fields_of_a_prompt_are_looked_for_before_the_run() -> None:
    rewards = load("judge", url="http://u", model="m", prompt=PROMPT)
    rewards.check({"question": "q", "answer": "a"})
    with pytest.raises(SettingError, match=r"judge needs the field 'answer', which the data .* \(question\)"):
        rewards.check({"question": "q"})
    with pytest.raises(SettingError, match="'prediction' too"):
        rewards.check({"question": "q", "answer": "a", "prediction": "p"})
