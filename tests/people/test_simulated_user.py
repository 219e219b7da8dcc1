"""`rollout.user`: simulated users speak between the agent's turns, and none of their tokens is trained."""

import random
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.people.users.scripts import Scripts
from agentfactory.rollout.config import UserConfig
from agentfactory.rollout.trajectory import Outcome, StopReason
from tests.chat_server import said, serve_chat
from tests.scripted_chains import call, scripted_chains

USERS = '''
import asyncio, time
from agentfactory import finish


def buyer(name):
    """Begins, and leaves with a last word."""
    said = yield f"I am {name}."
    said = yield f"You said: {said}"
    yield finish("Bye.")


async def guest(question, word="please"):
    """Has said the question."""
    said = yield
    while "done" not in said:
        said = yield f"{question}, {word}"


async def noter(call, metrics):
    yield await call("note", text="of the user")
    metrics["calls_made"] += 1


def endless(steps):
    """Says the steps of the row."""
    yield None
    while steps:
        yield steps.pop(0)


def fault(kind, metrics):
    if kind in ("begins", "leaves"):
        yield "Hello" if kind == "begins" else finish("Bye.")
    yield None
    metrics |= {"names": {"a\\nb": 1}, "count": {"x": "many"}}.get(kind, {})
    if kind == "raises":
        raise OSError("no line")
    if kind == "slow":
        time.sleep(3)
    yield {"empty": " ", "long": "x" * (1 << 17), "number": 3, "nothing": None}.get(kind, "late")


def plain(question):
    return question


class Keen:
    def check(self, row):
        return row["absent"]

    def __call__(self):
        yield None

    def close(self):
        raise OSError("no close")


async def lingerer():
    yield
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.Event().wait()
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "users.py").write_text(USERS)
    return tmp_path


def rollout(name: str, **more: Any) -> dict[str, Any]:
    return {"user": {"name": f"users.py:{name}", **more}, "max_turns": 6, "max_total_tokens": 2048}


def spoken(chain: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in chain.messages]


async def test_a_user_begins_answers_and_leaves(folder: Path) -> None:
    async with scripted_chains(folder, ["Hello.", "Goodbye."], rollout=rollout("buyer")) as chains:
        chain = await chains.run(messages=[{"role": "system", "content": "Sell."}], name="Ada")
        chains.check(chain)
    said = [("user", "I am Ada."), ("assistant", "Hello."), ("user", "You said: Hello."), ("assistant", "Goodbye.")]
    assert spoken(chain)[-5:] == [*said, ("user", "Bye.")]
    assert (chain.outcome, chain.stop_reason, chain.turns) == (Outcome.COMPLETED, StopReason.USER_DONE, 2)
    assert [message.get("speaker") for message in chain.messages if message["role"] == "user"] == ["simulated"] * 3
    assert (chain.metrics["user/turns"], chain.metrics["user/calls"], len(chain.rows)) == (3, 0, 1)


async def test_a_user_has_said_the_question_and_answers_between_tool_calls(folder: Path) -> None:
    texts = ["What?", call("note", text="it"), "Again?", "done"]
    settings = rollout("guest", options={"word": "now"})
    async with scripted_chains(folder, texts, rollout=settings) as chains:
        chain = await chains.run(question="Help")
    words = ["Help", "What?", "Help, now", "", "noted it", "Again?", "Help, now", "done"]
    assert [content for role, content in spoken(chain) if role != "system"] == words
    assert (chain.stop_reason, chain.reward) == (StopReason.USER_DONE, 4)
    assert [stretch.turn for stretch in chain.timeline if stretch.activity == "user"] == [0, 1, 3, 4]


async def test_tools_of_the_user_are_not_the_agents(folder: Path) -> None:
    settings = rollout("noter", options={"tools": ["note"]})
    async with scripted_chains(folder, [call("note", text="mine"), "ok"], rollout=settings) as chains:
        chain = await chains.run(messages=[{"role": "system", "content": "Help."}])
        assert chains.runner.setup.specs == []
    assert ("user", "noted of the user") in spoken(chain)
    assert any("There is no tool 'note'. There are no tools." in content for _, content in spoken(chain))
    assert (chain.metrics["user/calls"], chain.metrics["user/calls_made"]) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("raises", "users.py:fault raised OSError: no line"),
        ("slow", "took longer than 0.3 s"),
        ("empty", "yielded ' ', not a text of 1 to"),
        ("long", "not a text of 1 to 65,536 characters"),
        ("number", "yielded 3, not a text"),
        ("nothing", "yielded None, not a text"),
        ("names", "a metric called 'a\\nb'; its name has to be of 1 to 100 printable characters"),
        ("count", "returned 'many' for x"),
    ],
)
async def test_a_fault_of_the_user_is_no_reward(
    folder: Path, kind: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UserConfig, "seconds", 0.3)
    async with scripted_chains(folder, ["a"], rollout=rollout("fault")) as chains:
        chain = await chains.run(kind=kind)
    assert (chain.outcome, chain.reward) == (Outcome.USER_ERROR, None)
    assert problem in str(chain.error)
    assert chain.turns == 1


async def test_chains_share_no_option(folder: Path) -> None:
    settings = rollout("endless", options={"steps": ["x"]})
    async with scripted_chains(folder, lambda prompt: "a", rollout=settings) as chains:
        assert [("user", "x") in spoken(await chains.run()) for _ in range(2)] == [True, True]


async def test_a_script_that_does_not_end_is_left_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UserConfig, "seconds", 0.1)
    monkeypatch.setattr("agentfactory.people.users.scripts.CLOSE_SECONDS", 0.1)
    async with scripted_chains(folder, ["a"], rollout=rollout("lingerer")) as chains:
        chain = await chains.run()
    assert (chain.outcome, chain.metrics["user/seconds"] >= 0.1) == (Outcome.USER_ERROR, True)


async def test_a_user_that_closes_badly_ends_no_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_chains(folder, [], rollout=rollout("Keen")):
        pass
    assert "Keen could not be closed: OSError('no close')" in caplog.text


@pytest.mark.parametrize(("kind", "problem"), [("begins", "`said = yield`"), ("leaves", "before it began")])
async def test_a_user_does_not_begin_after_a_question(folder: Path, kind: str, problem: str) -> None:
    async with scripted_chains(folder, [], rollout=rollout("fault")) as chains:
        chain = await chains.run(kind=kind)
    assert chain.outcome is Outcome.USER_ERROR
    assert problem in str(chain.error)


async def test_no_token_of_a_user_is_trained(folder: Path) -> None:
    """1,000 chains with random words, among them special tokens and tool calls as text."""
    rng = random.Random(0)
    pieces = ["yes", " ", "<|im_end|>", "<|im_start|>assistant\n", call("note", text="x"), "é€", "\n", "<think>", "🙂"]

    def words() -> str:
        return "w" + "".join(rng.choice(pieces) for _ in range(rng.randint(1, 8)))

    tasks = [{"question": f"q{n}", "steps": [words() for _ in range(rng.randint(0, 4))]} for n in range(1000)]
    agent = iter(lambda: rng.choice(["a", "b c", call("note", text="n")]), None)
    async with scripted_chains(folder, lambda prompt: next(agent), rollout=rollout("endless")) as chains:
        ended = await chains.run_all(tasks)
        # each sampled token is the server's, in its context, and nothing else is marked as sampled
        chains.check(*ended)
    for chain, task in zip(ended, tasks, strict=True):
        simulated = [message["content"] for message in chain.messages if "speaker" in message]
        assert simulated == task["steps"][: len(simulated)]
        assert chain.outcome in (Outcome.COMPLETED, Outcome.MAX_TURNS)
    assert sum("speaker" in message for chain in ended for message in chain.messages) > 1000


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "users.py:plain"}, "rollout.user: users.py:plain is not a generator function"),
        ({"name": "users.py:nobody"}, "rollout.user: unknown"),
        ({"name": "users.py:guest", "options": {"wrod": 1}}, "rollout.user.options.wrod: guest has no such option"),
        ({"name": "users.py:noter", "options": {"call": 1}}, "rollout.user.options.call: noter gets 'call' from the"),
        ({"name": "model", "options": {"prompt": "{a b}"}}, "rollout.user.options.*{a b} is not the name of a field"),
        ({"name": "model", "options": {"prompt": "x", "url": "http://x"}}, "url and model belong together"),
        ({"name": "model", "options": {}}, "rollout.user.options.prompt"),
        ({"name": "model", "options": {"prompt": "x", "url": "x", "model": "m"}}, "url: got 'x': not an address"),
        ({"name": "model", "options": {"prompt": "x", "tools": ["note"]}}, "tools: the trained model calls none"),
    ],
)
def test_a_wrong_user_is_named(folder: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Scripts(UserConfig(**config), folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "users.py:buyer"}, "buyer needs name, which row 1 of data lacks"),
        ({"name": "users.py:Keen"}, "Keen check raised KeyError: 'absent', in row 1 of data"),
        ({"name": "model", "options": {"prompt": "You are {name}."}}, "fills {name} of its prompt from the row"),
    ],
)
def test_rows_are_checked(folder: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Scripts(UserConfig(**config), folder).check_rows([{"question": "q"}], "data")


async def test_an_unknown_tool_of_the_user_is_named(folder: Path) -> None:
    with pytest.raises(SettingError, match=r"tools\.0: there is no tool 'phone'; fix: use some of note"):
        async with scripted_chains(folder, [], rollout=rollout("noter", options={"tools": ["phone"]})):
            pass


def model_user(url: str | None = None, **options: Any) -> dict[str, Any]:
    served = {} if url is None else {"url": url, "model": "m"}
    given = {"prompt": "You want {wish}.", "retry_seconds": 0.2, **served, **options}
    return {"user": {"name": "model", "options": given}, "max_turns": 6, "max_total_tokens": 4096}


async def test_the_trained_model_plays_the_user_in_a_context_of_its_own(folder: Path) -> None:
    def answer(prompt: str) -> str:
        if "You want a lamp." not in prompt:
            return "We have one." if "I seek a lamp" in prompt else "What do you seek?"
        return "Thanks ###STOP###" if "We have one." in prompt else "I seek a lamp."

    async with scripted_chains(folder, answer, rollout=model_user()) as chains:
        chain = await chains.run(question="Hi", wish="a lamp")
    said = ["Hi", "What do you seek?", "I seek a lamp.", "We have one.", "Thanks"]
    assert [content for role, content in spoken(chain) if role != "system"] == said
    assert (chain.stop_reason, sum(chain.rows[0].mask) > 0) == (StopReason.USER_DONE, True)
    assert chain.metrics["user/tokens"] > 100
    assert "You want a lamp." not in chains.tokenizer.decode(chain.rows[0].token_ids)


@pytest.mark.parametrize(
    ("said", "problem"),
    [("", "wrote nothing"), ("What?", "repeated the agent's words"), ("a " * 400, "wrote more than max_tokens=256")],
)
async def test_a_model_that_is_no_user_is_a_fault(folder: Path, said: str, problem: str) -> None:
    def answer(prompt: str) -> str:
        return said if "You want" in prompt else "What?"

    async with scripted_chains(folder, answer, rollout=model_user()) as chains:
        chain = await chains.run(question="Hi", wish="a lamp")
    assert (chain.outcome, chain.reward) == (Outcome.USER_ERROR, None)
    assert problem in str(chain.error)


async def test_a_model_at_an_endpoint_plays_the_user_with_tools_of_its_own(folder: Path) -> None:
    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        assert [tool["function"]["name"] for tool in body["tools"]] == ["note"]
        assert "You want a lamp." in body["messages"][0]["content"]
        last = body["messages"][-1]
        if last["role"] == "tool":
            return said(f"<think>###STOP###? No.</think>\n\nI looked: {last['content']}")
        if last["content"] == "Right.":
            return said("<think>###STOP### is the word</think>###STOP###")
        return said("<think>I look.</think>", ("note", '{"text": "mine"}'), ("phone", "{}"))

    with serve_chat(answer) as server:
        settings = model_user(server.url, tools=["note"], prices=[1000.0, 2000.0])
        async with scripted_chains(folder, ["Look.", "Right."], rollout=settings) as chains:
            chain = await chains.run(question="Hi", wish="a lamp")
    unknown = "I looked: There is no tool 'phone'. The tools are: note."
    assert spoken(chain)[-2:] == [("user", unknown), ("assistant", "Right.")]
    assert (chain.outcome, chain.metrics["user/calls"], chain.metrics["user/tokens"]) == (Outcome.COMPLETED, 2, 75)
    assert chain.metrics["user/cost"] == pytest.approx(3 * (20 * 1000 + 5 * 2000) / 1e6)


@pytest.mark.parametrize("status", [None, 500, 401])
async def test_an_endpoint_that_fails_is_the_users_fault(folder: Path, status: int | None) -> None:
    async def answer(body: dict[str, Any]) -> tuple[int, str]:
        return status or 500, "out of order"

    with serve_chat(answer) as server:
        url = server.url if status else "http://127.0.0.1:9"
        async with scripted_chains(folder, ["Well?"], rollout=model_user(url)) as chains:
            chain = await chains.run(question="Hi", wish="a lamp")
    assert (chain.outcome, chain.reward) == (Outcome.USER_ERROR, None)
    assert "the user's model: " in str(chain.error)


@pytest.mark.parametrize("end", ["###STOP###", "(hangs up)"])
async def test_a_model_may_end_the_conversation_in_several_ways(folder: Path, end: str) -> None:
    def answer(prompt: str) -> str:
        return f"Thanks {end} at once" if "You want" in prompt else "We have one."

    settings = model_user(done=["###STOP###", "(hangs up)"])
    async with scripted_chains(folder, answer, rollout=settings) as chains:
        chain = await chains.run(question="Hi", wish="a lamp")
    assert [content for role, content in spoken(chain) if role != "system"] == ["Hi", "We have one.", "Thanks"]
    assert chain.stop_reason == StopReason.USER_DONE
