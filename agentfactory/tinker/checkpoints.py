"""Checkpoints on disk, under the names `tinker://MODEL/weights/NAME` and `tinker://MODEL/sampler_weights/NAME`.

A model's folder has model.json, and below `weights` and `sampler_weights` a folder per checkpoint: checkpoint.json, the
adapter in peft's format in a folder whose name ends with its digest, the canary's scores, and the optimizer's state."""

import re
import shutil
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agentfactory.base.files import untrusted_files
from agentfactory.base.files.disk import write_whole
from agentfactory.tinker.bodies import MODEL_ID, NAME, Lora, Metadata, Short
from agentfactory.tinker.messages import RequestError
from agentfactory.tinker.training import Model, Trainer
from agentfactory.trainers.checkpoints import checkpoint_folder
from agentfactory.trainers.sync.canary_verdict import Scores

WEIGHTS_KIND, SAMPLER_KIND = "weights", "sampler_weights"
_PATH = re.compile(rf"tinker://({MODEL_ID})/({WEIGHTS_KIND}|{SAMPLER_KIND})/({NAME})")
_INFO, _RUN, _SCORES, _OPTIMIZER = "checkpoint.json", "model.json", "scores.npy", "optimizer.safetensors"
Listing = dict[str, Any]


class Info(msgspec.Struct):
    """The record of a model (model.json), or of a checkpoint (checkpoint.json), whose `adapter` is the name of a
    folder."""

    model_id: str
    base_model: str
    lora: Lora
    user_metadata: Metadata | None
    time: datetime = msgspec.field(default_factory=lambda: datetime.now(UTC))
    steps: int = 0
    adapter: str = ""
    expires_at: datetime | None = None

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= datetime.now(UTC)

    def expire_in(self, seconds: int | None) -> None:
        self.expires_at = None if seconds is None else datetime.now(UTC) + timedelta(seconds=seconds)

    @classmethod
    def read(cls, file: Path, within: Path) -> "Info":
        """Raises OSError or ValueError."""
        return msgspec.convert(untrusted_files.read_json(file, within), cls, strict=False)

    def write(self, file: Path) -> None:
        write_whole(file, msgspec.json.format(msgspec.json.encode(self), indent=2))


