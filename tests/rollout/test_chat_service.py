"""`serve --chat`: clients get the completions they request, and every turn is logged to the token."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, AuthenticationError

from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.gateway.serve_chat import serve_chat
from tests.chat_tokenizers import make_tokenizer, trl_template
from tests.scripted_server import serve_script

# the SDK looks at the machine by `uname`
pytestmark = pytest.mark.processes


def model_in(folder: Path) -> tuple[Any, dict[str, str]]:
    tokenizer = make_tokenizer(trl_template("qwen2_5"))
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text("{}")
    return tokenizer, {"path": str(folder / "model")}


async def test_conversations_are_logged_to_the_token(tmp_path: Path) -> None:
    tokenizer, model = model_in(tmp_path)
    # ids that a tokenizer would not choose: a history that is tokenised again would differ
    ids = [*(i for letter in "Yes. No." for i in tokenizer.encode(letter, add_special_tokens=False))]
    ids.append(tokenizer.eos_token_id)
    recipe = RolloutRecipe.model_validate({"model": model, "rollout": {"max_turns": 1}})
    log = tmp_path / "turns.jsonl"
    async with serve_script(lambda _: ids) as server, serve_chat(recipe, server.url, "policy", log) as endpoint:
        client = AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0)
        messages = [{"role": "user", "content": "a"}]
        for turn in range(3):
            greedy = {"temperature": 0, "seed": 1234} if turn else {}
            answer = await client.chat.completions.create(model="m", messages=messages, stop=["No"], **greedy)
            assert answer.choices[0].message.content == "Yes. "
            messages += [answer.choices[0].message, {"role": "user", "content": f"b{turn}"}]
        again = await client.chat.completions.create(model="m", messages=messages[:1])
        assert again.choices[0].message.content == "Yes. No."
        with pytest.raises(AuthenticationError):
            await client.with_options(api_key="other").chat.completions.create(model="m", messages=messages)
    turns = [json.loads(line) for line in log.read_text().splitlines()]
    assert [turn["temperature"] for turn in turns] == [1.0, 0.0, 0.0, 1.0]
    assert [request["sampling_params"]["temperature"] for request in server.requests] == [1.0, 0.0, 0.0, 1.0]
    for turn, request in zip(turns, server.requests, strict=True):
        assert turn["prompt_ids"] == request["token_ids"]
        assert len(turn["logprobs"]) == len(turn["token_ids"])
    stopped = turns[0]["token_ids"]
    assert (stopped, tokenizer.decode(stopped)) == (ids[: len(stopped)], "Yes. No")
    for before, after in pairwise(turns[:3]):
        known = [*before["prompt_ids"], *before["token_ids"]]
        assert after["prompt_ids"][: len(known)] == known
    assert turns[3]["token_ids"] == ids
