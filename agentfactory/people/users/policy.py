"""The trained model as the one that speaks for a simulated user."""

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace

from agentfactory.base.messages import Message
from agentfactory.rollout.chains.chain_runner import ChainRunner, Runner
from agentfactory.rollout.chains.chat_endpoint import ChatAnswer
from agentfactory.rollout.chains.episode import Episode

Policy = Callable[[list[Message], float, int], Awaitable[ChatAnswer]]
"""(messages, temperature, max tokens) -> the answer of the trained model, at the weights of the chain's next turn."""


def policy_of(runner: Runner, episode: Episode) -> Policy | None:
    """Return the trained model of a chain; None if a chat endpoint plays the agent."""
    if not isinstance(runner, ChainRunner):
        return None
    renderer, requests = runner.renderer, itertools.count()

    async def answer(messages: list[Message], temperature: float, most: int) -> ChatAnswer:
        # a seed of its own, or it would repeat the agent's choices
        sampling = replace(episode.sampling, temperature=temperature, seed=f"{episode.sampling.seed}/user")
        ids = renderer.open(messages, [])
        completion = await runner.sampler.sample(ids, sampling, next(requests), most)
        sampled = len(completion.token_ids)
        return ChatAnswer(
            renderer.parse_text(completion.token_ids).message, completion.cut, sampled, len(ids) + sampled
        )

    return answer
