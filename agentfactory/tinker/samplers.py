"""Sampling from frozen snapshots: each is an adapter of its own on the inference server, proven before its first token.

The server holds a few at a time. One that was unloaded is loaded again when it is asked for, and proven again by its
digest and by the canary's scores of the time when it was saved."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentfactory.rollout.inference.adapter_config import WEIGHTS
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.tinker.bodies import Asample, Sampling
from agentfactory.tinker.checkpoints import Saved
from agentfactory.tinker.losses import REFUSED
from agentfactory.tinker.messages import RequestError, sample_result
from agentfactory.trainers.checkpoints.checkpoint_folder import digest
from agentfactory.trainers.sync import adapter_sync
from agentfactory.trainers.sync.canary import Canary
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from agentfactory.trainers.sync.weight_sync import SyncReport


class Samplers:
    """The inference server, and the snapshots that it holds."""

    def __init__(
        self, client: InferenceClient, server: ServerControl, canary: Canary, base: str, most: int, longest: int
    ) -> None:
        """`base` is the server's name of the base model, `most` the number of adapters that it holds, `longest` its
        context in tokens."""
        self._client, self._server, self._canary = client, server, canary
        self._base, self._most, self._longest = base, most, longest
        self._held: OrderedDict[Path, str] = OrderedDict()
        """Folder of an adapter -> its name on the server; the one used last comes last."""
        self._users: Counter[Path] = Counter()
        self._changed = asyncio.Condition()
        self._number = 0

    @asynccontextmanager
    async def using(self, saved: Saved | None) -> AsyncIterator[str]:
        """Yield the server's name of a snapshot (None: of the base), which stays loaded during the context."""
        if saved is None:
            yield self._base
            return
        path = saved.adapter
        async with self._changed:
            while path not in self._held:
                if len(self._held) < self._most:
                    self._held[path] = await asyncio.to_thread(self._load, saved)
                elif (idle := next((held for held in self._held if not self._users[held]), None)) is not None:
                    await self._unload(idle)
                else:
                    await self._changed.wait()
            self._held.move_to_end(path)
            self._users[path] += 1
        try:
            yield self._held[path]
        finally:
            self._users[path] -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _unload(self, path: Path) -> None:
        await asyncio.to_thread(adapter_sync.unload, self._server, self._held[path])
        del self._held[path]

    def _load(self, saved: Saved) -> str:
        file = saved.adapter / WEIGHTS
        if not file.is_file():
            raise RequestError(f"model_path: {saved.path} was deleted, or overwritten; save it again", 404)
        self._number += 1
        name = f"{saved.info.model_id}-{saved.folder.name}-{self._number}"
        adapter_sync.load(self._server, name, saved.adapter)
        try:
            report = SyncReport(self._number, name, name, file.stat().st_size, 0.0, digest(file))
            self._canary.prove(report, saved.scores())
        except BaseException:
            adapter_sync.unload(self._server, name)
            raise
        return name

    async def prove(self, saved: Saved) -> None:
        """Load a new snapshot, so that its proof does not wait for its first request."""
        async with self.using(saved):
            pass

    async def forget(self, saved: Saved) -> None:
        """Unload a snapshot that nobody will use again, once its requests have ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._users[saved.adapter])
            if saved.adapter in self._held:
                await self._unload(saved.adapter)
            del self._users[saved.adapter]

    async def sample(self, saved: Saved | None, body: Asample) -> bytes:
        """Return the answer to a request. Raises RequestError and InferenceError."""
        prompt, top_k = _prompt(body, self._longest), body.topk_prompt_logprobs
        scored = bool(body.prompt_logprobs or top_k)
        room = self._longest - len(prompt)
        wanted = [_sampling(body.sampling_params, number, room) for number in range(body.num_samples)]
        if scored:
            wanted[0]["prompt_logprobs"] = top_k
        async with self.using(saved) as model:
            made = await asyncio.gather(*(self._client.generate(prompt, model, one) for one in wanted))
        scores = _scores(made[0].prompt_logprobs, prompt, body.prompt_logprobs_last_n) if scored else None
        return sample_result([(one.token_ids, one.logprobs, one.cut) for one in made], scores, top_k)


def _prompt(body: Asample, longest: int) -> list[int]:
    """Return a request's prompt. Raises RequestError for one that cannot be sampled from, and for options that this
    service lacks; the server checks the ids."""
    if body.record_stability_info:
        problem = "record_stability_info: is for the loss stable_reinforce, which is not here"
        raise RequestError(f"{problem}: {REFUSED['stable_reinforce']}")
    lacking = "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"
    if named := next((name for name in lacking if getattr(body, name)), None):
        raise RequestError(f"{named}: is not supported by this service; leave it out")
    if kind := next((chunk.type for chunk in body.prompt.chunks if chunk.type != "encoded_text"), None):
        raise RequestError(f"prompt.chunks: got a chunk {kind!r:.100}; this service takes text only")
    prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    if not 0 < len(prompt) < longest:
        problem = f"prompt: has {len(prompt)} tokens, and the server's context is {longest}"
        fix = f"give 1 to {longest - 1}, or start the service with a larger server.max_model_len"
        raise RequestError(f"{problem}; {fix}")
    if (last := body.prompt_logprobs_last_n) is not None and last >= len(prompt):
        raise RequestError(f"prompt_logprobs_last_n: got {last}, and the prompt has {len(prompt)} tokens; lower it")
    return prompt


def _sampling(params: Sampling, number: int, room: int) -> dict[str, Any]:
    """Return vLLM's parameters of a request's sample. Without `stop` it ends where the model's generations do, with []
    never."""
    wanted: dict[str, Any] = {"temperature": params.temperature, "max_tokens": min(params.max_tokens or room, room)}
    wanted |= {"top_k": params.top_k, "top_p": params.top_p}
    if params.seed is not None:
        wanted["seed"] = (params.seed + number) % 2**63
    if params.stop is None:
        return wanted
    if params.stop == []:
        return {**wanted, "ignore_eos": True}
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    kinds = {type(entry) for entry in stop}
    if len(kinds) > 1 or "" in stop:
        raise RequestError("sampling_params.stop: got an empty string, or texts and ids; give one kind")
    return {**wanted, "stop" if kinds == {str} else "stop_token_ids": stop}


def _scores(listed: Any, prompt: list[int], last: int | None) -> list[dict[int, float]]:
    """Return a server's scores of `prompt` by position, those of the own token first, and only the `last` ones."""
    if not (isinstance(listed, list) and len(listed) == len(prompt)):
        raise SyncError(f"the server scored {len(listed or ())} of {len(prompt)} tokens of a prompt")
    unasked, found = 0 if last is None else len(prompt) - last, list[dict[int, float]]()
    for token, scores in zip(prompt, [*[None] * unasked, *listed[unasked:]], strict=True):
        by_token = {int(other): float(score["logprob"]) for other, score in (scores or {}).items()}
        found.append({token: by_token.pop(token), **by_token} if by_token else {})
    return found
