"""A chat endpoint in the policy's place: the same tools, rewards and limits, whatever it answers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agentfactory.rollout.chains.chat_endpoint import ChatEndpointError, look_at
from agentfactory.rollout.chains.endpoint_chain import open_chat_runner
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.evaluation.evaluate import open_sources, run_eval
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.images.parts import image_urls
from agentfactory.rollout.inference.http_transport import ServerUnreachableError
from agentfactory.rollout.sources import load_all, open_all
from agentfactory.rollout.trajectory import Outcome, Trajectory
from tests.chat_server import Answer, model_behind, said, serve_chat
from tests.conftest import QUICKSTART
from tests.vision_models import make_vision_model

TOOLS = '''
from agentfactory import Environment, reward, tool


class Shelf(Environment):
    """Counts what is put on it."""

    def reset(self, **task):
        self.things = []

    @tool
    def put(self, thing: str, count: int = 1) -> str:
        """Put things on the shelf."""
        self.things += [thing] * count
        return " ".join(self.things)

    def reward(self):
        return {"reward": len(self.things), "success": float(len(self.things) == 3)}
'''


def recipe(folder: Path, **sections: Any) -> RolloutRecipe:
    (folder / "shelf.py").write_text(TOOLS)
    (folder / "tasks.jsonl").write_text('{"question": "fill it"}\n')
    given = {
        "model": {"path": "nobody/nothing"},
        "tools": ["shelf.py:Shelf"],
        "server": {"retry_seconds": 2},
        "eval": {"data": {"path": str(folder / "tasks.jsonl")}},
    }
    return RolloutRecipe.model_validate(given | sections)


async def play(recipe: RolloutRecipe, folder: Path, url: str, model: str | None = None) -> Trajectory:
    async with open_chat_runner(recipe, folder, url, model) as runner:
        return await runner.run("c0", {"question": "fill it"}, Sampling("", 0.5, seed=""))


async def played(folder: Path, *answers: Any, **sections: Any) -> Trajectory:
    """A chain whose requests get these answers."""
    with serve_chat(script(*answers)) as server:
        return await play(recipe(folder, **sections), folder, server.url)


def is_trial(request: dict[str, Any]) -> bool:
    return request["messages"] == [{"role": "user", "content": "Say hello."}]


def script(*answers: Any) -> Answer:
    left = [*answers]

    async def answer(request: dict[str, Any]) -> Any:
        if is_trial(request):
            return said("hello")
        return left.pop(0) if left else (418, "the script is over")

    return answer


def always(said: Any) -> Answer:
    async def answer(_: dict[str, Any]) -> Any:
        return said

    return answer


async def test_tools_rewards_and_mistakes(tmp_path: Path) -> None:
    answers = script(
        said("let me see", ("put", '{"thing": "book"}'), ("put", '{"thing": "cup"}'), tokens=7),
        said("", ("put", '{"thing": ')),
        said("", ("throw", "{}")),
        said("", ("put", '{"count": 2}')),
        # the same id as before: some endpoints number the calls of each turn
        said("", ("put", '{"thing": "pen"}')),
        {**said("done"), "message": {"role": "assistant", "content": "done", "reasoning_content": "three is enough"}},
    )
    with serve_chat(answers) as server:
        chain = await play(
            recipe(tmp_path, rollout={"system_prompt": "Be brief.", "max_tokens": 99}), tmp_path, server.url
        )
    assert (chain.outcome, chain.error, chain.reward, chain.turns) == (Outcome.COMPLETED, None, 3.0, 6)
    assert chain.metrics["success"] == 1.0
    assert chain.metrics["sampled_tokens"] == 7 + 5 * 5
    assert chain.metrics["tool_calls"] == 5
    for mistake in ("malformed_call", "unknown_tool", "invalid_arguments"):
        assert chain.metrics[f"tool_errors/{mistake}"] == 1, mistake
    assert chain.rows == []
    ids = [call["id"] for message in chain.messages for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids) == 5
    assert chain.messages[-1] == {"role": "assistant", "content": "done", "reasoning_content": "three is enough"}
    # every request passed the endpoint's own checks; the parameters were:
    trials, first = server.requests[:2], server.requests[2]
    assert [(is_trial(trial), trial["temperature"], trial["max_tokens"]) for trial in trials] == [
        (True, 1.0, 16),
        (True, 0.0, 16),
    ]
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "fill it"}]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("teacher", 0.5, 99)
    assert [tool["function"]["name"] for tool in first["tools"]] == ["put"]
    last = server.requests[-1]["messages"]
    assert [message["content"] for message in last if message["role"] == "tool"][:2] == ["book", "book cup"]
    assert "are not JSON" in next(m["content"] for m in last[3:] if m["role"] == "user")


async def test_a_text_format_is_told_and_read_as_text(tmp_path: Path) -> None:
    answers = script(
        said('<think>hm</think>Thought: put it\nAction: put\nAction Input: {"thing": "book"}'),
        said("Thought: done\nFinal Answer: three"),
    )
    with serve_chat(answers) as server:
        chain = await play(recipe(tmp_path, rollout={"parser": "react"}), tmp_path, server.url)
    assert (chain.outcome, chain.reward, chain.metrics["tool_calls"]) == (Outcome.COMPLETED, 1.0, 1.0)
    assert all("tools" not in request for request in server.requests)
    assert "put: Put things on the shelf." in server.requests[2]["messages"][0]["content"]
    assert "book" in server.requests[3]["messages"][-1]["content"]


@pytest.mark.slow
async def test_images_are_data_again_for_an_endpoint(tmp_path: Path) -> None:
    model = make_vision_model(tmp_path / "model")
    look = '\n@tool\ndef look():\n    """Look."""\n    from PIL import Image\n    return Image.new("RGB", (70, 70))\n'
    read = recipe(tmp_path, model={"path": str(model)}, tools=["shelf.py:look"], rewards=["shelf.py:one"])
    (tmp_path / "shelf.py").write_text(TOOLS + look + "\n@reward\ndef one():\n    return 1.0\n")
    with serve_chat(script(said("", ("look", "{}")), said("done"))) as server:
        async with open_chat_runner(read, tmp_path, server.url, images=tmp_path / "images") as runner:
            task = await runner.take({"question": "what?", "images": [Image.new("RGB", (64, 64), "red")]})
            chain = await runner.run("c0", task, Sampling("", 0.5, seed=""))
    assert chain.outcome is Outcome.COMPLETED, chain.error
    assert [url[:6] for url in image_urls(chain.messages)] == ["image:"] * 2
    last = server.requests[-1]["messages"]
    assert [m["role"] for m in last] == ["user", "assistant", "tool", "user"]
    assert [url[:22] for url in image_urls(last)] == ["data:image/png;base64,"] * 2
    assert last[2]["content"] == "[image: see below]"


async def test_limits_and_what_cannot_go_on_are_outcomes(tmp_path: Path) -> None:
    one = said("", ("put", '{"thing": "book"}'), tokens=30)

    end = partial(played, tmp_path)
    assert (await end(one, one, limits={"calls": 1}, rollout={"max_turns": 2})).metrics["limits/calls"] == 1
    assert (await end(one, rollout={"max_turns": 1})).outcome is Outcome.MAX_TURNS
    assert (await end(said("so", reason="length"))).outcome is Outcome.MAX_TOKENS
    # 20 tokens of prompt and 30 of the turn
    assert (await end(one, rollout={"max_total_tokens": 50})).outcome is Outcome.CONTEXT_OVERFLOW
    refused = await end((400, "This model's maximum context length is 64 tokens."))
    assert (refused.outcome, refused.reward) == (Outcome.CONTEXT_OVERFLOW, 0.0)
    failed = await end((422, "no"))
    assert (failed.outcome, failed.reward) == (Outcome.INFERENCE_ERROR, None)
    assert failed.error == 'the server answered 422: {"error": {"message": "no"}}'
    assert (await end({**said(""), "finish_reason": "content_filter"})).outcome is Outcome.INFERENCE_ERROR
    uncounted = {**said("so"), "usage": None}
    assert "sampled_tokens" not in (await end(uncounted)).metrics
    assert (await end((500, "busy"), (429, "slow down"), said("so"))).outcome is Outcome.COMPLETED, "tried again"


async def test_an_answer_that_is_none_ends_its_chain(tmp_path: Path) -> None:
    for broken in (
        {"usage": [1]},
        {"usage": {"completion_tokens": "5"}},
        {"message": "so"},
        {"message": {"content": 5}},
        {"message": {"content": "", "tool_calls": 5}},
    ):
        chain = await played(tmp_path, {**said("so"), **broken})
        assert chain.outcome is Outcome.INFERENCE_ERROR
        assert "the endpoint's answer is not a chat completion" in str(chain.error)


async def test_of_parts_the_text_is_taken(tmp_path: Path) -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "two"}]}
    parts = [thought, {"type": "text", "text": "th"}, {"type": "text", "text": "ree"}, {"type": "text"}, "four"]
    call = said("", ("put", '{"thing": "book"}'))
    call["message"]["content"] = parts
    refusal = {"role": "assistant", "content": None, "refusal": "I cannot help with that."}
    with serve_chat(script(call, {**said(""), "message": refusal})) as server:
        chain = await play(recipe(tmp_path), tmp_path, server.url)
    assert [m["content"] for m in chain.messages if m["role"] == "assistant"] == ["three", "I cannot help with that."]
    assert server.requests[-1]["messages"][1]["content"] == "three"


REFUSED = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
HOT = "Unsupported value: 'temperature' does not support {:g} with this model. Only the default (1) value is supported."
UNFINISHED = "Could not finish the message because max_tokens or model output limit was reached. Please try again."


def reasoning_model(*answers: Any) -> Answer:
    """An endpoint that refuses what OpenAI's reasoning models refuse, with their messages."""
    scripted = script(*answers)

    async def answer(request: dict[str, Any]) -> Any:
        if "max_tokens" in request:
            return 400, REFUSED
        if request.get("temperature", 1) != 1:
            return 400, HOT.format(request["temperature"])
        return (400, UNFINISHED) if request["max_completion_tokens"] < 100 else await scripted(request)

    return answer


