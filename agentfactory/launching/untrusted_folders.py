"""Check untrusted run folders and weights before libraries open their files by name."""

import os
import stat
from pathlib import Path

from agentfactory.base.files.untrusted_files import RefusedFileError, check_tree, entries_of, read_json, refused
from agentfactory.launching.run_folder import RECIPE, RunFolder, RunFolderError
from agentfactory.trainers.checkpoints.checkpoint_folder import INFO


def check_run_of(recipe: Path) -> None:
    """Raise RunFolderError if the file `recipe` is in a run folder with links or other special files."""
    folder = RunFolder(recipe.parent)
    # a folder with only some of them is not a task either
    if recipe.name == RECIPE and any(map(os.path.lexists, folder.parts)):
        folder.check_entries("recipe")


def check_weights_folder(path: Path) -> None:
    """Raise RunFolderError if the weights folder that a user named has files that must not be opened. A checkpoint must
    have regular files only, with readable JSON. A model may have links, as in the hub's cache."""
    is_ours = path.parent.name == "checkpoints"
    within = path.parents[1] if is_ours else path
    try:
        if not is_ours and not os.path.lexists(path / INFO):
            for file in path.iterdir():
                if not (file.is_file() or file.is_dir()) and file.exists():
                    raise refused(file, stat.S_IFMT(file.stat().st_mode))
            return
        check_tree(path, within)
        for name in entries_of(path, within):
            if name.endswith(".json"):
                read_json(path / name, within)
    except RefusedFileError as error:
        raise RunFolderError(str(error)) from None
    except OSError as error:
        raise RunFolderError(f"{error.filename}: {error.strerror}; fix: make it readable") from None
    except ValueError as error:
        raise RunFolderError(f"{path / name} cannot be read: {error}; fix: name another checkpoint") from None
