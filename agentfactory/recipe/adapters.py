"""Adapters that training continues or merges first: that of the stage before, or of `model.lora.from`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from agentfactory.base.errors import SettingError, short
from agentfactory.base.files.untrusted_files import read_json
from agentfactory.base.messages import is_finite_number
from agentfactory.recipe.composition import Composed, display
from agentfactory.recipe.schema import MERGED, Recipe
from agentfactory.rollout.config import LoraConfig
from agentfactory.rollout.inference.adapter_config import ADAPTER, WEIGHTS, unsupported
from agentfactory.trainers.checkpoints.checkpoint_folder import INFO, checkpoints, read_info

_FROM = "model.lora.from"
_MERGE = "set model.lora.merge=true, which merges it into the base first"
_OF_A_RUN = {"from", "merge", "quantization"}
"""Fields of model.lora that describe how a run trains its adapter, not the adapter."""
_FACTOR = re.compile(r"base_model\.model\..+\.lora_[AB]\.weight")
_ROW_FACTOR = re.compile(r"base_model\.model\..+\.lora_embedding_[AB]")
"""Factors of an embedding, with which model.lora.trainable_tokens saves its rows."""


def shape_of(lora: LoraConfig) -> dict[str, Any]:
    return {name: value for name, value in lora.model_dump(mode="json").items() if name not in _OF_A_RUN}


def take_over(data: Mapping[str, Any]) -> None:
    """Complete `model.lora` of a recipe's mapping from the adapter in its `from`, if it exists. Raises SettingError."""
    model = data.get("model")
    lora = model.get("lora") if isinstance(model, dict) else None
    if not isinstance(lora, dict):
        return
    folder = lora.get("from")
    if isinstance(folder, str) and ((Path(folder) / ADAPTER).is_file() or _checkpoints_in(Path(folder))):
        _continue(lora, saved_shape(Path(folder)), is_foreign=not (Path(folder) / INFO).is_file())


def follow(stage: Composed, name: str, before: Recipe, output: Path) -> None:
    """Set model and adapter of the mapping of stage `name` to what the stage `before` ends with: its checkpoint, the
    same base and its adapter, or a base with this adapter merged. Raises SettingError."""
    model, adapter = stage.data.setdefault("model", {}), before.model.lora
    if not isinstance(model, dict):
        return
    lora = model.get("lora")
    model["path"] = f"{before.output}/checkpoints"
    if isinstance(lora, dict):
        lora.pop("from", None)
    if adapter is None:
        if isinstance(lora, dict) and lora.get("merge"):
            problem = f"got true, but stage {before.name} trains all weights"
            raise SettingError("model.lora.merge", problem, "remove it", source=stage.origin("model.lora.merge"))
        return
    if before.model.chat_template is not None:
        # the base has its own
        model.setdefault("chat_template", before.model.chat_template)
    if isinstance(lora, dict):
        shape = shape_of(adapter)
        _continue(lora, shape)
        if lora["merge"] is False:
            _check_equal(lora, shape, f"the adapter of stage {before.name}", stage)
            train = stage.data.get("train")
            vision = train.get("vision", "frozen") if isinstance(train, dict) else "frozen"
            if (vision != "frozen") != before.train.trains_vision:
                trained, source = before.train.vision, stage.origin("train.vision")
                problem = f"got {short(vision)}, and stage {before.name} trained its adapter with {trained!r}"
                raise SettingError("train.vision", problem, f"set the same, or {_MERGE}", source=source)
            lora["from"], model["path"] = model["path"], before.model.path
            # another precision of the base would change the network
            lora.setdefault("quantization", adapter.quantization)
            return
    model["path"] = f"{output}/{name}/{MERGED}"


def differences(lora: LoraConfig, before: LoraConfig) -> str:
    """Return in which fields the adapter of a stage differs from that of the stage before, as text."""
    own, shape = shape_of(lora), shape_of(before)
    names = [name for name in _differing(own, shape) if own[name] != shape[name]]
    shown = {name: [_scale(fields) if name == "alpha" else fields[name] for fields in (own, shape)] for name in names}
    return ", ".join(f"{name} is {short(now)}, not {short(then)}" for name, (now, then) in shown.items())


