"""Background writing of checkpoints: training waits for a copy in host memory, and continues while it is written."""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from agentfactory.base.files.disk import DiskError, writing
from agentfactory.rollout.images.families import copy_processor
from agentfactory.trainers.checkpoints import checkpoint_folder
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.networks.vision_tower import sees
from agentfactory.trainers.processes.accelerator import PATIENCE
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.learner_state import TRAINING_STATE, Part, part_of, write_part
from agentfactory.trainers.update.offload import HostBuffer

Result = TypeVar("Result")


class CheckpointWriter:
    """A writer of checkpoints to a folder, one at a time. Every process has one, and calls its methods in the same
    order.

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
            part[key] = _resharded(copied, value) if isinstance(value, DTensor) else copied
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


def _resharded(local: Tensor, like: DTensor) -> DTensor:
    inner, context = like.__tensor_flatten__()
    parts = {name: getattr(like, name) for name in inner} | {"_local_tensor": local}
    return DTensor.__tensor_unflatten__(parts, context, like.size(), like.stride())
