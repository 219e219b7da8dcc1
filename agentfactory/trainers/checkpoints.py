"""The checkpoints of one run: writes them when due, keeps the newest and the best, and resumes from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import distributed as dist
from transformers import PreTrainedTokenizerBase

from agentfactory.tools.errors import SettingError
from agentfactory.trainers.best_checkpoint import AUTO, figure, find_best, metric_names
from agentfactory.trainers.checkpoint import load_checkpoint, save_checkpoint
from agentfactory.trainers.checkpoint_folder import ONLY_BEST, checkpoints, flush, prune, read_info
from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.learner import Learner
from agentfactory.trainers.train_state import TrainState


class Checkpoints:
    """Loads and saves the weights of a training loop. Every process has one."""

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        train: TrainConfig,
        info: dict[str, Any] | None = None,
        files: Mapping[str, Path] | None = None,
        resume: Path | None = None,
    ) -> None:
        """`info` (JSON) is added to each checkpoint. `files` are the files that the run appends to: a checkpoint
        records their lengths, so that a resumed run can cut what came after. `resume` is the checkpoint to continue
        from."""
        self.train_state = TrainState.from_json(read_info(resume)) if resume else TrainState()
        self.path = resume
        """The newest checkpoint."""
        self.saved_step = self.train_state.step
        self._folder = folder
        self._tokenizer = tokenizer
        self._train = train
        self._info = info or {}
        self._files = files or {}
        self._resume = resume

    def due(self, step: int) -> bool:
        """Return whether the recipe asks for a checkpoint of `step`."""
        every = self._train.checkpoint_every
        return step == self._train.steps or (every > 0 and step % every == 0)

    def is_best(self, accelerator: Accelerator) -> bool:
        """Return, in all ranks, rank 0's answer whether the last finished step was evaluated and is the best so far by
        `train.keep_best`. Every process calls it."""
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
            load_checkpoint(self._resume, learner)

    def save(self, learner: Learner, only_best: bool = False) -> None:
        """Write a checkpoint of the last finished step, and delete those that the recipe does not keep. Every process
        calls it; returns when the checkpoint is durable.

        With `only_best`, the checkpoint is kept as long as it is the best.

        Raises ValueError if train.keep_best names a metric that the run does not have.
        """
        main, step = learner.accelerator.is_main_process, self.train_state.step
        info: dict[str, Any] = {}
        if main:
            files = {name: file for name, file in self._files.items() if file.exists()}
            sizes = {name: file.stat().st_size for name, file in files.items()}
            for file in files.values():
                # the checkpoint depends on it
                flush(file)
            info = {**self._info, **self.train_state.to_json(), "files": sizes, ONLY_BEST: only_best}
        self.path = save_checkpoint(self._folder, step, learner, self._tokenizer, info)
        self.saved_step = step
        if main:
            self._check_keep_best()
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
