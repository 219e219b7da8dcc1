"""A mutation fuzzer of the data corpus. Every mutant loads, or is refused with an error of ours that names file, row
and fix; and what is trained is what a rendering without our loader gives, or a notice tells the difference.

`python -m tests.data_corpus.fuzz --seconds 1200` runs for 20 minutes, and prints what it found."""

import argparse
import copy
import csv
import gzip
import io
import json
import logging
import re
import shutil
import tempfile
import time
import traceback
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from agentfactory.base.errors import SettingError
from agentfactory.base.run_notices import notice_of
from agentfactory.launching.progress import handled_by
from agentfactory.rollout.config import DataConfig
from agentfactory.rollout.data import conversation_of, load_tasks
from agentfactory.rollout.text.load_renderer import make_renderer
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.text.templates import RenderError
from agentfactory.trainers.loop.sft import conversation_rows
from tests.data_corpus.cases import CASES, DEEP, Case, Rows, compressed, lines
from tests.data_corpus.reference import Talk, Unreadable, decoded, render, rows_of, talk_of, trained, without_nulls
from tests.model_families import FAMILIES, REFUSED, Family, tokenizer_of
from tests.mutants import JUNK, Mutants, keys_of

ENDINGS = (".jsonl", ".jsonl", ".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".csv.gz", ".JSON", ".PARQUET")
TEMPLATES = ("trl:qwen2_5", "trl:qwen3", "trl:llama3_1", "mistral_nemo", "qwen3_coder", "trl:gemma3")
PIECES = ("", '"', "\\", "{", "]", "\\ud800", "\0", "null", "1e999", "\n", ",", ";", "\ufeff", "\u2028", "\r", "é")
WORDS = (
    *("question", "messages", "prompt", "completion", "conversations", "chosen", "text", "system", "answer", "images"),
    *("role", "content", "tool_calls", "function", "name", "arguments", "tools", "parameters", "properties", "type"),
    *("weight", "loss", "reasoning", "thinking", "reasoning_content", "function_call", "tool_call_id", "id", "args"),
    *("input", "index", "info", "enum", "default", "required", "$ref", "anyOf", "items", "strict", "train", "mask"),
)
VALUES: tuple[Any, ...] = (
    *JUNK,
    *("assistant", "tool", "user", "system", "function", "<image>", "[]", "{}", "[{}]", '{"a": 1}', " ", "\r\n", "😀"),
    *([{"role": "user", "content": "b"}], {"role": "assistant", "content": "c"}, [{"type": "text", "text": "d"}]),
    *("<|im_end|>", "<think>\na\n</think>\n\nb", "<tool_call>", "[TOOL_CALLS]", "</s>", "{{ x }}", 1, 2.0, -0.0, 1e-7),
    *({"name": "add", "arguments": {"left": 2, "right": 3}}, [{"name": "add", "arguments": "{}"}], "\x85", "null"),
)


class Fuzzer:
    """Tries mutants of the corpus. `found` counts the outcomes, `faults` are the broken promises."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._cases = [case for case in CASES if case not in DEEP]
        words = [*WORDS, *sorted({key for case in self._cases for key in keys_of(case.content)})]
        self.mutants = Mutants(seed, words, VALUES, PIECES)
        self.random = self.mutants.random
        self.folder = folder
        self.found: Counter[str] = Counter()
        self.faults: list[str] = []
        self.notices: list[str] = []
        self._good = [case for case in self._cases if isinstance(case.outcome, list) and isinstance(case.content, list)]

    def hear(self, record: logging.LogRecord) -> None:
        """Collect a notice to the user."""
        if notice := notice_of(record):
            self.notices.append(str(notice))

    def step(self) -> None:
        """Try one mutant."""
        case = self.random.choice(self._good if self.random.random() < 0.5 else self._cases)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        kind, mutated, path = self._written(case)
        columns = dict(case.columns)
        if self.random.random() < 0.05:
            columns[self.random.choice(("question", "messages", "answer"))] = self.random.choice(WORDS)
        self.notices.clear()
        try:
            self.found[f"{kind}: {self._tried(path, columns, mutated)}"] += 1
        except Exception:
            shown = path.read_bytes()[:3000] if kind != "row, .parquet" else rows_of(path, {})
            text = f"{case.name!r}, {path.name}, columns {columns}: {shown!r}\nnotices: {self.notices}"
            self.faults.append(f"{text}\n{traceback.format_exc()}")
            self.found[f"{kind}: FAULT"] += 1

    def _written(self, case: Case) -> tuple[str, int | None, Path]:
        """Write a mutant. Return its kind, the number of the mutated row, if known, and its path."""
        if not isinstance(case.content, list) or not case.content or self.random.random() < 0.1:
            path = case.write(self.folder)
            content = path.read_bytes().decode("latin-1")
            torn = self.mutants.torn(content[:100_000]).encode("latin-1", "replace")
            path.write_bytes(compressed(torn.decode("latin-1")) if self.random.random() < 0.05 else torn)
            return "torn file", None, path
        others = [row for good in self._good if good.columns == case.columns for row in good.content]
        rows: list[Any] = self.random.choices(others, k=self.random.choice((0, 0, 1, 3))) if others else []
        place = self.random.randrange(len(rows) + 1)
        row = self.random.choice(case.content)
        rows.insert(place, self.mutants.of(row) if self.random.random() < 0.5 else self._reworded(row))
        path = self.folder / f"a{self.random.choice(ENDINGS)}"
        ending = path.name.lower().removeprefix("a").removesuffix(".gz")
        try:
            content = self._content(rows, ending)
        except (pyarrow.ArrowException, ValueError, TypeError, OverflowError, AttributeError):
            # no table has these rows
            path, content = self.folder / "a.jsonl", self._content(rows, ".jsonl")
            ending = ".jsonl"
        if ending != ".parquet" and self.random.random() < 0.1:
            content = b"\xef\xbb\xbf" + content
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        # tables change the other rows, too
        return f"row, {ending}", None if ending in (".csv", ".parquet") else place + 1, path

    def _reworded(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row with other texts in one message."""
        row = copy.deepcopy(row)
        messages = row.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            return row | {"question": self._words()}
        message = self.random.choice(messages)
        if message.get("role") == "assistant" and self.random.random() < 0.5:
            message[self.random.choice(("weight", "reasoning_content", "name"))] = self.random.choice((0, 0.5, "a", 2))
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls and self.random.random() < 0.5:
            called = calls[0].get("function") or calls[0]
            called["arguments"] = {self._words(): self._words(), "n": self.random.choice(VALUES)}
            row.pop("tools", None)
        else:
            message["content"] = self._words()
        if self.random.random() < 0.1:
            messages.insert(self.random.randrange(len(messages) + 1), copy.deepcopy(self.random.choice(messages)))
        return row

    def _words(self) -> str:
        texts = [value for value in VALUES if isinstance(value, str) and value != "\ud800"]
        return self.random.choice(("", " ", "\n")).join(self.random.choices(texts, k=self.random.choice((1, 2, 4))))

    def _content(self, rows: Rows, ending: str) -> bytes:
        if ending == ".parquet":
            raw = pyarrow.BufferOutputStream()
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), raw)
            return bytes(raw.getvalue())
        if ending == ".csv":
            names = list(dict.fromkeys(name for row in rows for name in row))
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, names)
            writer.writeheader()
            for row in rows:
                cells = {name: "" if row.get(name) is None else row[name] for name in names}
                writer.writerow({n: c if isinstance(c, str) else json.dumps(c) for n, c in cells.items()})
            return text.getvalue().encode()
        end = self.random.choice(("\n", "\r\n", "\n\n"))
        return (json.dumps(rows) if ending == ".json" else lines(rows).replace("\n", end)).encode()

    def _tried(self, path: Path, columns: dict[str, str], mutated: int | None) -> str:
        try:
            tasks = load_tasks(DataConfig(path=str(path), columns=columns), tell=True)
        except SettingError as error:
            _check_error(error, path, mutated, columns)
            return "refused"
        given = rows_of(path, columns)
        assert len(given) == len(tasks), f"{len(given)} rows, and {len(tasks)} tasks"
        for row, task in zip(given, tasks, strict=True):
            shared = (row.keys() | task.keys()) - {"messages", "tools", "images"}
            for name in shared if "question" in task else shared - {"question"}:
                assert same(row[name], task[name]), f"{name}: {row[name]!r}, and {task[name]!r}"
        if not all("messages" in task for task in tasks):
            return f"tasks{', told' if self.notices else ''}"
        return self._taught(given, tasks)

    def _taught(self, rows: list[dict[str, Any]], tasks: list[dict[str, Any]]) -> str:
        """Compare what supervised fine-tuning learns from rows with the reference."""
        name = self.random.choice(TEMPLATES)
        renderer = renderer_of(name, any(task.get("tools") for task in tasks))
        if renderer is None:
            return "template refused"
        try:
            learned = conversation_rows(tasks, renderer)
        except SettingError as error:
            if not re.match(r"data\.path: row \d+\b.*; fix: .", str(error), re.DOTALL):
                raise
            return "conversation refused"
        outcomes = set()
        for row, task, tokens in zip(rows, tasks, learned, strict=True):
            if task.get("images"):
                outcomes.add("images")
                continue
            outcomes.add(self._compared(renderer, talk_of(row), task, tokens))
        return f"trained: {', '.join(sorted(outcomes))}"

    def _compared(self, renderer: Renderer, talk: Talk, task: dict[str, Any], tokens: Any) -> str:
        told = " ".join(self.notices)
        for key in talk.unread:
            shown = key.encode("utf-8", "replace").decode()
            assert re.search(rf"have .*{re.escape(shown)}.*, which models do not get", told), f"{key} is lost silently"
        outcome = "equal"
        try:
            whole, turns = render(renderer.tokenizer, renderer.template.source, talk)
        except Unreadable:
            raise
        except Exception as error:
            whole, turns, outcome = "", [], f"no reference ({str(error)[:40]})"
        text = decoded(renderer.tokenizer, tokens.token_ids)
        if outcome == "equal" and not (whole.startswith(text) and not whole[len(text) :].strip()):
            assert re.search(r"\bnulls? (dropped|kept)", told), f"silent change of\n{whole}\nto\n{text}"
            cleaned = talk_of(task | {"tools": [spec.to_openai() for spec in conversation_of(task, 1)[1]]})
            # the order of arguments and of schemas counts, and that of a message's fields does not
            talks = [(t.tools, [sorted(message.items()) for message in t.messages]) for t in (talk, cleaned)]
            expected = [without_nulls([list(tools), *map(dict, messages)]) for tools, messages in talks]
            assert same(*expected), f"more than nulls changed: {expected}"
            whole, turns = render(renderer.tokenizer, renderer.template.source, cleaned)
            assert whole.startswith(text), f"{whole}\nand\n{text}"
            assert not whole[len(text) :].strip()
            outcome = "equal without padding, told"
        if not any(w for w, m in zip(talk.weights, talk.messages, strict=True) if m["role"] != "assistant"):
            runs = trained(renderer.tokenizer, tokens)
            if outcome.startswith("equal"):
                assert len(runs) == len(turns), f"{runs}\nand\n{turns}"
                for (run, weight), (turn, expected_weight) in zip(runs, turns, strict=True):
                    assert weight == expected_weight
                    assert turn.startswith(run), f"{turn!r}, and {run!r}"
                    assert not turn[len(run) :].strip(), f"{turn!r}, and {run!r}"
        return outcome


