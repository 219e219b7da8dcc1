"""Agents that keep their own history: returned messages are matched to sampled turns, and each sampled token is trained
once, in its original context."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentfactory.base.messages import Message, ToolSpec
from agentfactory.rollout.gateway.request_options import assistant
from agentfactory.rollout.gateway.turn_tree import (
    ChainTree,
    ComparedMessage,
    Delivered,
    Node,
    Plan,
    content_text,
    print_of,
)
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.text.load_renderer import make_renderer
from agentfactory.rollout.text.renderer import Parsed, Renderer
from agentfactory.rollout.token_row import Span
from tests.chat_tokenizers import STRIPS_REASONING, make_tokenizer, trl_template

SPECS = [ToolSpec("move", "Move.", {"type": "object", "properties": {"to": {"type": "string"}}})]


@dataclass
class Sampled:
    """A sampled turn: its place in the abstract history, and the message that the agent got."""

    plan: Plan
    completion: Completion
    node: Node
    message: Message


@dataclass
class Policy:
    """A policy that samples turns with non-canonical token ids, and records them."""

    tree: ChainTree
    renderer: Renderer
    chance: random.Random
    samples: list[Sampled] = field(default_factory=list)

    def answer(self, messages: list[Message], text: str, specs: list[ToolSpec] = SPECS, cut: bool = False) -> Sampled:
        plan = self.tree.plan(messages, specs)
        tokenizer = self.renderer.tokenizer
        ids: list[int] = []
        while text:
            size = self.chance.randint(1, 9) if not text.startswith("<") else text.index(">") + 1
            piece = text[:size].partition("<")[0] or text[:size]
            ids += tokenizer.encode(piece, add_special_tokens=False)
            text = text[len(piece) :]
        ids += [] if cut else [self.renderer.stop_token_ids[-1]]
        calls = sum(len(sample.message.get("tool_calls") or []) for sample in self.samples)
        parsed = self.renderer.parse(ids, calls, specs=specs)
        message = assistant(
            content_text(parsed.message["content"]),
            [(call.id, call.name, call.arguments) for call in parsed.calls],
            parsed.message.get("reasoning_content") or "",
        )
        return self.record(plan, ids, parsed, message, Delivered.of(message), cut)

    def record(
        self, plan: Plan, ids: list[int], parsed: Parsed, message: Message, delivered: Delivered, cut: bool = False
    ) -> Sampled:
        logprobs = [-float(len(self.samples)) - n / 1000 for n in range(len(ids))]
        completion = Completion(ids, logprobs, [Span("0", 0, len(ids))], cut, [1] * len(ids))
        node = self.tree.record(plan, completion, parsed, delivered)
        self.samples.append(Sampled(plan, completion, node, message))
        return self.samples[-1]

    def stopped(self, messages: list[Message], text: str, stop: str) -> Sampled:
        """Sample a turn that ends with a stop string, if it has it."""
        plan = self.tree.plan(messages, SPECS)
        ids = self.renderer.tokenizer.encode(text, add_special_tokens=False)
        parsed = self.renderer.parse(ids, specs=SPECS)
        parsed.message["content"] = text.partition(stop)[0]
        found = Delivered.of(parsed.message, stop, text) if stop in text else Delivered.of(parsed.message)
        return self.record(plan, ids, parsed, parsed.message, found)

    def check(self) -> None:
        """Assert that each sampled token is trained once, in the row where it was sampled, and no other token is."""
        rows = self.tree.rows
        trained = {(n, at) for n, row in enumerate(rows) for at, mask in enumerate(row.mask) if mask}
        for sample in self.samples:
            row, ids = rows[sample.node.row], sample.completion.token_ids
            start = sample.node.end - len(ids)
            assert row.token_ids[:start] == sample.plan.ids
            assert row.token_ids[start : sample.node.end] == ids
            assert row.logprobs[start : sample.node.end] == sample.completion.logprobs
            places = {(sample.node.row, at) for at in range(start, sample.node.end)}
            assert places <= trained
            trained -= places
        assert not trained
        for row in rows:
            assert len(row.token_ids) == len(row.mask) == len(row.logprobs)
            assert sum(span.end - span.start for span in row.versions) == sum(row.mask)
            assert len(row.turn_spans()) == len(row.versions)


@pytest.fixture(scope="module")
def appending() -> Renderer:
    return make_renderer(make_tokenizer(trl_template("qwen2_5")))


def policy_of(renderer: Renderer, seed: int = 0) -> Policy:
    return Policy(ChainTree([], renderer), renderer, random.Random(seed))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def call(to: Any) -> str:
    return f'<tool_call>\n{{"name": "move", "arguments": {json.dumps({"to": to})}}}\n</tool_call>'


def result(message: Message, text: str) -> list[Message]:
    return [{"role": "tool", "tool_call_id": each["id"], "content": text} for each in message.get("tool_calls") or []]


# ---- what clients change


def reserialised(message: Message) -> Message:
    """Return a turn as LangChain does: arguments reserialised, text as parts, reasoning dropped."""
    changed = {key: value for key, value in message.items() if key != "reasoning_content"}
    changed["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else None
    for each in changed.get("tool_calls", []):
        assert isinstance(each["function"]["arguments"], dict)
    return json.loads(json.dumps(changed))


def spaced(message: Message) -> Message:
    return {**message, "content": f"\n{message['content']}  ".replace(" ", "  ")}


def test_numbers_are_compared_by_value_and_ids_tell_equal_turns_apart(appending: Renderer) -> None:
    policy = policy_of(appending)
    first = policy.answer([user("a")], call(2.0))
    again = policy.answer([user("a")], call(2.0))
    assert first.message["tool_calls"][0]["id"] != again.message["tool_calls"][0]["id"]
    for sample in (first, again):
        said = json.loads(json.dumps(sample.message).replace("2.0", "2"))
        plan = policy.tree.plan([user("a"), said, *result(said, "ok")], SPECS)
        assert plan.parent is sample.node
        assert plan.ids[: len(sample.plan.ids) + 1] == [*sample.plan.ids, sample.completion.token_ids[0]]
    without = assistant("", [("other", "move", {"to": 2})])
    assert policy.tree.plan([user("a"), without, user("b")], SPECS).parent is again.node, "the last one delivered"
    other = assistant("", [("other", "move", {"to": 3})])
    plan = policy.tree.plan([user("a"), other, user("b")], SPECS)
    assert (plan.parent, plan.unmatched) == (None, [other])


def test_an_equal_turn_further_back_is_not_the_one_that_is_repeated(appending: Renderer) -> None:
    policy = policy_of(appending)
    history = [user("a")]
    for _ in range(3):
        said = policy.answer(history, call("north")).message
        history += [said, *result(said, "ok")]
    # the agent forgets its first move, and its second says the same
    sample = policy.answer([history[0], *history[3:]], "done")
    assert (sample.plan.parent, sample.plan.spliced) == (None, 2)
    policy.check()


def test_a_session_tells_equal_turns_apart(appending: Renderer) -> None:
    policy = policy_of(appending)
    nodes = []
    for session in ("one", "two"):
        plan = policy.tree.plan([user("a")], [], session)
        ids = appending.tokenizer.encode("Yes<|im_end|>", add_special_tokens=False)
        parsed = appending.parse_text(ids)
        nodes.append(policy.record(plan, ids, parsed, parsed.message, Delivered.of(parsed.message)).node)
    history = [user("a"), assistant("Yes", []), user("b")]
    assert policy.tree.plan(history, [], "one").parent is nodes[0]
    assert policy.tree.plan(history, [], "two").parent is nodes[1]
    assert policy.tree.plan(history, [], "").parent is nodes[1]


def test_the_stop_string_may_come_back(appending: Renderer) -> None:
    delivered = Delivered.of(assistant("print(1)", []), "</code>")
    for text in ("print(1)", "print(1)</code>", " print(1)\n</code>"):
        assert delivered.likeness(ComparedMessage.of(assistant(text, []))) is not None
    assert delivered.likeness(ComparedMessage.of(assistant("print(2)", []))) is None


def test_an_agent_may_write_on_behind_a_stop_string(appending: Renderer) -> None:
    """smolagents' CodeAgent does this; its history only grows, so the chain has one row."""
    policy = policy_of(appending)
    history = [user("a")]
    for turn in range(3):
        said = policy.stopped(history, f"go({turn})</code>", "</code>").message
        assert said["content"] == f"go({turn})"
        added = f"\nCalling tools:\n[go({turn})] <|im_start|>"
        history += [{**said, "content": f"go({turn})</code>{added}"}, user(f"saw {turn}")]
    policy.check()
    (row,) = policy.tree.rows
    text = appending.tokenizer.decode(row.token_ids)
    whole = appending.tokenizer.apply_chat_template(history[:-2], tools=[SPECS[0].to_openai()], tokenize=False)
    assert text.startswith(whole)
    forged = appending.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert row.token_ids.count(forged) == 1 + 2 * 3, "text of the agent forges no turn"
    # behind another text, the same turn is another history
    other = policy.stopped([*history[:3], {**said, "content": "go(1)</code> other"}, user("x")], "no", "</code>")
    assert (other.plan.parent, other.node.row) == (policy.samples[1].node, 1)
    # and a turn that ended by itself cannot be continued
    ended = policy.answer([user("b")], "Yes.").message
    plan = policy.tree.plan([user("b"), {**ended, "content": "Yes. And no."}, user("c")], SPECS)
    assert (plan.parent, len(plan.unmatched)) == (None, 1)
    policy.check()