def saved_shape(folder: Path) -> dict[str, Any]:
    """Return the fields of model.lora that describe the adapter in `folder`. Raises SettingError."""
    config = _read(folder)
    targets: Any = config.get("target_modules")
    tokens: Any = None
    if (folder / INFO).is_file():
        # peft writes the names of modules, and the recipe may have a shorter form
        try:
            lora = read_info(folder)["recipe"]["model"]["lora"]
            # checkpoints of earlier versions have no tokens
            targets, tokens = lora["target_modules"], lora.get("trainable_tokens")
        except (OSError, ValueError, LookupError, TypeError) as error:
            problem = f"{display(folder)}: {INFO} cannot be read: {error!r}"
            raise SettingError(_FROM, problem, "name another checkpoint") from None
    elif isinstance(targets, list):
        targets = sorted(targets)
    return {"rank": config["r"], "alpha": config["lora_alpha"], "target_modules": targets, "trainable_tokens": tokens}


def check_adapter(recipe: Recipe, prepared: Path | None, after: str | None) -> None:
    """Raise SettingError if the recipe cannot begin with its adapter. For the parameters see checks._check_run."""
    lora = recipe.model.lora
    if lora is None or after is not None:
        return
    if lora.from_ is None:
        if lora.merge:
            problem = "got true, but there is no adapter to merge"
            raise SettingError("model.lora.merge", problem, f"set {_FROM}, or remove it")
        return
    folder = Path(lora.from_)
    if prepared is not None and folder.is_relative_to(prepared):
        return
    config = _read(folder)
    if lora.merge:
        return
    where = f"the adapter in {display(folder)}"
    shape = saved_shape(folder)
    others = ["exclude_modules", "layers_to_transform"]
    if shape["trainable_tokens"] is None:
        others += ["rank_pattern", "alpha_pattern"]
    reason = unsupported(config) or next((f"{name}: {config[name]!r}" for name in others if config.get(name)), None)
    if reason is not None:
        raise SettingError(_FROM, f"{where} cannot be trained further: {reason}", _MERGE)
    _check_equal(shape_of(lora), shape, where)
    has_rows = shape["trainable_tokens"] is not None
    try:
        with safe_open(folder / WEIGHTS, framework="np") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise SettingError(_FROM, f"{where}: {WEIGHTS} cannot be read: {error}", "name another adapter") from None
    # factors of linear modules, and for trained tokens of an embedding
    others = [name for name in names if not _FACTOR.fullmatch(name) and not (has_rows and _ROW_FACTOR.fullmatch(name))]
    if others or not names:
        what = f"it has the tensor {others[0]}" if others else "it has no tensors"
        raise SettingError(_FROM, f"{where} cannot be trained further: {what}", _MERGE)


def doubts_about_adapter(recipe: Recipe) -> list[str]:
    """Return warnings about an adapter that was trained on another base or with another chat template."""
    lora, model = recipe.model.lora, recipe.model
    if lora is None or lora.from_ is None or not (Path(lora.from_) / ADAPTER).is_file():
        return []
    folder, found = Path(lora.from_), []
    base = _read(folder).get("base_model_name_or_path")
    if isinstance(base, str) and not _same_model(base, model.path):
        problem = f"{display(folder)} was trained on {base}, and model.path is {model.path}"
        found.append(f"{_FROM}: {problem}; fix: name the same model")
    own, template = Path(model.path) / "chat_template.jinja", folder / "chat_template.jinja"
    is_other = own.is_file() and template.is_file() and own.read_bytes() != template.read_bytes()
    if is_other and model.chat_template is None and not (folder / INFO).is_file():
        found.append(
            f"{_FROM}: {display(folder)} has another chat template than {display(Path(model.path))}, which is used; "
            f"fix: model.chat_template={display(template)}"
        )
    return found


