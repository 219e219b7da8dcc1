"""An agent that breaks the format on purpose, in one chain of ten: it inserts a call without its opening tag. The turn
cannot be parsed, and the policy continues after it. Many such chains still succeed.

    python benchmarks/staleness.py rollout.agent=benchmarks/breaking_agent.py:BreaksFormat --output runs/broken
"""

import zlib

from agentfactory import Agent
from agentfactory.rollout.chains.agent_hooks import Turn
from agentfactory.rollout.inference.inference_client import Completion

CALL = '{"name": "move", "arguments": {"direction": "north"}}\n'


class BreaksFormat(Agent):
    """Breaks the second turn of a tenth of the chains, chosen by their ids."""

    async def generate(self, turn: Turn) -> Completion:
        """Sample the turn; in chosen chains, insert a call without its opening tag and sample only the rest."""
        broken = turn.number == 1 and zlib.crc32(turn.chain.encode()) % 10 == 0
        return await turn.sample(prefix=CALL if broken else "")
