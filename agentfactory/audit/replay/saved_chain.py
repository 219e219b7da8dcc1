"""A saved chain of a run, with what is needed to play it again: its task, its part of the recipe, weights."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from agentfactory.audit.record import RECIPE, Record
from agentfactory.audit.run_record import version_of
from agentfactory.base.errors import SettingError
from agentfactory.launching.served_weights import what_is_served
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.config import Part
from agentfactory.rollout.data import Task
from agentfactory.rollout.text.tokenizer import load_tokenizer
from agentfactory.rollout.trajectory import Trajectory
from agentfactory.trainers.checkpoints.checkpoint_folder import checkpoints, step_of


@dataclass(frozen=True)
class SavedChain:
    """A chain of a run. `version` is that of the weights that sampled its first turn, None if it is not known."""

    record: Record
    chain: Trajectory
    task: Task
    part: Part[Recipe]
    version: int | None

    def checkpoint(self) -> Path | None:
        """Return the checkpoint nearest to the weights that sampled the chain; None: the recipe's model is nearer."""
        found = checkpoints(self.record.folder / "checkpoints", self.record.folder)
        version = self.version or 0
        nearest = min(found, key=lambda path: abs(step_of(path) - version), default=None)
        return None if nearest is None or version < abs(step_of(nearest) - version) else nearest


def find_chain(records: list[Record], chain_id: str) -> SavedChain:
    """Return a chain of a run by its id. Raises SettingError if there is none, or if it cannot be played again."""
    names: list[str] = []
    for record in records:
        for seen in record.groups():
            for chain in seen.group.trajectories:
                names.append(chain.id)
                if chain.id == chain_id:
                    if record.recipe is None:
                        raise SettingError("RUN", record.lacks[RECIPE], "play it again where its recipe can be used")
                    parts = record.recipe.held_out_parts() if seen.held_out else record.recipe.parts()
                    part = next((one for one in parts if one.name == seen.group.source), Part("data", record.recipe))
                    _check(chain, part.recipe)
                    labels = [span.version for row in chain.rows[:1] for span in row.versions[:1]]
                    version = version_of(record, labels[0]) if labels else None
                    return SavedChain(record, chain, seen.group.task, part, version)
    near = [name for name in names if name.startswith(chain_id)][:3]
    near = near or difflib.get_close_matches(chain_id, names, 3, cutoff=0.3) or names[:3]
    fix = f"name one, such as {', '.join(near)}" if near else "name another run: this one has no chains"
    raise SettingError("CHAIN", f"got {chain_id!r}, and the run has no such chain", fix)


def _check(chain: Trajectory, recipe: Recipe) -> None:
    if recipe.rollout.agent is not None:
        problem = f"{chain.id} was played by an agent with its own loop, which cannot be stopped at a turn"
        raise SettingError("CHAIN", problem, "name a run without rollout.agent")
    if recipe.rollout.user is not None:
        problem = f"{chain.id} had a simulated user, who would speak again"
        raise SettingError("CHAIN", problem, "name a run without rollout.user")
    if recipe.rollout.context.policy == "summarize":
        raise SettingError("CHAIN", f"{chain.id} has summaries, which are sampled again", "name a run without them")
    if not chain.turns:
        raise SettingError("CHAIN", f"{chain.id} has no turns: {chain.error or chain.outcome}", "name another chain")


def check_same_tokens(saved: SavedChain, checkpoint: Path) -> None:
    """Raise SettingError unless a checkpoint has the tokens of the chain's model."""
    assert saved.record.recipe is not None
    served = what_is_served(saved.record.recipe, checkpoint)
    own, other = (load_tokenizer(path).get_vocab() for path in (saved.part.recipe.model.path, served.recipe.model.path))
    if own != other:
        problem = f"{checkpoint} has another tokenizer than {saved.part.recipe.model.path}"
        raise SettingError("--checkpoint", problem, "name a checkpoint of the same model")