def _continue(lora: dict[str, Any], shape: Mapping[str, Any], is_foreign: bool = False) -> None:
    """Set what the mapping `lora` leaves out to the fields of the adapter that it continues; `merge` to whether they
    differ. A new adapter on the merged base takes over the rank alone. A foreign adapter may fit any pattern."""
    if lora.get("merge") is not True and lora.get("rank", shape["rank"]) == shape["rank"]:
        for name, value in shape.items():
            lora.setdefault(name, value)
    lora.setdefault("rank", shape["rank"])
    if lora.get("merge") is None:
        unknown = is_foreign and type(lora.get("target_modules")) is not type(shape["target_modules"])
        lora["merge"] = any(not (unknown and name == "target_modules") for name in _differing(lora, shape))


def _differing(lora: Mapping[str, Any], shape: Mapping[str, Any]) -> list[str]:
    return [name for name in shape if _comparable(lora, name) != _comparable(shape, name)]


def _comparable(lora: Mapping[str, Any], name: str) -> Any:
    if name == "alpha":
        return _scale(lora)
    value = lora.get(name, LoraConfig.model_fields[name].default)
    return frozenset(map(str, value)) if isinstance(value, list) else value


def _scale(lora: Mapping[str, Any]) -> Any:
    value = lora.get("alpha")
    return 2 * lora["rank"] if value is None and isinstance(lora["rank"], int) else value


def _check_equal(lora: Mapping[str, Any], shape: Mapping[str, Any], where: str, stage: Composed | None = None) -> None:
    for name in _differing(lora, shape):
        field, got = f"model.lora.{name}", lora.get(name, LoraConfig.model_fields[name].default)
        problem = f"got {short(got)}, and {where} has {short(shape[name])}"
        fix = f"leave it out to continue that adapter, or {_MERGE}"
        raise SettingError(field, problem, fix, source=stage.origin(field) if stage else "")


def _checkpoints_in(folder: Path) -> list[Path]:
    folders = (folder, *folder.glob("checkpoints"), *folder.glob("*/checkpoints"))
    return [found for each in folders if each.is_dir() for found in checkpoints(each)]


def _read(folder: Path) -> dict[str, Any]:
    """Return the configuration of the LoRA adapter in `folder`. Raises SettingError if there is none."""
    where = display(folder)
    if not (folder / ADAPTER).is_file():
        fix = "name a folder written by peft, or a checkpoint of a run that trained an adapter"
        if not folder.is_dir():
            raise SettingError(_FROM, f"{where}: no such folder", fix)
        if (folder / "config.json").is_file():
            raise SettingError(_FROM, f"{where} holds a full model", f"name it as model.path, and remove {_FROM}")
        if found := _checkpoints_in(folder):
            fix = f"name one of its checkpoints, such as {display(found[-1])}"
        raise SettingError(_FROM, f"{where} has no {ADAPTER}", fix)
    try:
        config: dict[str, Any] = read_json(folder / ADAPTER)
    except (OSError, ValueError) as error:
        raise SettingError(_FROM, f"{where}: {ADAPTER} cannot be read: {error}", "name another adapter") from None
    if config.get("peft_type") != "LORA":
        problem = f"{where} holds an adapter of another kind: peft_type: {config.get('peft_type')}"
        raise SettingError(_FROM, problem, "name a LoRA adapter")
    for name in ("r", "lora_alpha"):
        if not is_finite_number(config.get(name)):
            raise SettingError(_FROM, f"{where}: {name}: {config.get(name)!r} is not a number", "name another adapter")
    if not (folder / WEIGHTS).is_file():
        problem = f"{where} has no {WEIGHTS}"
        raise SettingError(_FROM, problem, "save it as safetensors: peft's save_pretrained does by default")
    return config


def _same_model(base: str, path: str) -> bool:
    """Return whether two names can be those of one model: a copy in a folder has the last part of its hub name."""
    if Path(base).is_dir() and Path(path).is_dir():
        return Path(base).resolve() == Path(path).resolve()
    return Path(base).name == Path(path).name
