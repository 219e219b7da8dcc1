"""The subprocess that generates and verifies tasks of reasoning-gym.

It reads requests as JSON lines on stdin and answers with JSON lines:

- `rows`: a list of data sets with the numbers of tasks to leave out and to give. A line per task, then `{"end": true}`,
  or `{"field", "problem", "fix"}`.
- `task`, `question`, `answer`: a line with the task's own answer (`own`), or with the `problem` if the task cannot be
  generated again; then a line with the answer's `score`, or with the exception that the verifier `raised`.

A task is generated again for its verification, because its metadata has values that JSON changes. Several data sets
depend on the order of sets, so it needs PYTHONHASHSEED=0. The kernel's alarm ends a process that takes too
long; the end of stdin ends one whose parent is gone.
"""

import dataclasses
import decimal
import difflib
import json
import logging
import os
import random
import re
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from typing import Any

from reasoning_gym.coaching.base_curriculum import BaseCurriculum
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

from agentfactory.base.processes import parent_watch
from agentfactory.base.processes.memory import ENDS, peak_bytes
from agentfactory.worlds.reasoning_gym import answers

MEMORY_BYTES = 4 << 30
TASK_SECONDS = 60.0
_TRIES = 20
"""Most tasks that are generated per task that is needed, to find different ones."""
_NONSENSE = "?"
_OURS = ("seed", "size")
_OWN_FILE = re.compile(r"\w[\w.-]*")
_GROWN_BYTES = 1 << 30
"""Growth of memory, such as of sympy's caches, after which the process ends and another takes its place."""

Spec = dict[str, Any]
"""A data set: `name`, `level`, `options`, `seed`."""


class Refused(Exception):
    """An invalid field below `datasets`, its problem and the fix."""


def main() -> None:
    parent_watch.follow_parent()
    logging.disable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    # generators and verifiers print
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    answers.install()
    print(json.dumps({"ready": True}), file=replies)
    before = peak_bytes()
    for line in sys.stdin:
        request = json.loads(line)
        for answer in _rows(request["rows"]) if "rows" in request else _verdict(request):
            signal.setitimer(signal.ITIMER_REAL, 0)
            grown = "rows" not in request and peak_bytes() - before > _GROWN_BYTES
            print(json.dumps(answer | ({ENDS: True} if grown else {})), file=replies)


def _rows(specs: list[Spec]) -> Iterator[dict[str, Any]]:
    try:
        for spec in specs:
            yield from _tasks(spec, spec.pop("skip"), spec.pop("count"))
        yield {"end": True}
    except Refused as error:
        field, problem, fix = error.args
        yield {"field": field, "problem": problem, "fix": fix}


