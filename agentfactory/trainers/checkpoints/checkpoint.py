"""The checkpoints of a run: schedule, pruning, and resuming."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from agentfactory.base.errors import SettingError
from agentfactory.rollout.text.load_renderer import FormatTokens
from agentfactory.trainers.checkpoints import checkpoint_folder
from agentfactory.trainers.checkpoints.checkpoint_writer import CheckpointWriter
from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.networks.token_rows import TokenNeeds
from agentfactory.trainers.processes.sharding import of_rank_0
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.learner_state import load_state

_NUMBERED = re.compile(r"(.*?)(\d+)", re.DOTALL)


@dataclass
class TrainState:
    """The history of the weights, over all processes and attempts of a run."""

    step: int = 0
    """Number of finished steps; also the version of the weights."""
    seconds: float = 0.0
    trained: set[str] = field(default_factory=set)
    """Ids of all groups that were trained (rank 0)."""
    groups: list[str] = field(default_factory=list)
    """Ids of trained groups that no earlier checkpoint includes."""
    labels: dict[str, int] = field(default_factory=dict)
    """The servers' labels of the versions; see agentfactory.rollout.inference.weight_versions.WeightVersions."""
    metrics: dict[str, Any] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    evaluated: int | None = None
    best: float | None = None
    """The highest evaluation of the metric that `train.keep_best` names."""

    def finish(self, step: int, groups: list[str], seconds: float) -> None:
        self.step = step
        self.seconds += seconds
        self.groups += groups
        self.trained.update(groups)

    def note_evaluation(self, step: int, figures: dict[str, float]) -> None:
        self.evaluated = step
        self.after = figures
        if step == 0:
            self.before = figures
        self.metrics |= figures

    def take_groups(self) -> list[str]:
        """Return, once, the ids of groups trained since the previous call."""
        groups, self.groups = self.groups, []
        return groups

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "trained": compact(self.trained), "version": self.step}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TrainState":
        """Invert `to_json`; ignore other keys. `groups` is empty: an earlier checkpoint includes them."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        return cls(**{**known, "trained": set(expand(data["trained"])), "groups": []})


def compact(ids: Iterable[str]) -> list[list[str]]:
    """Compact ids to ranges [first, last] of ids that differ only in a number at their end, without a gap."""
    ranges: list[list[str]] = []
    after = ""
    for prefix, digits in sorted(map(_split, ids), key=lambda parts: (parts[0], len(parts[1]), parts[1])):
        if ranges and prefix + digits == after:
            ranges[-1][1] = after
        else:
            ranges.append([prefix + digits] * 2)
        after = f"{prefix}{int(digits) + 1:0{len(digits)}d}" if digits else ""
    return ranges


def expand(ranges: list[list[str]]) -> list[str]:
    ids: list[str] = []
    for first, last in ranges:
        prefix, digits = _split(first)
        numbers = range(int(digits), int(_split(last)[1]) + 1) if first != last else ()
        ids += [f"{prefix}{number:0{len(digits)}d}" for number in numbers] or [first]
    return ids


def _split(name: str) -> tuple[str, str]:
    match = _NUMBERED.fullmatch(name)
    return (match[1], match[2]) if match else (name, "")


logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a training loop, to save to and to resume from; every process has one. A step waits for a copy
    of the learner, but not for its writing. A checkpoint counts once it is durable: then `path` names it, and
    `take_groups` returns its groups."""

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        train: TrainConfig,
        info: dict[str, Any] | None = None,
        files: Callable[[], Mapping[str, Path]] = dict,
        resume: Path | None = None,
    ) -> None:
        """`info` (JSON) is added to each checkpoint, and so are the lengths of `files`, to which the run appends, so
        that a resumed run can truncate them. `resume` is the checkpoint to continue from."""
        self.train_state = TrainState.from_json(checkpoint_folder.read_info(resume)) if resume else TrainState()
        self.path = resume
        """The newest checkpoint known to be durable."""
        self.saved_step = self.train_state.step
        """The step of the newest checkpoint, durable or being written."""
        self._folder = folder
        self._tokenizer = tokenizer
        self._writer = CheckpointWriter(folder, tokenizer)
        self._in_writing: list[str] = []
        self._durable: list[str] = []
        self._train = train
        self._info = dict(info or {})
        self._files = files
        self._resume = resume

    def note_renderer(self, chat_template: str, renderer: dict[str, Any]) -> None:
        """Set the chat template and the description of its renderer that each checkpoint contains (rank 0)."""
        self._tokenizer.chat_template = chat_template
        self._info["renderer"] = renderer

    def token_needs(self, accelerator: Accelerator) -> TokenNeeds | None:
        """Return, in all ranks, the tokens that rank 0's renderer needs; None if unknown. Every process calls it."""
        found = of_rank_0(accelerator, FormatTokens.of_info(self._info.get("renderer", {})))
        return None if found is None else TokenNeeds(found, self._tokenizer)

    def due(self, step: int) -> bool:
        every = self._train.checkpoint_every
        return step == self._train.steps or (every > 0 and step % every == 0)

    def is_best(self, accelerator: Accelerator) -> bool:
        """Return, in all ranks, whether the last step has the best evaluation so far. Every process calls it."""
        is_best, state = False, self.train_state
        if accelerator.is_main_process and state.evaluated == state.step > 0:
            names = (name for name in checkpoint_folder.metric_names(self._train.keep_best) if name in state.after)
            value = checkpoint_folder.figure(state.after, next(names, ""))
            if value is not None and (state.best is None or value > state.best):
                state.best, is_best = value, True
        return of_rank_0(accelerator, is_best)

    def restore(self, learner: Learner) -> None:
        """Restore `learner` from the resumed checkpoint; every process calls it. Does nothing in a new run."""
        if self._resume:
            load_state(self._resume, learner)

    def save(self, learner: Learner, only_best: bool = False) -> None:
        """Copy the learner, and write a checkpoint of the last finished step in the background; then delete checkpoints
        that the recipe does not keep. With `only_best`, it is kept as long as it is the best.

        Every process calls it; waits for the previous checkpoint, and raises its error. Raises SettingError if
        train.keep_best names a metric that the run does not have."""
        self.wait()
        main, step = learner.accelerator.is_main_process, self.train_state.step
        info: dict[str, Any] = {}
        files = self._files() if main else {}
        if main:
            sizes = {name: file.stat().st_size for name, file in files.items()}
            state = {**self.train_state.to_json(), checkpoint_folder.ONLY_BEST: only_best}
            info = {**self._info, **state, "files": sizes}
        self._writer.begin(step, learner, info, files.values(), self._prune)
        self._in_writing = self.train_state.take_groups()
        self.saved_step = step
        if main:
            self._check_keep_best()

    def poll(self, accelerator: Accelerator) -> None:
        """Check, without waiting, whether the checkpoint is durable; raise as `wait` does. Every process calls it."""
        # all processes note it, or raise its error, at the same step
        if self._writer.is_writing and of_rank_0(accelerator, self._writer.is_done):
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is durable. Raises, in all processes, the error of writing it."""
        if self._writer.is_writing:
            self.path = self._writer.wait()
            self._durable += self._in_writing

    def take_groups(self) -> list[str]:
        """Return, once each, the ids of groups whose training a durable checkpoint includes."""
        groups, self._durable = self._durable, []
        return groups

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Finish the checkpoint that is being written before this context ends, however it ends."""
        try:
            yield
            self.wait()
        except BaseException:
            try:
                self.wait()
            except Exception as error:  # boundary: it must not hide the error that ends the run
                logger.error("the last checkpoint was not written: %s", error)
            raise
        finally:
            self._writer.close()

    def _prune(self) -> None:
        found = checkpoint_folder.checkpoints(self._folder)
        best = checkpoint_folder.find_best(found, self._train.keep_best)
        checkpoint_folder.prune(self._folder, self._train.keep_last, best.path if best else None)

    def _check_keep_best(self) -> None:
        wanted, train_state = self._train.keep_best, self.train_state
        if wanted is None or wanted == checkpoint_folder.AUTO:
            return
        known = {*train_state.metrics, *train_state.after}
        not_yet = train_state.evaluated is None and wanted.startswith("eval/")
        if wanted not in known and not not_yet:
            fix = f"name one of {', '.join(sorted(known))}"
            raise SettingError("train.keep_best", f"the run has no metric {wanted!r}", fix)