async def test_models_that_reason(tmp_path: Path) -> None:
    told = r"support 0 .*; fix: use the model's default: eval\.request=\{temperature: null\} eval\.greedy=false"
    with serve_chat(reasoning_model()) as server, pytest.raises(ChatEndpointError, match=told):
        await play(recipe(tmp_path), tmp_path, server.url)
    own = {"data": {"path": str(tmp_path / "tasks.jsonl")}, "greedy": False, "request": {"temperature": None}}
    busy, model = iter([(429, "slow down")]), reasoning_model(said("so"))

    async def at_first_busy(request: dict[str, Any]) -> Any:
        return next(busy, None) or await model(request)

    # the name of the limit is found out by the trial request, or by the first one if the trial met a busy endpoint
    for endpoint in (reasoning_model(said("so")), at_first_busy):
        with serve_chat(endpoint) as server:
            chain = await play(recipe(tmp_path, eval=own, rollout={"max_tokens": 300}), tmp_path, server.url)
        assert (chain.outcome, server.requests[-1]["max_completion_tokens"]) == (Outcome.COMPLETED, 300)
        assert not {"max_tokens", "temperature"} & set(server.requests[-1])
    # a turn that reasons up to the limit is truncated, like any other turn
    with serve_chat(reasoning_model()) as server:
        chain = await play(recipe(tmp_path, eval=own, rollout={"max_tokens": 50}), tmp_path, server.url)
    assert (chain.outcome, chain.reward, chain.metrics["sampled_tokens"]) == (Outcome.MAX_TOKENS, 0.0, 50)


