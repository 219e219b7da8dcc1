"""Checkpoints of models on disk, under the names `tinker://MODEL/weights/NAME` and `tinker://MODEL/sampler_weights/NAME`.

A model's folder has model.json, and below `weights` and `sampler_weights` a folder per checkpoint: checkpoint.json, the
adapter in peft's format in a folder whose name ends with its digest, the canary's scores, and the optimizer's state."""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agentfactory.base.files import untrusted_files
from agentfactory.base.files.disk import write_whole
from agentfactory.rollout.inference.adapter_config import WEIGHTS
from agentfactory.tinker.bodies import Lora, Metadata
from agentfactory.tinker.messages import RequestError
from agentfactory.tinker.training import OPTIMIZER, Model, Trainer
from agentfactory.trainers.checkpoints.checkpoint_folder import DamagedCheckpointError, digest, files_of, verify, written_aside
from agentfactory.trainers.sync.canary_verdict import Scores

WEIGHTS_KIND, SAMPLER_KIND = "weights", "sampler_weights"
_TYPES = {WEIGHTS_KIND: "training", SAMPLER_KIND: "sampler"}
_PATH = re.compile(r"tinker://([A-Za-z0-9-]{1,64}:train:[0-9]{1,9})/(weights|sampler_weights)/([A-Za-z0-9][A-Za-z0-9._-]{0,127})")
_INFO, _RUN, _SCORES = "checkpoint.json", "model.json", "scores.npy"


@dataclass(frozen=True)
class CheckpointPath:
    """The parts of a `tinker://` path."""

    model_id: str
    kind: str
    name: str

    @classmethod
    def of(cls, path: str) -> "CheckpointPath":
        """Raises RequestError if `path` is none."""
        if (match := _PATH.fullmatch(path)) is None:
            raise RequestError(f"path: got {path!r:.200}; give tinker://MODEL/weights/NAME, as save_weights returned it")
        return cls(*match.groups())

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


class Saved:
    """A checkpoint on disk."""

    def __init__(self, path: CheckpointPath, folder: Path) -> None:
        self.path, self.folder = path, folder
        self.info: dict[str, Any] = untrusted_files.read_json(folder / _INFO, folder)

    @property
    def config(self) -> Lora:
        return msgspec.convert(self.info["lora"], Lora)

    @property
    def adapter(self) -> Path:
        """The folder of the adapter; its name ends with its digest."""
        return self.folder / str(self.info["adapter"])

    @property
    def optimizer(self) -> Path:
        return self.folder / OPTIMIZER

    @property
    def is_expired(self) -> bool:
        expires = self.info.get("expires_at")
        return expires is not None and float(expires) <= time.time()

    def scores(self) -> Scores:
        with untrusted_files.open_file(self.folder / _SCORES, self.folder) as file:
            return np.load(file, allow_pickle=False)

    def describe(self) -> dict[str, Any]:
        return {
            "checkpoint_id": f"{self.path.kind}/{self.path.name}",
            "checkpoint_type": _TYPES[self.path.kind],
            "time": _date(self.info["time"]),
            "tinker_path": str(self.path),
            "size_bytes": sum((self.folder / name).stat().st_size for name in files_of(self.folder)),
            "public": False,
            "user_metadata": self.info.get("user_metadata"),
            "expires_at": None if self.info.get("expires_at") is None else _date(self.info["expires_at"]),
        }


