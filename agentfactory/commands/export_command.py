"""Export a checkpoint to a folder to use or share: model or adapter, tokenizer, and the training's chat template."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import filled
from agentfactory.launching import run_folder
from agentfactory.launching.merging import ONLY_FOR_TRAINING, copy_files, merge_adapter
from agentfactory.launching.run_folder import ADAPTER, RECIPE, RunFolder, RunFolderError
from agentfactory.launching.served_weights import check_weights_folder
from agentfactory.recipe.composition import display
from agentfactory.rollout.model_hub import HubName, check_answers, check_names, is_hub_name
from agentfactory.trainers.checkpoints.checkpoint_folder import INFO, DamagedCheckpointError, read_info, verify

_ADAPTER = (ADAPTER, "adapter_model.safetensors")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    export(options.checkpoint, options.output, options.adapter, options.push, say)


def export(checkpoint: Path, output: Path, adapter: bool, push: str | None, say: Callable[[str], None]) -> None:
    """Export a checkpoint, or a run's last, to the new folder `output`: the full model, or with `adapter` only the
    adapter. `push` names a hub repository. Raises SettingError or RunFolderError."""
    checkpoint = checkpoint.expanduser()
    place = checkpoint.parent if checkpoint.name in (RECIPE, "checkpoints") else checkpoint
    if run_folder.is_run(place):
        checkpoint = _last_checkpoint(place)
        say(f"the last checkpoint of {display(place)} is {display(checkpoint)}")
    if checkpoint.exists():
        check_weights_folder(checkpoint)
    if not (checkpoint / INFO).is_file():
        problem = "is not a checkpoint" if checkpoint.exists() else "does not exist"
        fix = "name a run, such as runs/NAME, or a checkpoint, such as runs/NAME/checkpoints/step-000080"
        raise SettingError("", f"{checkpoint} {problem}", fix)
    if not run_folder.is_free(output):
        raise SettingError("--output", f"{output} is not empty", "--output OTHER")
    try:
        written = verify(checkpoint)
    except DamagedCheckpointError as error:
        raise SettingError("", str(error)) from None
    is_adapter = (checkpoint / ADAPTER).is_file()
    base = run_folder.base_of_adapter(checkpoint) if is_adapter and not adapter else None
    named = run_folder.named_base(checkpoint) if adapter and is_adapter else None
    check_names([HubName("base model", base, "model")] if base is not None and is_hub_name(base) else [])
    if adapter and not is_adapter:
        raise SettingError("--adapter", f"{checkpoint} holds a full model", "leave it out")
    with filled(output) as aside:
        # no files that others have added
        copy_files(checkpoint, written, aside, {*ONLY_FOR_TRAINING, *(() if adapter else _ADAPTER)})
        if base is not None:
            try:
                say(merge_adapter(checkpoint, base, str(read_info(checkpoint)["recipe"]["model"]["dtype"]), aside))
            except Exception as error:  # boundary: transformers, peft and safetensors raise many kinds of errors
                shutil.rmtree(aside)
                problem = f"{checkpoint} cannot be merged into its base {base}: {' '.join(str(error).split())}"
                raise SettingError("", problem, "put the base back, or --adapter for the adapter alone") from error
        if named is not None:
            # the current path of the adapter's base: the run may have been moved since peft wrote the old one
            config = json.loads((aside / ADAPTER).read_text(encoding="utf-8")) | {"base_model_name_or_path": named}
            (aside / ADAPTER).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    say(f"exported {checkpoint} to {output}")
    if push:
        from huggingface_hub import HfApi

        api = HfApi()
        try:
            check_answers("")
            name = api.create_repo(push, private=True, exist_ok=True).repo_id
            made = api.upload_folder(repo_id=name, folder_path=output, commit_message="Export from AgentFactory")
        except Exception as error:  # boundary: the hub's client raises the errors of all its layers
            problem = f"{error}; {output} is written, and can be uploaded later"
            raise SettingError(f"--push {push}", problem) from error
        say(f"uploaded to {made.commit_url}")


def _last_checkpoint(run: Path) -> Path:
    """Return the last checkpoint of a run, or of its last stage. Raises RunFolderError."""
    names = [name for name in RunFolder(run).stage_names() if Path(name).name == name]
    *earlier, last = [RunFolder(run / name, within=run) for name in names] or [RunFolder(run)]
    if (found := last.last_checkpoint()) is not None:
        return found
    fix = "run `agentfactory train` first"
    if trained := [stage for stage in earlier if stage.last_checkpoint() is not None]:
        fix = f"name an earlier stage, {display(trained[-1].path)}, or end the training with --resume"
    raise RunFolderError(f"{display(last.checkpoints)} holds no checkpoint; fix: {fix}")