SPENT = (429, "You exceeded your current quota, please check your plan (code: insufficient_quota).")
NO_CHOICE = (400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')


@pytest.mark.parametrize(
    ("answer", "models", "told"),
    [
        (SPENT, None, r"429 .*; fix: buy more credit"),
        ((500, "tools param requires --jinja flag"), None, r"llama\.cpp with --jinja"),
        (NO_CHOICE, None, "--url: .* answered 400 .* vLLM with"),
        (NO_CHOICE, ({"id": "a"}, {"id": "b"}), "--model: .*lists a, b"),
    ],
)
async def test_what_would_fail_every_chain_is_told_at_once(tmp_path: Path, answer: Any, models: Any, told: str) -> None:
    listed = {} if models is None else {"models": models}
    with serve_chat(always(answer), **listed) as server, pytest.raises(ChatEndpointError, match=told):
        await play(recipe(tmp_path), tmp_path, server.url)
    assert len(server.requests) == (models is None)


async def test_an_endpoint_that_needs_a_key_or_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_chat(script(said("so")), key="k") as server:
        with pytest.raises(ChatEndpointError, match=r"401.*server\.api_key_env"):
            await play(recipe(tmp_path), tmp_path, server.url)
        with_key = recipe(tmp_path, server={"api_key_env": "TEACHERS_KEY", "retry_seconds": 2})
        monkeypatch.setenv("TEACHERS_KEY", "sk-other")
        with pytest.raises(ChatEndpointError, match=r"provided: Bearer \(the key\)"):
            await play(with_key, tmp_path, server.url, "teacher")
        monkeypatch.setenv("TEACHERS_KEY", "k")
        assert (await play(with_key, tmp_path, server.url, "teacher")).outcome is Outcome.COMPLETED
    with pytest.raises(ServerUnreachableError, match="no server answers"):
        await play(recipe(tmp_path), tmp_path, "http://127.0.0.1:9", "teacher")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"agent": "a.py:A"}}, r"rollout\.agent"),
        ({"rollout": {"assistant_prefix": "<think>"}}, r"rollout\.assistant_prefix"),
        ({"rollout": {"context": {"policy": "truncate"}}}, r"rollout\.context\.policy"),
        ({"rewards": [{"reward": "length", "options": {"longest": 9}}]}, r"rewards\.0"),
    ],
)
async def test_what_needs_token_ids_is_refused(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ChatEndpointError, match=said):
        await play(recipe(tmp_path, **sections), tmp_path, "http://127.0.0.1:9")


