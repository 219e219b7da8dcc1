"""Check run folders and weights that may be somebody else's, before libraries open their files by name."""

import os
import stat
from pathlib import Path

from agentfactory.launching.run_folder import RECIPE, RunFolder, RunFolderError
from agentfactory.tools.files.untrusted_files import RefusedFileError, check_tree, entries_of, read_json, refused
from agentfactory.trainers.checkpoints.checkpoint_folder import INFO


def check_run_of(recipe: Path) -> None:
    """Raise RunFolderError if the file `recipe` is in a run folder with links or other special files."""
    folder = RunFolder(recipe.parent)
    # a folder that lacks some of them is nobody's task either
    if recipe.name == RECIPE and any(map(os.path.lexists, folder.parts)):
        folder.check_entries("recipe")


def check_weights_folder(path: Path) -> None:
    """Raise RunFolderError if a folder of weights, as a user named it, has files that must not be opened: of a
    checkpoint, everything but regular files, and JSON that cannot be read. A model may have links, as in the hub's
    cache."""
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
