"""The checkpoints of a run: schedule, writing in the background, pruning, and resuming."""

import json
import logging
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import DiskError, writing
from agentfactory.rollout.images.families import copy_processor
from agentfactory.rollout.text.load_renderer import FormatTokens
from agentfactory.trainers.checkpoints import checkpoint_folder
from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.networks.lora import TokenNeeds
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.networks.vision_tower import sees
from agentfactory.trainers.processes.accelerator import PATIENCE, of_rank_0
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.learner_state import TRAINING_STATE, Part, load_state, part_of, write_part
from agentfactory.trainers.update.offload import HostBuffer

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


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
    prefix = name.rstrip(string.digits)
    return prefix, name[len(prefix) :]


class CheckpointWriter:
    """A writer of checkpoints to a folder, one at a time. All processes call its methods in the same order.

    A checkpoint is a folder step-000080 (for step 80): the model in the transformers format in the policy's dtype, or
    the adapter in peft's, the tokenizer with its chat template, `trainer_state.json`, the learner's state, and the
    digests of all files. Rank 0 writes it, except for other ranks' parts of the state. Each process writes in a thread;
    the threads agree through a process group of their own, because their collective calls must not mix with others."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if several else None
        self._rank = dist.get_rank() if several else 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._buffer: HostBuffer | None = None
        self._writing: Future[Path] | None = None

    @property
    def is_writing(self) -> bool:
        return self._writing is not None

    @property
    def is_done(self) -> bool:
        return self._writing is None or self._writing.done()

    def begin(
        self,
        step: int,
        learner: Learner,
        info: dict[str, Any],
        files: Iterable[Path] = (),
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy the learner and write the checkpoint of `step` in the background, after the previous one is written.

        On rank 0, `info` (JSON) goes to `trainer_state.json`, `files` are made durable before the checkpoint, and
        `after` is called once it is durable. Raises the error of the previous one."""
        self.wait()
        path = checkpoint_folder.checkpoint_path(self._folder, step)
        part, weights = part_of(learner), learner.policy.gather()
        own = [value.to_local() if isinstance(value, DTensor) else value for value in part.values()]
        named = weights.meta if self._rank == 0 else {}
        self._buffer = self._buffer or HostBuffer(learner.accelerator.device)
        gathered = (value for _, value in weights.stream())
        copies = self._buffer.copy([*own, *named.values()], chain(own, gathered if self._rank == 0 else ()))
        weights.finish()
        for (key, value), copied in zip(part.items(), copies[: len(own)], strict=True):
            if isinstance(value, DTensor):
                inner, context = value.__tensor_flatten__()
                parts = {name: getattr(value, name) for name in inner} | {"_local_tensor": copied}
                copied = DTensor.__tensor_unflatten__(parts, context, value.size(), value.stride())
            part[key] = copied
        model = dict(zip(named, copies[len(own) :], strict=True))
        fill = partial(self._fill, learner.policy, model, {"step": step, **info}, list(files))
        self._writing = self._thread.submit(self._write, path, part, fill, after)

    def wait(self) -> Path | None:
        """Wait until the begun checkpoint is durable; return its path, or None if there is none. Raises, in all
        processes, the error of writing it (DiskError), after which nothing of it is left."""
        if self._writing is None:
            return None
        try:
            return self._writing.result()
        finally:
            # Ctrl-C ends the wait, but not the writing
            if self._writing.done():
                self._writing = None

    def close(self) -> None:
        """Free the memory of the copy, once nothing is being written."""
        if self._buffer is not None and self._writing is None:
            self._buffer.free()

    # ---- in the background

    def _write(self, path: Path, part: Part, fill: Callable[[Path], dict[str, str]], after: Callable[[], None]) -> Path:
        aside, digests = checkpoint_folder.partial_path(path), dict[str, str]()
        with ExitStack() as stack, writing(path):

            def open_folder() -> None:
                if self._rank == 0:
                    stack.enter_context(checkpoint_folder.written_aside(path, digests))

            def end() -> None:
                # rank 0 gives the folder its name
                stack.close()
                if self._rank == 0:
                    after()

            self._together(path, open_folder)
            write_part(part, aside / TRAINING_STATE, self._group)
            for found in self._together(path, partial(fill, aside)):
                digests.update(found)
            self._together(path, end)
        return path

    def _fill(
        self, policy: Policy, weights: dict[str, Tensor], info: dict[str, Any], files: list[Path], aside: Path
    ) -> dict[str, str]:
        """Write all but the state (rank 0), or return the digests of this process's part of the state (others)."""
        if self._rank != 0:
            # as FileSystemWriter names them
            own, names = f"{TRAINING_STATE}/__{self._rank}_", checkpoint_folder.files_of(aside)
            return {name: checkpoint_folder.digest(aside / name) for name in names if name.startswith(own)}
        _write_model(aside, policy, weights)
        self._tokenizer.save_pretrained(aside)
        text = json.dumps(info, indent=2, ensure_ascii=False)
        (aside / checkpoint_folder.INFO).write_text(text + "\n", encoding="utf-8")
        for file in files:
            checkpoint_folder.flush(file)
        return {}  # its digests are computed with the rest

    def _together(self, path: Path, act: Callable[[], Result]) -> list[Result]:
        """Call `act` in every process; return the results by rank. Raises an error of any process in all of them."""
        result: Result | None = None
        error: Exception | None = None
        try:
            with writing(path):
                result = act()
        except Exception as caught:  # boundary: the other processes must know
            error = caught
        outcomes: list[Any] = [(result, error)]
        if self._group is not None:
            # not every error can be sent
            told = error if error is None or isinstance(error, DiskError) else RuntimeError(repr(error))
            outcomes = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(outcomes, (result, told), group=self._group)
        if error is not None:
            raise error
        for _, other in outcomes:
            if other is not None:
                raise other
        return [found for found, _ in outcomes]


def _write_model(folder: Path, policy: Policy, weights: dict[str, Tensor]) -> None:
    if policy.is_lora:
        policy.save_adapter(folder, weights)
        return
    policy.network.save_pretrained(folder, state_dict=weights)
    if sees(policy.network.config):
        copy_processor(policy.network.name_or_path, folder)
    # transformers records the precision of the weights in memory (float32), not of those that it wrote
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["dtype"] = str(policy.dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class Checkpoints:
    """The checkpoints of a training loop, in every process. A step waits for a copy of the learner, not for its
    writing. A checkpoint counts once it is durable: then `path` names it, and `take_groups` returns its groups."""

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

    def token_needs(self, await_renderer: Callable[[], None] = lambda: None) -> TokenNeeds | None:
        """Return, in all ranks, the tokens that rank 0's renderer needs; None if unknown. Every process calls it."""
        await_renderer()
        found = of_rank_0(FormatTokens.of_info(self._info.get("renderer", {})))
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
        return of_rank_0(is_best)

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
        wanted, known = self._train.keep_best, {*self.train_state.metrics, *self.train_state.after}
        if main and wanted is not None and wanted != checkpoint_folder.AUTO:
            not_yet = self.train_state.evaluated is None and wanted.startswith("eval/")
            if wanted not in known and not not_yet:
                fix = f"name one of {', '.join(sorted(known))}"
                raise SettingError("train.keep_best", f"the run has no metric {wanted!r}", fix)

    def poll(self) -> None:
        """Check, without waiting, whether the checkpoint is durable; raise as `wait` does. Every process calls it."""
        # all processes note it, or raise its error, at the same step
        if self._writer.is_writing and of_rank_0(self._writer.is_done):
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
