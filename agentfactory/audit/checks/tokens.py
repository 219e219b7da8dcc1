"""Token ids and masks, derived again from the messages of a chain; trained tokens; the turns of greedy chains."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agentfactory.audit.check import Check, Opened
from agentfactory.audit.record import HELD_OUT, MESSAGES, RECIPE, TOKENS, TRAINED, Places, Seen
from agentfactory.audit.replay.replay_runner import own_messages
from agentfactory.base.findings import Evidence, Finding
from agentfactory.base.messages import Message
from agentfactory.rollout.chains.row_rendering import RowRenderer
from agentfactory.rollout.config import LateChains, OutcomePolicy
from agentfactory.rollout.groups.group_filter import counted
from agentfactory.rollout.text.renderer import Parsed
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Trajectory

MOST_CHAINS = 600
"""Chains that are derived again, evenly over the run: each takes milliseconds."""
_COMPARED = ("role", "content", "reasoning_content", "tool_calls")


@dataclass(frozen=True)
class Difference:
    kind: str
    row: int
    position: int
    text: str


class TokenCheck(Check):
    """Each row must be what the chat template makes of the chain's messages, with the sampled tokens in their places,
    and its mask must be 1 on these alone. What the template reads from sampled tokens must be the saved message."""

    topic = "tokens and masks"
    needs = (TOKENS, MESSAGES, RECIPE)
    _FIXES = {
        "ids": "train on what the server was sent: compare the chat template and the tokenizer of the trainer, of the "
        "server and of this run",
        "mask": "only sampled tokens may be trained: look for code that sets the mask from text or positions",
        "message": "the saved message is not what was sampled: look for code that edits messages, or parses other ids",
        "shape": "the saved chain is not whole: look for code that changes its messages or its rows",
    }

    def begin(self) -> None:
        self._found = {kind: Places() for kind in self._FIXES}
        self._chains = self._tokens = self._own = 0

    async def note(self, seen: Seen) -> None:
        opened = self.part_of(seen)
        for chain in self.some_of(seen, MOST_CHAINS):
            if opened.recipe.rollout.agent is not None:
                # an agent writes its own prompts, and its hooks may insert tokens
                self._own += 1
                continue
            self._chains += 1
            self._tokens += sum(len(row.token_ids) for row in chain.rows)
            for found in differences(chain, opened):
                place = Evidence(found.text, seen.group.id, chain.id, found.row, found.position, seen.file)
                self._found[found.kind].add(place)

    def findings(self) -> Iterator[Finding]:
        words = {
            "ids": "token ids differ from the chat template's of the saved messages",
            "mask": "masks differ from the sampled tokens",
            "message": "sampled tokens are read as another message than the saved one",
            "shape": "messages and rows do not fit together",
        }
        for kind, places in self._found.items():
            if places:
                text = f"{words[kind]}: {places.total} places in {self._chains} chains"
                yield self.wrong(text, self._FIXES[kind], places.kept)
        if self._own:
            yield self.remark(f"{self._own} chains of an agent with its own prompts were not derived again")

    def looked_at(self) -> str:
        return f"{self._chains:,} chains, {self._tokens:,} tokens" if self._chains else ""


def differences(chain: Trajectory, opened: Opened) -> Iterator[Difference]:
    """Yield the first difference of each row of a chain from its messages."""
    own = own_messages(chain)
    if len(own) != chain.turns:
        if not chain.outcome.failed:
            yield Difference("shape", 0, 0, f"{chain.turns} turns, but fewer messages of the assistant")
        return
    try:
        spans = chain.turn_spans()
    except ValueError as error:
        yield Difference("shape", 0, 0, str(error))
        return
    turns: dict[int, list[int]] = {}
    for turn, (row, _, _) in enumerate(spans):
        turns.setdefault(row, []).append(turn)
    for number, saved in enumerate(chain.rows):
        found = next(_Derived(chain, opened, own).differences(number, saved, turns.get(number, [])), None)
        if found is not None:
            yield found


class _Derived:
    """A row, derived from messages step by step and compared with the saved one."""

    def __init__(self, chain: Trajectory, opened: Opened, own: Sequence[int]) -> None:
        self._chain, self._opened, self._own = chain, opened, own
        self._renderer, self._specs = opened.renderer, opened.specs
        self._rows = RowRenderer(opened.renderer)
        rollout = opened.recipe.rollout
        self._prefix = len(opened.renderer.encode(rollout.assistant_prefix)) if rollout.assistant_prefix else 0
        self._shortens = rollout.context.policy != "keep" or rollout.context.keep_images is not None
        self._row = Row()

    def differences(self, number: int, row: Row, turns: Sequence[int]) -> Iterator[Difference]:
        messages, ends = self._chain.messages, row.turn_ends
        if len(row.token_ids) != len(row.mask):
            yield Difference("shape", number, 0, f"{len(row.token_ids)} tokens, but {len(row.mask)} values of its mask")
            return
        if not turns or ends is None:
            return
        first = self._own[turns[0]]
        if number and self._shortens:
            # what rollout.context left out of the prompt is not saved
            self._row.append_context(list(map(int, row.token_ids[: row.turn_spans()[0][0] - self._prefix])))
        else:
            self._row.append_context(*self._rows.open(messages[:first], self._specs))
        for place, turn in enumerate(turns):
            yield from self._context(number, row, f"before turn {turn + 1}")
            start, end = len(self._row.token_ids), ends[place]
            if start >= end:
                yield Difference("ids", number, end, f"turn {turn + 1} ends before its prompt does, at token {start}")
                return
            sampled = list(map(int, row.token_ids[start:end]))
            yield from self._masked(number, row, start, end, turn)
            yield from self._message(number, start, sampled, turn)
            mask = [int(place >= self._prefix) for place in range(len(sampled))]
            self._row.append_sampled(sampled, [0.0] * len(sampled), [], mask)
            following = self._own[turn + 1] if turn + 1 < len(self._own) else len(messages)
            new = messages[self._own[turn] + 1 : following]
            last = place + 1 == len(turns)
            if last and (len(row.token_ids) == end or not new):
                break
            if self._shortens:
                # the prompt of a summary is not one message
                upto = ends[place + 1] if not last else len(row.token_ids)
                context = np.flatnonzero(np.asarray(row.mask[end:upto], dtype=bool))
                size = int(context[0]) if context.size else upto - end
                self._row.append_context(list(map(int, row.token_ids[end : end + size - self._prefix * (not last)])))
                continue
            piece = self._rows.extend(self._row, messages[:following], new, self._specs)
            if piece is None:
                yield Difference("ids", number, end, "the chat template rewrites the messages before: a new row is due")
                return
            self._row.append_context(*piece)
        yield from self._context(number, row, "at the end")

    def _context(self, number: int, row: Row, where: str) -> Iterator[Difference]:
        mine, saved = np.asarray(self._row.token_ids), np.asarray(row.token_ids)[: len(self._row.token_ids)]
        if len(saved) < len(mine):
            yield Difference("ids", number, len(saved), f"the row ends {where}, and its messages do not")
            return
        differing = np.flatnonzero(mine != saved)
        if differing.size:
            at = int(differing[0])
            decode = self._renderer.decode
            expected, got = decode(list(map(int, mine[at : at + 8]))), decode(list(map(int, saved[at : at + 8])))
            text = f"{where}: got {got!r}, where its messages give {expected!r}"
            yield Difference("ids", number, at, text)
        wrong = np.flatnonzero(np.asarray(row.mask[: len(mine)], dtype=bool) != np.asarray(self._row.mask, dtype=bool))
        if wrong.size:
            at = int(wrong[0])
            text = self._text(row, at, wrong)
            how = "was not sampled, but is trained" if row.mask[at] else "was sampled, but is not trained"
            yield Difference("mask", number, at, f"{text!r} {where} {how}")

    def _masked(self, number: int, row: Row, start: int, end: int, turn: int) -> Iterator[Difference]:
        mask = np.asarray(row.mask[start:end], dtype=bool)
        expected = np.arange(end - start) >= self._prefix
        wrong = np.flatnonzero(mask != expected)
        if wrong.size:
            at = start + int(wrong[0])
            text = self._text(row, at, start + wrong)
            how = "was not sampled, but is trained" if row.mask[at] else "was sampled, but is not trained"
            yield Difference("mask", number, at, f"{text!r} in turn {turn + 1} {how}")

    def _text(self, row: Row, at: int, wrong: np.ndarray) -> str:
        """Return the text of the wrong tokens that begin at a position, at most eight."""
        count = next((place for place in range(1, 8) if at + place not in wrong), 8)
        return self._renderer.decode([int(token) for token in row.token_ids[at : at + count]])

    def _message(self, number: int, start: int, sampled: list[int], turn: int) -> Iterator[Difference]:
        chain, index = self._chain, self._own[turn]
        before = chain.messages[self._own[0] : index]
        calls = sum(len(message.get("tool_calls") or []) for message in before if message["role"] == "assistant")
        parsed = self._renderer.parse(sampled, calls, specs=self._specs)
        if not _same(parsed, chain.messages[index]):
            shown = _shown(chain.messages[index])
            text = f"turn {turn + 1} is saved as {shown!r}, and its tokens say {_shown(parsed.message)!r}"
            yield Difference("message", number, start, text)


def _same(parsed: Parsed, saved: Message) -> bool:
    mine = parsed.message
    # a summary's calls are not run, and left out
    names = [name for name in _COMPARED if name in saved or name != "tool_calls"]
    return all(mine.get(name) == saved.get(name) for name in names)


def _shown(message: Message) -> str:
    words = str(message.get("content") or "")
    calls = [f"{call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls") or []]
    return " ".join([words, *calls]).strip()[:120]


class TrainedCheck(Check):
    """All sampled tokens of chains that count must be trained, no others, and each trained group be saved."""

    topic = "trained tokens"
    needs = (TOKENS, TRAINED)
    _FIX = "compare the targets of the batch with the masks of its rows"

    def begin(self) -> None:
        self._chains = self._tokens = 0
        self._others, self._missing, self._left_out = Places(), Places(), Places()
        self._groups: Counter[int] = Counter()

    async def note(self, seen: Seen) -> None:
        if seen.held_out or seen.step is None:
            return
        self._groups[seen.step] += 1
        for chain in seen.group.trajectories:
            if chain.id in seen.credit:
                self._compare(seen, chain)
            elif seen.credit and self._counts(chain) and any(row.graded().size for row in chain.rows):
                text = f"it ended as {chain.outcome} with the reward {chain.reward}, and is not trained"
                self._left_out.add(Evidence(text, seen.group.id, chain.id, file=seen.file))

    def _counts(self, chain: Trajectory) -> bool:
        recipe = self.record.recipe
        if recipe is None:
            return False
        rollout = recipe.rollout
        if recipe.train.from_trajectories is not None or rollout.late_chains is LateChains.BASELINE:
            return False
        return bool(counted([chain], rollout)) and rollout.outcome_policy(chain.outcome) is OutcomePolicy.KEEP

    def _compare(self, seen: Seen, chain: Trajectory) -> None:
        self._chains += 1
        recipe = self.record.recipe
        # tokens that are too old are context then
        some = recipe is not None and recipe.rollout.late_chains is LateChains.BASELINE
        noted = {int(row["row"]): np.asarray(row["targets"], dtype=int) for row in seen.credit[chain.id]}
        for number, row in enumerate(chain.rows):
            expected, targets = row.graded(), noted.get(number, np.empty(0, dtype=int))
            self._tokens += targets.size
            others, missing = np.setdiff1d(targets, expected), np.setdiff1d(expected, targets)
            if others.size:
                text = f"{others.size} tokens were trained that were not sampled"
                self._others.add(Evidence(text, seen.group.id, chain.id, number, int(others[0]), seen.file))
            if missing.size and not some:
                text = f"{missing.size} of {expected.size} sampled tokens were not trained"
                self._missing.add(Evidence(text, seen.group.id, chain.id, number, int(missing[0]), seen.file))

    def findings(self) -> Iterator[Finding]:
        if places := self._others:
            text = f"in {places.total} rows tokens were trained that the policy did not sample"
            yield self.wrong(text, self._FIX, places.kept)
        if places := self._missing:
            text = f"in {places.total} rows sampled tokens were not trained"
            yield self.wrong(text, self._FIX, places.kept)
        if places := self._left_out:
            text = f"{places.total} chains that count were not trained, though others of their groups were"
            yield self.wrong(text, "look at what chooses the chains of a batch", places.kept)
        lost = {step: count - self._groups[step] for step, count in self.record.trained.items()}
        last = max(self.record.trained, default=0)
        # a running run saves the last ones a moment later
        done = self.record.summary.get("status") == "completed"
        lost = {step: count for step, count in lost.items() if count > 0 and (done or step < last)}
        if lost:
            text = f"{sum(lost.values())} groups that {len(lost)} steps trained are not among the trajectories"
            yield self.wrong(text, "copy the run folder again, with trajectories/*.jsonl and *.arrays")

    def looked_at(self) -> str:
        return f"{self._chains:,} chains, {self._tokens:,} trained tokens" if self._chains else ""


class GreedyCheck(Check):
    """Greedy chains of one evaluation with the same prompt must begin with the same turn."""

    topic = "greedy chains"
    needs = (HELD_OUT, TOKENS)

    def begin(self) -> None:
        self._first: dict[tuple[str, bytes], tuple[bytes, str]] = {}
        self._differ = Places()
        self._chains = self._compared = 0

    async def note(self, seen: Seen) -> None:
        for chain in seen.group.trajectories if seen.held_out == "greedy" else ():
            if not chain.rows or not chain.turns:
                continue
            self._chains += 1
            row = chain.rows[0]
            start, end = row.turn_spans()[0]
            ids = np.asarray(row.token_ids, dtype=np.int64)
            prompt, turn = ids[:start].tobytes(), ids[start:end].tobytes()
            before = self._first.setdefault((seen.file, prompt), (turn, chain.id))
            self._compared += before[1] != chain.id
            if before[0] != turn:
                text = f"it answers the prompt of chain {before[1]} in another way"
                self._differ.add(Evidence(text, seen.group.id, chain.id, 0, start, seen.file))

    def findings(self) -> Iterator[Finding]:
        if places := self._differ:
            text = f"{places.total} of {self._compared} greedy turns differ from others with the same prompt"
            fix = "set temperature 0; in half precision, a server's batches also change which token is the likeliest"
            yield self.warning(text, fix, places.kept)

    def looked_at(self) -> str:
        return f"{self._chains:,} chains, {self._compared:,} with a prompt of another" if self._chains else ""
