"""Resume a run: choose the checkpoint, check that the recipe still fits it, and cut everything written after it."""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError, short
from agentfactory.base.files.untrusted_files import RefusedFileError
from agentfactory.base.user_code.source_files import digests_of, source_files
from agentfactory.launching.run_folder import RunFolder, RunFolderError, next_free
from agentfactory.recipe.composition import display, resolve_saved
from agentfactory.recipe.removed_fields import fix_of_removed
from agentfactory.recipe.schema import Recipe
from agentfactory.recipe.yaml_text import parse_saved
from agentfactory.rollout.inference.adapter_config import WEIGHTS
from agentfactory.trainers.checkpoints import checkpoint_folder
from agentfactory.trainers.checkpoints.checkpoint_folder import checkpoints, read_info, step_of

_MAY_DIFFER = (
    # placement, speed and monitoring: these change the training result by rounding at most
    *("name", "output", "import_path", "server", "sync", "placement", "eval", "track"),
    *("rollout.concurrency", "rollout.timeout_seconds", "rollout.workers"),
    *("train.processes", "train.strategy", "train.batching", "train.token_budget", "train.attention"),
    *("train.gradient_checkpointing", "train.liger", "train.compile"),
    *("train.steps", "train.checkpoint_every", "train.keep_last", "train.keep_best", "train.stop_when"),
    # the operation of tools; `*` stands for a server's name
    *("mcp_servers.*.isolation", "mcp_servers.*.pool", "mcp_servers.*.timeout_seconds"),
    *("limits.calls_per_second", "limits.seconds_per_call", "limits.parallel_calls"),
    # the worker checks that the weights there are the same
    *("teacher.url", "teacher.api_key_env", "data.sources.*.teacher_url"),
)
_BEFORE = {
    **{"train.loss.behaviour_kl": 0.0, "train.advantage.malformed_turns": "like_others"},
    **{"rollout.late_chains": "drop", "train.precision": "auto"},
}
"""Field that older recipes lack -> the value that their runs were trained with."""


def choose(folder: RunFolder, asked: Path | None) -> Path | None:
    """Return the checkpoint to resume from: `asked`, or the newest, if any. Raises RunFolderError if it is damaged."""
    try:
        found = checkpoints(folder.checkpoints, folder.within)
    except RefusedFileError as error:
        raise RunFolderError(f"--resume: {error}") from None
    if asked is not None and asked not in found:
        raise RunFolderError(f"--resume: {asked} is not a checkpoint; fix: name one in {folder.checkpoints}")
    path = asked or (found[-1] if found else None)
    if path is None:
        return None
    try:
        checkpoint_folder.verify(path)
    except checkpoint_folder.DamagedCheckpointError as error:
        before = checkpoint_folder.newest_whole(found[: found.index(path)])
        fix = f"--resume {display(before)}" if before else "none before it is intact: start again with --overwrite"
        raise RunFolderError(f"--resume: {error}; fix: {fix}") from None
    return path


def check_recipe(recipe: Recipe, folder: RunFolder, checkpoint: Path | None) -> None:
    """Raise SettingError if `recipe` would change the training result; steps, placement and speed may differ."""
    where = checkpoint or folder.recipe
    try:
        saved = read_info(checkpoint)["recipe"] if checkpoint else parse_saved(folder.read_recipe())
    except (OSError, ValueError, LookupError) as error:
        problem = f"{display(where)}: its recipe cannot be read: {error}"
        raise RunFolderError(f"--resume: {problem}; fix: output=OTHER") from None
    old = _BEFORE | _leaves(resolve_saved(saved, folder.path))
    new = _leaves(recipe.model_dump(mode="json"))
    if not old.get("rollout.max_staleness"):
        # no chain was late
        for leaves in (old, new):
            leaves.pop("rollout.late_chains", None)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name) and not _may_differ(name):
            now = f"got {short(new[name])}" if name in new else "missing"
            then = f"with {short(old[name])}" if name in old else "without it"
            problem = f"{now}, but {display(where)} was trained {then}"
            fix = "" if fix_of_removed(name) else "set it back, or "
            raise SettingError(name, problem, f"{fix}begin another run with output=OTHER", source="--resume")
    if checkpoint is None:
        return
    # a checkpoint of an older version has no digests
    contents = read_info(checkpoint).get("contents")
    before = contents if isinstance(contents, dict) else {}
    for name, digest in content_digests(recipe).items():
        if before.get(name, digest) != digest:
            problem = f"{display(Path(str(new[name])))} has another content than when {display(checkpoint)} was trained"
            fix = "restore the file, or begin another run with output=OTHER"
            raise SettingError(name, problem, fix, source="--resume")
    if recipe.train.steps < step_of(checkpoint):
        problem = f"got {recipe.train.steps}, but {display(checkpoint)} has more"
        raise SettingError("train.steps", problem, "raise it, or name an earlier checkpoint", source="--resume")