class Checkpoints:
    """The folder of all models. Whatever is written is durable and whole before its name exists."""

    def __init__(self, folder: Path, base_model: str) -> None:
        self._folder, self._base_model = folder, base_model

    def _run(self, model_id: str) -> Path:
        return self._folder / model_id.replace(":", "_")

    def begin(self, model_id: str, config: Lora, metadata: Metadata | None) -> None:
        """Note a new model."""
        told = {"base_model": self._base_model, "lora": msgspec.to_builtins(config), "time": time.time()}
        self._run(model_id).mkdir(parents=True, exist_ok=True)
        content = json.dumps({**told, "model_id": model_id, "user_metadata": metadata}, indent=2)
        write_whole(self._run(model_id) / _RUN, content.encode())

    def save(
        self,
        path: CheckpointPath,
        model: Model,
        trainer: Trainer,
        ttl: int | None = None,
        metadata: Metadata | None = None,
        overwrite: bool = False,
    ) -> Saved:
        """Write a checkpoint. Raises RequestError if its name is taken, DiskError if the disk is full."""
        folder = self._run(path.model_id) / path.kind / path.name
        if folder.exists() and not overwrite and not self.find(path).is_expired:
            raise RequestError(f"path: {path} exists; choose another name, or set overwrite")
        info = {"base_model": self._base_model, "lora": msgspec.to_builtins(model.config), "steps": model.steps}
        info |= {"time": time.time(), "user_metadata": metadata, "expires_at": None if ttl is None else time.time() + ttl}
        passing = folder.with_name(f".{path.name}.whole")
        shutil.rmtree(passing, ignore_errors=True)
        with written_aside(passing) as aside:
            file = trainer.save(model, aside / "adapter")
            info["adapter"] = f"adapter-{digest(file)[:16]}"
            (aside / "adapter").rename(aside / info["adapter"])
            if path.kind == WEIGHTS_KIND:
                trainer.save_optimizer(model, aside / OPTIMIZER)
            np.save(aside / _SCORES, trainer.scores(model))
            (aside / _INFO).write_text(json.dumps(info, indent=2), encoding="utf-8")
        if folder.exists():
            _remove(folder)
        passing.rename(folder)
        return Saved(path, folder)

    def find(self, path: CheckpointPath) -> Saved:
        """Raises RequestError if there is no such checkpoint, or it is damaged or expired."""
        folder = self._run(path.model_id) / path.kind / path.name
        try:
            verify(folder)
            saved = Saved(path, folder)
        except (DamagedCheckpointError, OSError, ValueError) as error:
            reason = str(error) if folder.exists() else "there is no such checkpoint"
            raise RequestError(f"path: {path}: {reason}") from error
        if saved.info.get("base_model") != self._base_model:
            problem = f"path: {path} is of {saved.info.get('base_model')!r:.200}, and this service has {self._base_model}"
            raise RequestError(f"{problem}; start the service with that model")
        if saved.is_expired:
            raise RequestError(f"path: {path} has expired; it was saved with a ttl")
        return saved

    def remove(self, path: CheckpointPath) -> None:
        _remove(self.find(path).folder)

    def set_lifetime(self, path: CheckpointPath, ttl: int | None) -> None:
        saved = self.find(path)
        info = {**saved.info, "expires_at": None if ttl is None else time.time() + ttl}
        write_whole(saved.folder / _INFO, json.dumps(info, indent=2).encode())
        digests = untrusted_files.read_json(saved.folder / "digests.json", saved.folder)
        digests[_INFO] = digest(saved.folder / _INFO)
        write_whole(saved.folder / "digests.json", json.dumps(digests, indent=2).encode())

    # ---- listings

    def models(self) -> dict[str, dict[str, Any]]:
        """Return all models with what is known of them, the newest first."""
        found = {}
        for file in self._folder.glob(f"*/{_RUN}"):
            with suppress(OSError, ValueError):
                told = untrusted_files.read_json(file, self._folder)
                found[str(told["model_id"])] = told
        return dict(sorted(found.items(), key=lambda item: -float(item[1]["time"])))

    def of_model(self, model_id: str) -> list[Saved]:
        """Return a model's checkpoints that have not expired, the newest last; expired ones are removed."""
        found = sorted(self._all(model_id), key=lambda saved: saved.info["time"])
        for saved in found:
            if saved.is_expired:
                _remove(saved.folder)
        return [saved for saved in found if not saved.is_expired]

    def _all(self, model_id: str) -> Iterator[Saved]:
        for kind in _TYPES:
            for folder in (self._run(model_id) / kind).glob("[!.]*"):
                with suppress(OSError, ValueError):
                    yield Saved(CheckpointPath(model_id, kind, folder.name), folder)

    def describe(self, model_id: str) -> dict[str, Any]:
        """Return a model as the API lists it. Raises RequestError if it is unknown."""
        if (told := self.models().get(model_id)) is None:
            raise RequestError(f"there is no training run {model_id}")
        saved = self.of_model(model_id)
        last: Callable[[str], Any] = lambda kind: next((s.describe() for s in reversed(saved) if s.path.kind == kind), None)
        return {
            "training_run_id": model_id,
            "base_model": told["base_model"],
            "model_owner": "you",
            "is_lora": True,
            "lora_rank": told["lora"]["rank"],
            "last_request_time": _date(max([told["time"], *(s.info["time"] for s in saved)])),
            "last_checkpoint": last(WEIGHTS_KIND),
            "last_sampler_checkpoint": last(SAMPLER_KIND),
            "user_metadata": told.get("user_metadata"),
        }


def adapter_file(saved: Saved) -> Path:
    return saved.adapter / WEIGHTS


def _remove(folder: Path) -> None:
    # renamed first: half of a folder must not be mistaken for a checkpoint
    doomed = folder.with_name(f".{folder.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(float(seconds), UTC).isoformat()
