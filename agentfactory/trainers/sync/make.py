"""Creates the backend that a recipe names, for its servers."""

from pathlib import Path

from agentfactory.rollout.config import Inflight
from agentfactory.tools.errors import SettingError
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.server_control import ServerControl
from agentfactory.trainers.sync.backends import load_backend
from agentfactory.trainers.sync.protocol import WeightSync


def make_sync(recipe: TrainRecipe, servers: list[ServerControl], folder: Path, run: str, attempt: int) -> WeightSync:
    """Creates the recipe's backend. `folder` is for files that it transfers; `run` and `attempt` name adapters, so that
    those of an earlier attempt on the same server are never mistaken for this one's. Raises SyncError if the backend
    cannot work, and SettingError if a user's own class is not a backend."""
    made = load_backend(recipe)(
        servers=servers,
        folder=folder,
        run=run,
        attempt=attempt,
        keep=recipe.rollout.max_staleness + 2,
        keep_caches=recipe.rollout.inflight == Inflight.KEEP,
    )
    if lacks := [name for name in ("push", "restore", "close") if not callable(getattr(made, name, None))]:
        problem = f"{recipe.sync.backend} has no {', '.join(lacks)}"
        raise SettingError("sync.backend", problem, "see WeightSync in agentfactory/trainers/sync/protocol.py")
    return made
