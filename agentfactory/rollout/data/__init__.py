"""Tasks: rows of a file, a hub dataset or a source, loaded, checked and ordered."""

from agentfactory.rollout.data.load import Task, check_source, conversation_of, load_tasks
from agentfactory.rollout.data.order_and_mix import WHOLE, Place, Share, TaskMix, TaskOrder

__all__ = ["WHOLE", "Place", "Share", "Task", "TaskMix", "TaskOrder", "check_source", "conversation_of", "load_tasks"]
