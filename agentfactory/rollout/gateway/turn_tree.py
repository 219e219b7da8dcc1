"""The tree of turns of a chain whose agent keeps its own history, which maps each request to prompt ids.

If a request repeats the path to a sampled turn, its prompt is the ids of that path, followed by the rendered messages
that the agent added. Any other request (a changed history, a sub-agent, a summary) starts a new row where the histories
diverge. There, earlier sampled tokens are context, so each sampled token is trained once.

Clients reserialise arguments, strip text, and drop reasoning and null fields. Under the rules of ComparedMessage, 423
of 500 assistant messages that 13 clients sent back were matched; the other 77 had not been sampled."""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentfactory.base.messages import Message, ToolCall, ToolSpec
from agentfactory.rollout.chains.row_rendering import RowRenderer, append_turn, note_roles
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.text.renderer import Parsed, Renderer
from agentfactory.rollout.text.templates import RenderError
from agentfactory.rollout.token_row import ImageSpan, Row

_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class ComparedMessage:
    """An assistant message in a form for comparison. `key` is equal for messages of the same text but for whitespace,
    and the same calls by JSON values; `text` and `reasoning` are stripped; `ids` are those of the calls."""

    key: str
    text: str
    reasoning: str
    ids: tuple[str, ...]

    @classmethod
    def of(cls, message: Message) -> "ComparedMessage":
        text, calls = content_text(message.get("content")), message.get("tool_calls") or []
        made = [[call["function"]["name"], _value(call["function"]["arguments"])] for call in calls]
        key = json.dumps([_SPACE.sub("", text), made], sort_keys=True, ensure_ascii=False)
        reasoning = str(message.get("reasoning_content") or "").strip()
        return cls(key, text.strip(), reasoning, tuple(str(call["id"]) for call in calls))


@dataclass(frozen=True)
class Delivered:
    """A sampled turn as the agent received it. A stop string that ended it is removed from its text, but some clients
    append it again, and more text. `whole` is the text of such a turn up to its last token."""

    sent: ComparedMessage
    stopped: ComparedMessage | None = None
    whole: str = ""

    @classmethod
    def of(cls, message: Message, stop: str | None = None, whole: str = "") -> "Delivered":
        """Return the forms in which an agent may send `message` back."""
        if stop is None:
            return cls(ComparedMessage.of(message))
        stopped = {**message, "content": content_text(message.get("content")) + stop}
        return cls(ComparedMessage.of(message), ComparedMessage.of(stopped), whole)

    def likeness(self, replayed: ComparedMessage) -> tuple[bool, bool] | None:
        """Return the strength of the match between a message and this turn: (call ids equal, text equal), or None if
        they do not match. Reasoning may be missing from the message; otherwise it must be the turn's."""
        sent = self.stopped if self.stopped is not None and replayed.key == self.stopped.key else self.sent
        if replayed.key != sent.key or replayed.reasoning not in ("", sent.reasoning):
            return None
        return bool(sent.ids) and replayed.ids == sent.ids, replayed.text == sent.text

    def continued(self, replayed: Message) -> str | None:
        """Return the text that the agent appended to this turn in a message that repeats it; None if the message does
        not repeat it. Only a turn that ended at a stop string, so without an end token, can be continued."""
        text, begun = content_text(replayed.get("content")).lstrip(), self.whole.lstrip()
        if not begun or not text.startswith(begun) or replayed.get("tool_calls"):
            return None
        return text[len(begun) :]


def print_of(message: Message) -> str:
    """Return a fingerprint for comparing messages that were not sampled."""
    if message["role"] == "assistant":
        return "assistant" + ComparedMessage.of(message).key
    content = message.get("content")
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        content = content_text(content)
    return json.dumps([message["role"], content or "", message.get("tool_call_id")], ensure_ascii=False)


def content_text(content: Any) -> str:
    """Return the text of message content: "" for null, parts joined."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


def _value(arguments: Any) -> Any:
    """Return arguments as a JSON value, with integral floats as integers; as the exact text if they are not JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return ["no JSON", arguments]
    return _numbers(arguments)


def _numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return value