def content_digests(recipe: Recipe) -> dict[str, str]:
    """Return the SHA-256 of the files that decide what a run learns from, by the field that names each."""
    lora = recipe.model.lora
    named = {
        **{f"{part.section}.path": data.file for part in recipe.parts() if (data := part.recipe.data) is not None},
        "train.from_trajectories": recipe.train.from_trajectories,
        "model.chat_template": recipe.model.chat_template,
        "model.lora.from": Path(lora.from_) / WEIGHTS if lora is not None and lora.from_ is not None else None,
    }
    found = {}
    for name, place in named.items():
        if place is None or not (path := Path(place)).exists():
            continue
        whole = hashlib.sha256()
        for file in [path] if path.is_file() else sorted(path.glob("*.jsonl")):
            with file.open("rb") as content:
                whole.update(hashlib.file_digest(content, "sha256").digest())
        found[name] = whole.hexdigest()
    return found


def code_files(recipe: Recipe) -> dict[Path, str]:
    """Return the files of user code that decide what a run learns from, with the fields that name them."""
    data = recipe.model_dump(mode="json")
    named = {name: value for name, value in _leaves(data).items() if name != "prepare" and not _may_differ(name)}
    return source_files(named, Path.cwd(), recipe.import_path)


def changed_code(recipe: Recipe, checkpoint: Path) -> Iterator[str]:
    """Yield a warning for each file of user code that differs from the checkpoint's, if that has digests."""
    before = read_info(checkpoint).get("code")
    if not isinstance(before, dict):
        return
    files = code_files(recipe)
    for path, digest in digests_of(files).items():
        if before.get(path) != digest:
            how = "has changed" if path in before else "is new"
            told = f"{display(Path(path))} ({files[Path(path)]}) {how} since step {step_of(checkpoint)}"
            fix = "restore it, or begin another run with output=OTHER"
            yield f"{told}: later chains are not comparable with earlier ones; fix: {fix}"


def rewind(recipe: Recipe, folder: RunFolder, checkpoint: Path | None, say: Callable[[str], None]) -> None:
    """Cut what came after `checkpoint` (None: everything), and set later checkpoints aside; report it to `say`."""
    folder.note_stopped()
    for left in folder.checkpoints.glob(".step-*.partial"):
        shutil.rmtree(left)
    # weights that were being sent to servers
    shutil.rmtree(folder.sync, ignore_errors=True)
    folder.cut(read_info(checkpoint)["files"] if checkpoint else {})
    step = -1 if checkpoint is None else step_of(checkpoint)
    later = [path for path in checkpoints(folder.checkpoints) if step_of(path) > step]
    for text in changed_code(recipe, checkpoint) if checkpoint is not None else ():
        say(f"warning: {text}")
    if later:
        aside = next_free(folder.checkpoints / "set-aside")
        aside.mkdir()
        for path in later:
            path.rename(aside / path.name)
        say(f"later checkpoints are set aside: {', '.join(path.name for path in later)} in {aside}")
    say(f"resumed: {checkpoint}" if checkpoint else "resumed: from the beginning, there is no checkpoint")


def _may_differ(name: str) -> bool:
    patterns = (re.escape(field).replace(r"\*", r"[^.]+") for field in _MAY_DIFFER)
    own = re.fullmatch(r"data\.sources\.\d+\.((?!name).+)", name)
    # a source's settings are those of the recipe's top, or of rollout
    names = [name, *([own[1], f"rollout.{own[1]}"] if own else [])]
    return any(re.match(rf"{pattern}(\.|$)", each) for pattern in patterns for each in names)


def _leaves(data: Any, prefix: str = "") -> dict[str, Any]:
    if prefix == ".data.sources":
        # by number, so that messages name what differs in an entry
        data = {str(number): source for number, source in enumerate(data)}
    if isinstance(data, dict):
        return {name: leaf for key, value in data.items() for name, leaf in _leaves(value, f"{prefix}.{key}").items()}
    return {prefix.removeprefix("."): data}