def test_the_same_model_gives_the_same_figures_by_messages_and_by_token_ids(
    quickstart_run: Path, warm_server: str, warm_start: Path, tmp_path: Path
) -> None:
    recipe = RolloutRecipe.model_validate(
        {
            "model": {"path": str(warm_start), "dtype": "float32"},
            "tools": [str(QUICKSTART / "treasure_hunt.py:TreasureHunt")],
            "rollout": {"max_turns": 8, "max_tokens": 32, "max_total_tokens": 512},
            "server": {"engine": "embedded"},
            "eval": {"data": {"path": str(quickstart_run / "prepared" / "heldout.jsonl"), "limit": 12}},
        }
    )
    loaded = load_all(recipe.held_out_parts())
    logged: list[dict[str, Any]] = []
    opened_ids = open_sources(recipe, loaded, QUICKSTART, warm_server)
    by_ids = run_eval(recipe, tmp_path / "ids", logged.append, opened_ids)
    assert [card["id"] for card in look_at(warm_server, None, None)] == ["policy"], "it takes token ids"
    with serve_chat(model_behind(warm_server, warm_start)) as server:
        assert look_at(server.url, None, None) == look_at(server.url + "/v1", None, None) == "teacher"
        opened = open_all(loaded, lambda part: open_chat_runner(part, QUICKSTART, server.url))
        by_messages = run_eval(recipe, tmp_path / "chat", logged.append, opened)
    greedy = {name: mean for name, mean in by_ids.means.items() if name.startswith("greedy/") and "seconds" not in name}
    assert greedy["greedy/tool_calls"] > 0
    no_rows = {"greedy/rows": 0.0, "greedy/row_tokens": 0.0}
    assert {name: by_messages.means[name] for name in greedy} == greedy | no_rows
    assert by_messages.means["sampled/failed"] == 0.0
    chains = [c for group in read_groups(tmp_path / "chat" / "final-greedy.jsonl") for c in group.trajectories]
    others = {c.id: c for group in read_groups(tmp_path / "ids" / "final-greedy.jsonl") for c in group.trajectories}
    assert len(chains) == 12
    for chain in chains:
        assert [m["content"] for m in chain.messages] == [m["content"] for m in others[chain.id].messages]