class Saved:
    """A checkpoint on disk. Raises OSError or ValueError if it cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.info = folder, Info.read(folder / _INFO, folder)
        self.path = f"tinker://{self.info.model_id}/{folder.parent.name}/{folder.name}"
        self.adapter, self.optimizer = folder.resolve() / self.info.adapter, folder / _OPTIMIZER
        # a snapshot that ends with its sampling session
        self.is_nameless = folder.name.startswith("_")

    def scores(self) -> Scores:
        with untrusted_files.open_file(self.folder / _SCORES, self.folder) as file:
            return np.load(file, allow_pickle=False)

    def describe(self) -> Listing:
        sizes = [(self.folder / name).stat().st_size for name in checkpoint_folder.files_of(self.folder)]
        return {
            "checkpoint_id": f"{self.folder.parent.name}/{self.folder.name}",
            "checkpoint_type": "training" if self.folder.parent.name == WEIGHTS_KIND else "sampler",
            "time": self.info.time,
            "tinker_path": self.path,
            "size_bytes": sum(sizes),
            "user_metadata": self.info.user_metadata,
            "expires_at": self.info.expires_at,
        }


class Checkpoints:
    """The folder of all models. Whatever is written is durable and whole before its name exists."""

    def __init__(self, folder: Path, base_model: str) -> None:
        self._folder, self._base_model = folder, base_model
        # nameless snapshots, and what a killed service has not finished
        for left in (*folder.glob(f"*/{SAMPLER_KIND}/_*/"), *folder.glob("*/*weights/.*/")):
            shutil.rmtree(left)

    def _of(self, model_id: str) -> Path:
        return self._folder / model_id.replace(":", "_")

    def begin(self, model: Model, metadata: Metadata | None) -> None:
        """Note a new model."""
        self._of(model.name).mkdir(parents=True, exist_ok=True)
        Info(model.name, self._base_model, model.config, metadata).write(self._of(model.name) / _RUN)

    def save(
        self,
        model: Model,
        trainer: Trainer,
        kind: str,
        name: str,
        ttl: int | None = None,
        metadata: Metadata | None = None,
        overwrite: bool = False,
    ) -> Saved:
        """Write a checkpoint. Raises RequestError if its name is taken, DiskError if the disk is full."""
        folder = self._of(model.name) / kind / name
        if folder.exists() and not overwrite and not Saved(folder).info.is_expired:
            problem = f"path: tinker://{model.name}/{kind}/{name} exists"
            raise RequestError(f"{problem}; choose another name, or set overwrite")
        info = Info(model.name, self._base_model, model.config, metadata, steps=model.steps)
        info.expire_in(ttl)
        passing = folder.with_name(f".{name}.whole")
        with checkpoint_folder.written_aside(passing) as aside:
            file, scores = trainer.save(model, aside / "adapter")
            info.adapter = f"adapter-{checkpoint_folder.digest(file)[:16]}"
            (aside / "adapter").rename(aside / info.adapter)
            if kind == WEIGHTS_KIND:
                trainer.save_optimizer(model, aside / _OPTIMIZER)
            np.save(aside / _SCORES, scores)
        # without a digest, because the lifetime may change
        info.write(passing / _INFO)
        if folder.exists():
            remove(folder)
        passing.rename(folder)
        if kind == WEIGHTS_KIND:
            model.saved = model.steps
        return Saved(folder)

    def find(self, path: str) -> Saved:
        """Raises RequestError if there is no such checkpoint of this base, or it is damaged or expired."""
        if (match := _PATH.fullmatch(path)) is None:
            fix = "give tinker://MODEL/weights/NAME, as save_weights returned it"
            raise RequestError(f"path: got {path!r:.200}; {fix}")
        folder = self._of(match[1]) / match[2] / match[3]
        if not folder.is_dir():
            raise RequestError(f"path: there is no {path}", 404)
        try:
            checkpoint_folder.verify(folder)
            saved = Saved(folder)
        except (checkpoint_folder.DamagedCheckpointError, OSError, ValueError) as error:
            raise RequestError(f"path: {path} cannot be read: {error}") from error
        if (base := saved.info.base_model) != self._base_model:
            problem = f"path: {path} is of {base!r:.200}, and this service has {self._base_model}"
            raise RequestError(f"{problem}; start the service with that model")
        if saved.info.is_expired:
            remove(folder)
            raise RequestError(f"path: {path} has expired; it was saved with a ttl", 404)
        return saved

    # ---- requests that need nothing but this folder

    def delete_checkpoint(self, body: Short) -> None:
        remove(self._find_in(body).folder)

    def set_lifetime(self, body: Short) -> None:
        saved = self._find_in(body)
        saved.info.expire_in(body.ttl_seconds)
        saved.info.write(saved.folder / _INFO)

    def weights_info(self, body: Short) -> Listing:
        config = self.find(body.tinker_path).info.lora
        parts = {name: getattr(config, name) for name in ("train_unembed", "train_mlp", "train_attn")}
        return {"base_model": self._base_model, "is_lora": True, "lora_rank": config.rank, **parts}

    def list_runs(self, body: Short) -> Listing:
        found, cursor = body.page(list(self._models().values()))
        return {"training_runs": [self._describe(info) for info in found], "cursor": cursor}

    def describe_run(self, body: Short) -> Listing:
        if (info := self._models().get(body.model_id)) is None:
            raise RequestError(f"there is no training run {body.model_id!r:.120}", 404)
        return self._describe(info)

    def list_checkpoints_of_run(self, body: Short) -> Listing:
        return {"checkpoints": self._described(body.model_id)}

    def list_checkpoints(self, body: Short) -> Listing:
        found, cursor = body.page(self._described("*"))
        return {"checkpoints": found, "cursor": cursor}

    def _find_in(self, body: Short) -> Saved:
        return self.find(f"tinker://{body.model_id}/{body.kind}/{body.name}")

    def _models(self) -> dict[str, Info]:
        """Return what is known of all models by their ids, the newest first."""
        found: list[Info] = []
        for file in self._folder.glob(f"*/{_RUN}"):
            with suppress(OSError, ValueError):
                found.append(Info.read(file, self._folder))
        return {info.model_id: info for info in sorted(found, key=attrgetter("time"), reverse=True)}

    def _described(self, model_id: str) -> list[Listing]:
        """Return a model's checkpoints (`*`: all) as the API lists them, the oldest first; remove expired ones."""
        found: list[Listing] = []
        if not re.fullmatch(rf"\*|{MODEL_ID}", model_id):
            return found
        for folder in self._folder.glob(f"{self._of(model_id).name}/*weights/[!._]*"):
            with suppress(OSError, ValueError):
                if (saved := Saved(folder)).info.is_expired:
                    remove(folder)
                else:
                    found.append(saved.describe())
        return sorted(found, key=itemgetter("time"))

    def _describe(self, info: Info) -> Listing:
        last = {saved["checkpoint_type"]: saved for saved in self._described(info.model_id)}
        return {
            "training_run_id": info.model_id,
            "base_model": info.base_model,
            "model_owner": "you",
            "is_lora": True,
            "lora_rank": info.lora.rank,
            "last_request_time": max([info.time, *(saved["time"] for saved in last.values())]),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": info.user_metadata,
        }


def remove(folder: Path) -> None:
    # renamed first: half of a folder must not be mistaken for a checkpoint
    doomed = folder.with_name(f".{folder.name}.deleted")
    folder.rename(doomed)
    shutil.rmtree(doomed)