def _tasks(spec: Spec, skip: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` different tasks, after the first `skip`. Raise Refused if the data set has too few."""
    wanted = skip + count
    seen: set[str] = set()
    size = done = 0
    while len(seen) < wanted:
        if size >= _TRIES * wanted:
            problem = f"it has {len(seen)} different tasks in {size} with these options, not {wanted}"
            fix = "lower size (and skip), or choose options or a level with more tasks"
            raise Refused(spec["name"], problem, fix)
        size = max(2 * size, wanted)
        dataset = data_set({**spec, "size": size})
        for index in range(done, size):
            entry, _ = _generated(dataset, index, spec["name"])
            # an `Integral` is the integrand again, which any answer could repeat
            if entry["question"] in seen or "Integral(" in (entry["answer"] or ""):
                continue
            if not seen:
                _check_verifier(dataset, entry, spec["name"])
            seen.add(entry["question"])
            if len(seen) > skip:
                yield {
                    "question": entry["question"],
                    "answer": entry["answer"],
                    "metadata": json.loads(json.dumps(entry["metadata"], default=str)),
                    "reasoning_gym": {**spec, "size": size, "index": index},
                }
            if len(seen) == wanted:
                return
        done = size


def _generated(dataset: ProceduralDataset, index: int, name: str) -> tuple[dict[str, Any], decimal.Context]:
    """Return a task, and the context of decimal numbers in which it is verified: a generator may set its precision."""
    signal.setitimer(signal.ITIMER_REAL, TASK_SECONDS)
    try:
        with decimal.localcontext(decimal.Context()):
            entry: dict[str, Any] = dataset[index]
            return entry, decimal.getcontext().copy()
    except Exception as error:  # boundary: a generator's
        problem = f"task {index} cannot be generated: {type(error).__name__}: {error}"
        raise Refused(name, problem, "change its options or level") from error


def _check_verifier(dataset: ProceduralDataset, entry: dict[str, Any], name: str) -> None:
    """Raise Refused if the verifier gives a full score to any text, as that of game_of_life_halting does in 0.1.25."""
    score = 0.0
    with suppress(Exception):  # a verifier that raises does not accept it
        score = dataset.score_answer(_NONSENSE, entry)
    if score == 1.0:
        problem = f"its verifier gives a full score to any answer, such as {_NONSENSE!r}"
        raise Refused(name, problem, "leave it out: there is nothing to learn")


def data_set(spec: Spec) -> ProceduralDataset:
    """Create a data set from its level and options. Raise Refused if it does not exist, or they are invalid."""
    name, level, options = spec["name"], spec["level"], dict(spec["options"])
    if name not in DATASETS or name == "composite":
        close = difflib.get_close_matches(name, DATASETS, 1)
        fix = f"did you mean {close[0]}?" if close else f"the data sets are {', '.join(sorted(DATASETS))}"
        if name == "composite":
            raise Refused(name, "it is a mix of data sets", "name these, each with its weight")
        raise Refused(name, "reasoning-gym has no such data set", fix)
    made, config_class = DATASETS[name]
    fields = [field.name for field in dataclasses.fields(config_class) if field.name not in _OURS]
    for option in options:
        if option in _OURS:
            raise Refused(f"{name}.options.{option}", "it is set for all data sets", f"set reasoning_gym.{option}")
        if option.endswith("_file") and not _OWN_FILE.fullmatch(str(options[option])):
            raise Refused(f"{name}.options.{option}", f"got {options[option]!r}", "name a file of reasoning-gym")
        if option not in fields:
            close = difflib.get_close_matches(option, fields, 1)
            fix = f"did you mean {close[0]}?" if close else f"its options are {', '.join(fields) or 'none'}"
            raise Refused(f"{name}.options.{option}", "it has no such option", fix)
    ours = {"seed": random.Random(spec["seed"]).getrandbits(31), "size": spec["size"]}
    signal.setitimer(signal.ITIMER_REAL, TASK_SECONDS)
    try:
        config = config_class(**ours, **options) if level is None else _of_level(name, level, ours, options)
        if hasattr(config, "validate"):
            config.validate()
        return made(config)
    except Refused:
        raise
    except Exception as error:  # boundary: the library's checks are assertions, and user values have any type
        reason = f"{type(error).__name__}: {error}"
        if level is not None and not options:
            raise Refused(f"{name}.level", f"got {level}, whose options it refuses: {reason}", "use another") from error
        at = "" if level is None else f" at level {level}"
        fix = f"correct them; there are {', '.join(fields) or 'none'}"
        raise Refused(f"{name}.options", f"got {options}{at}: {reason}", fix) from error


def _of_level(name: str, level: int, ours: dict[str, Any], options: dict[str, Any]) -> Any:
    if name not in CURRICULA:
        raise Refused(f"{name}.level", "it has no levels", "set its options instead")
    curriculum: BaseCurriculum = create_curriculum(name)
    most = max((len(attribute.levels) - 1 for attribute in curriculum.attributes.values()), default=0)
    if level > most:
        raise Refused(f"{name}.level", f"got {level}", f"use 0 to {most}")
    curriculum.set_global_level(level)
    return dataclasses.replace(curriculum.generate_configuration(ours), **options)


@lru_cache(maxsize=16)
def _cached_set(spec: str) -> ProceduralDataset:
    return data_set(json.loads(spec))


@lru_cache(maxsize=64)
def _cached_task(spec: str, index: int) -> tuple[dict[str, Any], decimal.Context]:
    return _generated(_cached_set(spec), index, json.loads(spec)["name"])


def _verdict(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    task = dict(request["task"])
    index = task.pop("index")
    spec = json.dumps(task)
    try:
        entry, context = _cached_task(spec, index)
    except Refused as error:
        yield {"problem": ": ".join(map(str, error.args))}
        return
    if not request["question"].startswith(entry["question"]):
        yield {"problem": "the installed reasoning-gym generates another question for it"}
        return
    yield {"own": entry["answer"]}
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        # a copy, because verifiers may change it
        with decimal.localcontext(context):
            score = answers.score(_cached_set(spec), request["answer"], deepcopy(entry))
        yield {"score": score}
    except Exception as error:  # boundary: a verifier may raise anything
        yield {"raised": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