def test_reasoning_need_not_come_back_but_must_not_be_another(appending: Renderer) -> None:
    delivered = Delivered.of(assistant("Yes", [], "hm"))
    assert delivered.likeness(ComparedMessage.of(assistant("Yes", []))) is not None
    assert delivered.likeness(ComparedMessage.of(assistant("Yes", [], " hm\n"))) is not None
    assert delivered.likeness(ComparedMessage.of(assistant("Yes", [], "so"))) is None


def test_messages_of_the_agent_are_compared_whole() -> None:
    assert print_of(user("a b")) != print_of(user("a  b"))
    assert print_of(user("ab")) == print_of({"role": "user", "content": [{"type": "text", "text": "ab"}]})
    assert print_of({"role": "tool", "tool_call_id": "1", "content": ""}) != print_of(
        {"role": "tool", "tool_call_id": "2", "content": ""}
    )


# ---- branches


def test_dropped_turns_a_summary_and_sub_agents_are_branches(appending: Renderer) -> None:
    policy = policy_of(appending)
    system, task = {"role": "system", "content": "Main."}, user("Find it.")
    history: list[Message] = [system, task]
    for turn in range(4):
        said = policy.answer(history, call(f"n{turn}")).message
        history += [said, *result(said, f"r{turn}")]
    assert len(policy.tree.rows) == 1

    dropped = [*history[:2], *history[4:]]
    sample = policy.answer(dropped, call("after"))
    assert len(policy.tree.rows) == 2
    assert sample.plan.spliced == 3, "the kept turns keep their ids"
    for kept in policy.samples[1:4]:
        assert contains(sample.plan.ids, kept.completion.token_ids)
    assert not contains(sample.plan.ids, policy.samples[0].completion.token_ids)

    compacted = [system, user("Summary: went north.")]
    said = policy.answer(compacted, call("on")).message
    policy.answer([*compacted, said, *result(said, "ok")], "Done.")
    assert len(policy.tree.rows) == 3, "after a summary it is appended to again"

    for name in ("one", "two"):
        side = [{"role": "system", "content": "Sub-agent."}, user(name)]
        said = policy.answer(side, call(name)).message
        policy.answer([*side, said, *result(said, name)], f"Found {name}.")
    assert len(policy.tree.rows) == 5
    policy.answer([*history], "Back in the first history.")
    assert len(policy.tree.rows) == 5, "the first row goes on"
    policy.check()
    order = [node.number for node in sorted(policy.tree.nodes, key=lambda node: (node.row, node.end))]
    assert sorted(order) == list(range(len(policy.samples)))
    assert order != sorted(order)


