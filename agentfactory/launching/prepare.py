"""Run a recipe's `prepare` function in a child: `python -m ...prepare FILE.py:NAME FOLDER SEED [IMPORT_PATH ...]`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import filled
from agentfactory.base.processes import environment, parent_watch
from agentfactory.base.run_notices import doing
from agentfactory.base.user_code import import_path
from agentfactory.base.user_code.import_path import own_python
from agentfactory.base.user_code.loading import UserCodeError, load_object
from agentfactory.base.user_code.watch import announced

if TYPE_CHECKING:
    # the child does not need them, and they are slow to import
    from agentfactory.launching.child_processes import Children
    from agentfactory.recipe.schema import Recipe, StagedRecipe


def prepare_command(recipe: "Recipe | StagedRecipe") -> list[str]:
    assert recipe.prepare is not None
    folder = recipe.output / "prepared"
    command = own_python("-m", "agentfactory.launching.prepare", recipe.prepare, str(folder), str(recipe.seed))
    return [*command, *map(str, recipe.import_path)]


def run_prepare(recipe: "Recipe | StagedRecipe", children: "Children", say: Callable[[str], None]) -> None:
    """Run the recipe's `prepare`, unless its folder exists. Raises ChildFailed."""
    folder = recipe.output / "prepared"
    if recipe.prepare is None or folder.exists():
        return
    from agentfactory.launching.child_processes import ChildFailed
    from agentfactory.recipe.composition import display
    from agentfactory.recipe.schema import stages_of

    variables = {name for stage in stages_of(recipe) for name in stage.variables()}
    say(f"preparing {display(folder)}")
    log = recipe.output / "logs" / "prepare.log"
    name = Path(recipe.prepare).name
    with announced(f"running {name} (prepare; log: {display(log)})"), doing(f"{name} prepares {display(folder)}"):
        inherited = environment.for_chains(variables, {})
        children.wait(children.start("prepare function", prepare_command(recipe), log, inherited=inherited))
    if not folder.exists():
        raise ChildFailed(f"the prepare function ended its process before it was done (log: {log})")


if __name__ == "__main__":
    parent_watch.follow_parent()
    import_path.append_folders(map(Path, sys.argv[4:]))
    reference, place, seed = sys.argv[1:4]
    try:
        with filled(Path(place)) as aside:
            function = load_object(reference, Path.cwd())
            with announced(f"running {Path(reference).name}"):
                function(aside, int(seed))
    except (UserCodeError, SettingError) as error:
        sys.exit(str(error))