@cache
def renderer_of(name: str, tools: bool) -> Renderer | None:
    """The renderer of a template; None if it supports no tools."""
    family = next((f for f in FAMILIES if f.template == name), None) or Family("", name, "")
    try:
        return make_renderer(tokenizer_of(family), tools=tools)
    except RenderError:
        assert tools
        assert name in [template for template, _ in REFUSED.values()]
        return None


def same(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal, NaN included, with the same types."""
    return repr(a) == repr(b)


def _check_error(error: SettingError, path: Path, mutated: int | None, columns: dict[str, str]) -> None:
    text = str(error)
    assert error.field.startswith("data."), text
    assert error.fix, text
    assert path.name in text, text
    assert len(text) < 1500, text
    assert "Traceback" not in text
    named = re.search(rf"\brow (\d+)\b|{re.escape(path.name)}:(\d+)", text)
    whole = ("holds no rows", "not a list of rows", "is damaged", "separates its columns", "as parquet", "is neither")
    assert named or any(part in text for part in whole), f"no row is named: {text}"
    if mutated and named and named[1] and error.field == "data.path":
        assert int(named[1]) == mutated or columns, f"row {mutated} is wrong, and not: {text}"


def fuzz(seed: int, seconds: float, folder: Path, steps: int | None = None) -> Fuzzer:
    """Run a fuzzer for `seconds`, or for `steps`."""
    fuzzer, until = Fuzzer(seed, folder), time.monotonic() + seconds
    done, listener = 0, logging.Handler()
    listener.emit = fuzzer.hear  # type: ignore[method-assign]
    with handled_by(listener):
        while time.monotonic() < until if steps is None else done < steps:
            fuzzer.step()
            done += 1
    return fuzzer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    options = parser.parse_args()
    logging.disable(logging.NOTSET)
    with tempfile.TemporaryDirectory() as place:
        ended = fuzz(options.seed, options.seconds, Path(place) / "data")
    for fault in ended.faults[:20]:
        print(fault.encode("utf-8", "backslashreplace").decode())
    print(f"seed {options.seed}: {sum(ended.found.values())} mutants, {len(ended.faults)} faults")
    for outcome, count in ended.found.most_common():
        print(f"{count:8} {outcome}")
    raise SystemExit(bool(ended.faults))
