"""The checkpoints of a run: schedule, pruning, and resuming. They are folders that transformers, peft, the server and
the next stage load unchanged, and from which training resumes exactly.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import distributed as dist
from transformers import PreTrainedTokenizerBase

from agentfactory.base.errors import SettingError
from agentfactory.rollout.text.load_renderer import FormatTokens
from agentfactory.trainers.checkpoints.best_checkpoint import AUTO, figure, find_best, metric_names
from agentfactory.trainers.checkpoints.checkpoint_folder import ONLY_BEST, checkpoints, prune, read_info
from agentfactory.trainers.checkpoints.checkpoint_writer import CheckpointWriter
from agentfactory.trainers.checkpoints.train_state import TrainState
from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.networks.token_rows import TokenNeeds
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.learner_state import load_state

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a training loop, to save to and to resume from. Every process has one.

    A step waits for a copy of the learner, but not for its writing. A checkpoint counts once it is durable: then `path`
    names it, and `take_groups` returns its groups.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        train: TrainConfig,
        info: dict[str, Any] | None = None,
        files: Callable[[], Mapping[str, Path]] = dict,
        resume: Path | None = None,
    ) -> None:
        """`info` (JSON) is added to each checkpoint. `files` are the files that the run appends to: a checkpoint
        records their lengths, so that a resumed run can truncate them. `resume` is the checkpoint to continue from."""
        self.train_state = TrainState.from_json(read_info(resume)) if resume else TrainState()
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
        self._info = {**(info or {})}
        self._files = files
        self._resume = resume

    def note_renderer(self, chat_template: str, renderer: dict[str, Any]) -> None:
        """Set the chat template and the description of its renderer that each checkpoint contains (rank 0)."""
        self._tokenizer.chat_template = chat_template
        self._info["renderer"] = renderer

    def token_needs(self, accelerator: Accelerator) -> TokenNeeds | None:
        """Return, in all ranks, the tokens that rank 0's renderer needs; None if it is unknown. Every process calls
        it."""
        found = [FormatTokens.of_info(self._info.get("renderer", {}))]
        if accelerator.num_processes > 1:
            dist.broadcast_object_list(found, src=0)
        return None if found[0] is None else TokenNeeds(found[0], self._tokenizer)

    def due(self, step: int) -> bool:
        """Return whether the recipe requests a checkpoint of `step`."""
        every = self._train.checkpoint_every
        return step == self._train.steps or (every > 0 and step % every == 0)

    def is_best(self, accelerator: Accelerator) -> bool:
        """Return, in all ranks, rank 0's decision whether the last finished step was evaluated and is the best so far
        by `train.keep_best`. Every process calls it."""
        answer = [False]
        if accelerator.is_main_process and self.train_state.evaluated == self.train_state.step > 0:
            names = [name for name in metric_names(self._train.keep_best) if name in self.train_state.after]
            value = figure(self.train_state.after, names[0]) if names else None
            if value is not None and (self.train_state.best is None or value > self.train_state.best):
                self.train_state.best, answer = value, [True]
        if accelerator.num_processes > 1:
            dist.broadcast_object_list(answer, src=0)
        return answer[0]

    def restore(self, learner: Learner) -> None:
        """Restore `learner` from the resumed checkpoint; every process calls it. Does nothing in a new run."""
        if self._resume:
            load_state(self._resume, learner)

    def save(self, learner: Learner, only_best: bool = False) -> None:
        """Copy the learner, and write a checkpoint of the last finished step in the background; then delete checkpoints
        that the recipe does not keep. Every process calls it; waits for the previous checkpoint, and raises its error.

        With `only_best`, the checkpoint is kept as long as it is the best.

        Raises ValueError if train.keep_best names a metric that the run does not have.
        """
        self.wait()
        main, step = learner.accelerator.is_main_process, self.train_state.step
        info: dict[str, Any] = {}
        files = self._files() if main else {}
        if main:
            sizes = {name: file.stat().st_size for name, file in files.items()}
            info = {**self._info, **self.train_state.to_json(), "files": sizes, ONLY_BEST: only_best}
        self._writer.begin(step, learner, info, files.values(), self._prune)
        self._in_writing = self.train_state.take_groups()
        self.saved_step = step
        if main:
            self._check_keep_best()

    def poll(self, accelerator: Accelerator) -> None:
        """Check, without waiting, whether the checkpoint has become durable. Every process calls it. Raises, in all
        processes, the error of writing it: DiskError if the disk is full."""
        if not self._writer.is_writing:
            return
        done = [self._writer.is_done]
        if accelerator.num_processes > 1:
            # all processes note it, or raise its error, at the same step
            dist.broadcast_object_list(done, src=0)
        if done[0]:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is durable. Raises, in all processes, the error of writing
        it."""
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
        best = find_best(checkpoints(self._folder), self._train.keep_best)
        prune(self._folder, self._train.keep_last, best.path if best else None)

    def _check_keep_best(self) -> None:
        wanted, train_state = self._train.keep_best, self.train_state
        if wanted == AUTO:
            return
        known = {*train_state.metrics, *train_state.after}
        not_yet = train_state.evaluated is None and wanted is not None and wanted.startswith("eval/")
        if wanted is not None and wanted not in known and not not_yet:
            problem = f"the run has no metric {wanted!r}"
            raise SettingError("train.keep_best", problem, f"name one of {', '.join(sorted(known))}")