@dataclass(eq=False)
class Node:
    """A sampled turn. `given` are the messages that the agent inserted between the previous turn, `parent`, and this
    one; `written` is the text that it appended to the previous turn. `message` is the turn in the form for the chat
    template. Its tokens end at `end` of the chain's row `row`."""

    number: int
    parent: "Node | None"
    given: list[Message]
    prints: list[str]
    message: Message
    delivered: Delivered
    token_ids: list[int]
    row: int
    end: int
    session: str
    written: str = ""
    children: list["Node"] = field(default_factory=list)

    def conversation(self, written: str = "") -> list[Message]:
        """Return the messages of the path up to and including this turn, with `written` appended to its text."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        nodes.reverse()
        behind = [*(node.written for node in nodes[1:]), written]
        return [m for node, text in zip(nodes, behind, strict=True) for m in (*node.given, node.continued(text))]

    def continued(self, written: str) -> Message:
        """Return the turn's message with `written` appended to its text."""
        return {**self.message, "content": self.delivered.whole + written} if written else self.message


@dataclass(frozen=True)
class Plan:
    """The position at which a request continues the tree. `ids` is the prompt, which contains `images`; its first
    `shared` ids are a prefix of the row of `parent`. `written` is the text that the agent appended to `parent`.
    `unmatched` are the assistant messages that repeat no sampled turn."""

    head: str
    parent: Node | None
    given: list[Message]
    prints: list[str]
    ids: list[int]
    images: list[ImageSpan]
    shared: int
    unmatched: list[Message]
    spliced: int
    """Number of turns from elsewhere in the chain whose sampled ids are context here."""
    session: str
    written: str