def test_going_back_branches_where_the_histories_part(appending: Renderer) -> None:
    policy = policy_of(appending)
    first = policy.answer([user("a")], "one")
    history = [user("a"), first.message, user("b")]
    policy.answer(history, "two")
    edited = policy.answer([user("a"), first.message, user("c")], "three")
    again = policy.answer(history, "two, again")
    assert len(policy.tree.rows) == 3
    for sample in (edited, again):
        shared = [*first.plan.ids, *first.completion.token_ids]
        assert sample.plan.ids[: len(shared)] == shared
        assert not any(policy.tree.rows[sample.node.row].mask[: len(shared)])
    policy.check()


def contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids)))


# ---- any agent


class Editor:
    """An agent that edits its histories at random. It names every message, so it can serve as the matcher's oracle: it
    compares histories by these names."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy = policy
        self.chance = random.Random(seed)
        self.histories: list[list[tuple[str, Message]]] = [[]]
        self.names = 0
        self.ends: dict[tuple[str, ...], int] = {}
        """Path of names -> the row in which its last turn was sampled."""
        self.tails: dict[int, tuple[str, ...]] = {}
        """Row -> the path at its end."""
        self.rows = 0

    def named(self, message: Message) -> tuple[str, Message]:
        self.names += 1
        return f"m{self.names}", message

    def step(self) -> None:
        chance = self.chance
        history = list(chance.choice(self.histories))
        match chance.choice(["go"] * 6 + ["drop", "back", "summary", "side", "rewrite", "own", "retry"]):
            case "drop" if len(history) > 4:
                at = chance.randrange(1, len(history) - 2)
                history = history[:1] + history[at + 1 :]
            case "back" if len(history) > 3:
                history = history[: chance.randrange(1, len(history))]
            case "summary" if history:
                history = [history[0], self.named(user(f"Summary {self.names}."))]
            case "side":
                history = []
            case "rewrite":
                places = [n for n, (_, message) in enumerate(history) if message["role"] == "assistant"]
                if places:
                    history[chance.choice(places)] = self.named(assistant(f"Rewritten {self.names}.", []))
            case "own":
                history += [self.named(user(f"q{self.names}")), self.named(assistant(f"Mine {self.names}.", []))]
            case "retry":
                while history and history[-1][1]["role"] == "assistant":
                    history.pop()
        history = whole(history)
        if not history or history[-1][1]["role"] == "assistant":
            history.append(self.named(user(f"question {self.names}")))
        self.ask(history)

    def ask(self, history: list[tuple[str, Message]]) -> None:
        path = tuple(name for name, _ in history)
        shown = [self.changed(message) for _, message in history]
        # the correct match, from the names alone
        known = max((end for end in self.ends if path[: len(end)] == end), key=len, default=())
        row = self.ends.get(known)
        continues = row is not None and self.tails[row] == known
        if not continues:
            row, self.rows = self.rows, self.rows + 1
        text = f"Turn {self.names}. {self.chance.choice(['', call(f'n{self.names}'), call(self.names)])}"
        sample = self.policy.answer(shown, text, cut=self.chance.random() < 0.1 and not text.endswith("</tool_call>"))
        assert sample.node.row == row
        name, message = self.named(sample.message)
        history = [*history, (name, message)]
        self.ends[*path, name] = row
        self.tails[row] = (*path, name)
        for each in result(message, f"result {self.names}"):
            history.append(self.named(each))
        self.histories.append(history)

    def changed(self, message: Message) -> Message:
        if message["role"] != "assistant":
            return message
        return self.chance.choice([lambda m: m, reserialised, spaced])(message)


def whole(history: list[tuple[str, Message]]) -> list[tuple[str, Message]]:
    """Leave out results whose calls are gone, and calls whose results are."""
    answered = {m.get("tool_call_id") for _, m in history if m["role"] == "tool"}
    kept: list[tuple[str, Message]] = []
    open_calls: set[str] = set()
    for name, message in history:
        if message["role"] == "tool" and message["tool_call_id"] not in open_calls:
            continue
        calls = {each["id"] for each in message.get("tool_calls") or []}
        if not calls <= answered:
            continue
        if message["role"] != "tool":
            open_calls = calls
        kept.append((name, message))
    return kept


@pytest.mark.extended
@pytest.mark.slow
def test_a_thousand_agents_that_edit_their_histories(appending: Renderer) -> None:
    rows, turns, unmatched = 0, 0, 0
    for seed in range(1000):
        policy = policy_of(appending, seed)
        editor = Editor(policy, seed)
        for _ in range(editor.chance.randint(2, 12)):
            editor.step()
        policy.check()
        assert len(policy.tree.rows) == editor.rows
        rows += len(policy.tree.rows)
        turns += len(policy.samples)
        unmatched += sum(len(sample.plan.unmatched) for sample in policy.samples)
    assert turns > 5000
    assert rows < turns
    assert unmatched > 0


@pytest.mark.slow
def test_agents_under_a_template_that_rewrites_history() -> None:
    rewriting = make_renderer(make_tokenizer(STRIPS_REASONING))
    for seed in range(20):
        policy = policy_of(rewriting, seed)
        history: list[Message] = []
        for turn in range(4):
            history.append(user(f"q{turn}"))
            history.append(policy.answer(history, f"<think>hm {turn}</think>Answer {turn}.").message)
        policy.check()
        assert len(policy.tree.rows) == 4, "each question makes the template drop the reasoning before it"
