"""An agent that breaks the format on purpose, in one chain of ten: a call is put there without the tag that opens it,
so that the turn cannot be read, and the policy goes on from it. Many such chains still succeed.

    python benchmarks/staleness.py rollout.agent=benchmarks/breaking_agent.py:BreaksFormat --output runs/broken
"""

import zlib

from agentfactory import Agent
from agentfactory.rollout.agent import Turn
from agentfactory.rollout.client import Completion

CALL = '{"name": "move", "arguments": {"direction": "north"}}\n'


class BreaksFormat(Agent):
    """Breaks the second turn of a tenth of the chains, chosen by their ids."""

    async def generate(self, turn: Turn) -> Completion:
        """Sample the turn, or what follows a call that nothing has opened."""
        broken = turn.number == 1 and zlib.crc32(turn.chain.encode()) % 10 == 0
        return await turn.sample(prefix=CALL if broken else "")
