"""Settings of a curriculum, over tasks or over sources."""

from pydantic import Field, model_validator

from agentfactory.base.config import Section


class CurriculumConfig(Section):
    """A curriculum that visits solved and hopeless tasks less often. A task's success rate is the mean `success` of its
    last group's chains, averaged with the previous rate."""

    solved: float = Field(default=0.95, ge=0, le=1)
    """A task with at least this success rate is solved."""
    hopeless: float = Field(default=0.05, ge=0, le=1)
    """A task with at most this success rate is hopeless."""
    visit: float = Field(default=0.25, ge=0.01, le=1)
    """Probability of visiting a solved or hopeless task when it comes up."""

    @model_validator(mode="after")
    def _tasks_are_left(self) -> "CurriculumConfig":
        if self.hopeless >= self.solved:
            raise ValueError(f"hopeless={self.hopeless} must be less than solved={self.solved}")
        return self