class ChainTree:
    """The turns of one chain. `rows` are the rows of its trajectory, which grow with each turn."""

    def __init__(self, rows: list[Row], renderer: Renderer) -> None:
        self.rows = rows
        self.nodes: list[Node] = []
        """In the order of sampling."""
        self._renderer = renderer
        self._rendered = RowRenderer(renderer)
        self._roots: dict[str, list[Node]] = defaultdict(list)
        """Tools -> first turns of the conversations with these tools."""
        self._by_key: dict[str, list[Node]] = defaultdict(list)
        self._by_ids: dict[tuple[str, ...], Node] = {}
        """Ids of a turn's calls in the agent's messages, unique within the chain -> the turn."""
        self._written: dict[str, str] = {}
        """Id of a call in the agent's messages -> its id in the sampled turn: in some formats, the model writes ids."""

    def plan(self, messages: Sequence[Message], specs: list[ToolSpec], session: str = "") -> Plan:
        """Find the turn that a conversation continues, and render the messages that the agent added. `session`
        distinguishes agents that got equal turns. The tree is not changed. Raise RenderError if the chat template
        refuses the conversation."""
        head = json.dumps([spec.to_openai() for spec in specs], sort_keys=True)
        messages = self._renderer.dialogue.instruct(messages, specs)
        prints = [print_of(message) for message in messages]
        parent, start, written = self._descend(head, messages, prints, session)
        known = [] if parent is None else parent.conversation(written)
        matched = [self._find(m, session) if m["role"] == "assistant" else None for m in messages[start:]]
        added = self._as_written(known, messages[start:])
        whole = [*known, *(m if node is None else node.message for m, node in zip(added, matched, strict=True))]
        row = Row()
        if parent is not None:
            source = self.rows[parent.row]
            images = [image for image in source.images if image.offset < parent.end]
            row.append_context(source.token_ids[: parent.end], images)
        shared = len(row.token_ids)
        if written:
            row.append_context(self._renderer.continuation(written))
        spliced = sum(node is not None for node in matched)
        if not self._append(row, whole, matched, specs):
            row, shared, spliced = Row(), 0, 0
            self._extend(row, whole, whole, specs)
        unmatched = [m for m, node in zip(added, matched, strict=True) if m["role"] == "assistant" and node is None]
        given, prints, ids, images = whole[len(known) :], prints[start:], row.token_ids, row.images
        return Plan(head, parent, given, prints, ids, images, shared, unmatched, spliced, session, written)

    def record(self, plan: Plan, completion: Completion, parsed: Parsed, delivered: Delivered) -> Node:
        """Append a turn that was sampled after `plan.ids` to the row that it continues, or to a new row."""
        parent = plan.parent
        if parent is not None and plan.shared and len(self.rows[parent.row].token_ids) == plan.shared:
            number, new = parent.row, plan.shared
        else:
            number, new = len(self.rows), 0
            self.rows.append(Row())
        row = self.rows[number]
        images = [replace(image, offset=image.offset - new) for image in plan.images if image.offset >= new]
        row.append_context(plan.ids[new:], images)
        append_turn(row, completion)
        note_roles(row, completion, parsed)
        turn = parsed.message, delivered, completion.token_ids, number, len(row.token_ids)
        node = Node(len(self.nodes), parent, plan.given, plan.prints, *turn, plan.session, plan.written)
        self.nodes.append(node)
        (self._roots[plan.head] if parent is None else parent.children).append(node)
        for form in filter(None, (delivered.sent, delivered.stopped)):
            self._by_key[form.key].append(node)
        if delivered.sent.ids:
            self._by_ids[delivered.sent.ids] = node
        return node

    def name_calls(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Return the calls of a sampled turn with ids that are unique in the chain."""
        named = []
        for call in calls:
            identity, number = call.id, 2
            while identity in self._written:
                identity, number = f"{call.id}-{number}", number + 1
            self._written[identity] = call.id
            named.append(replace(call, id=identity))
        return named

    def _likeness(self, node: Node, replayed: ComparedMessage) -> tuple[bool, bool] | None:
        """As Delivered.likeness. A message with the call ids of another turn matches only that turn."""
        if self._by_ids.get(replayed.ids, node) is not node:
            return None
        return node.delivered.likeness(replayed)

    def _descend(
        self, head: str, messages: Sequence[Message], prints: list[str], session: str
    ) -> tuple[Node | None, int, str]:
        """Return the last sampled turn that a conversation repeats, the number of messages up to it, and the text that
        the agent appended to it. Among equal turns, prefer matching call ids, then the session, then the latest."""
        best: tuple[tuple[int, bool, bool, bool, int], Node | None, int, str]
        best = ((0, False, False, False, -1), None, 0, "")
        open_nodes = [(node, 0) for node in self._roots[head]]
        while open_nodes:
            node, start = open_nodes.pop()
            at = start + len(node.given)
            if at >= len(messages) or messages[at]["role"] != "assistant" or prints[start:at] != node.prints:
                continue
            sure, written = self._likeness(node, ComparedMessage.of(messages[at])), ""
            if sure is None:
                added = node.delivered.continued(messages[at])
                if added is None:
                    continue
                sure, written = (False, True), added
            found = ((at + 1, *sure, node.session == session, node.number), node, at + 1, written)
            best = max(best, found, key=lambda each: each[0])
            open_nodes += [(child, at + 1) for child in node.children if child.written == written]
        return best[1:]

    def _find(self, message: Message, session: str) -> Node | None:
        """Return the sampled turn that a message repeats outside the turn's own history, or None."""
        reply = ComparedMessage.of(message)
        found = [
            ((*sure, node.session == session, node.number), node)
            for node in self._by_key[reply.key]
            if (sure := self._likeness(node, reply)) is not None
        ]
        return max(found, key=lambda each: each[0])[1] if found else None

    def _append(self, row: Row, whole: list[Message], matched: Sequence[Node | None], specs: list[ToolSpec]) -> bool:
        """Append the last `len(matched)` messages to `row`, including the generation prompt; sampled turns are appended
        as their sampled ids. Return False if the template cannot render the messages incrementally."""
        first = len(whole) - len(matched)
        since = first
        try:
            for at, node in enumerate(matched, first):
                if node is None:
                    continue
                if not self._extend(row, whole[:at], whole[since:at], specs):
                    return False
                row.append_context(node.token_ids)
                since = at + 1
            return self._extend(row, whole, whole[since:], specs)
        except RenderError:
            return False

    def _extend(self, row: Row, messages: list[Message], new: list[Message], specs: list[ToolSpec]) -> bool:
        if row.token_ids and not new:
            return False  # two turns that were sampled separately follow each other directly
        if row.token_ids:
            piece = self._rendered.extend(row, messages, new, specs)
        else:
            piece = self._rendered.open(messages, specs)
        if piece is not None:
            row.append_context(*piece)
        return piece is not None

    def _as_written(self, known: Sequence[Message], added: Sequence[Message]) -> list[Message]:
        """Restore the call ids of the sampled turns, and add to results the names of the tools, which clients omit."""
        names = {call["id"]: call["function"]["name"] for message in known for call in message.get("tool_calls") or []}
        written = []
        for message in added:
            if calls := message.get("tool_calls"):
                calls = [{**call, "id": self._written.get(call["id"], call["id"])} for call in calls]
                names.update({call["id"]: call["function"]["name"] for call in calls})
                message = {**message, "tool_calls": calls}
            elif message["role"] == "tool":
                identity = self._written.get(message["tool_call_id"], message["tool_call_id"])
                message = {**message, "tool_call_id": identity}
                if identity in names:
                    message["name"] = names[identity]
            written.append(message)
        return written
