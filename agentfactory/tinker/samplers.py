"""Sampling from frozen snapshots: each is an adapter of its own on the inference server, proven before its first token.

The server holds a few at a time. One that was unloaded is loaded again when it is asked for, and proven again by its
digest and by the canary's scores that were taken when it was saved."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentfactory.rollout.inference.inference_client import Completion, InferenceClient
from agentfactory.tinker.bodies import Asample, Sampling
from agentfactory.tinker.checkpoints import Saved, adapter_file
from agentfactory.tinker.messages import PromptScores, RequestError, Sample, sample_result
from agentfactory.trainers.checkpoints.checkpoint_folder import digest
from agentfactory.trainers.sync import adapter_sync
from agentfactory.trainers.sync.canary import Canary
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from agentfactory.trainers.sync.weight_sync import SyncReport


class Samplers:
    """The inference server, and the snapshots that it holds."""

    def __init__(
        self, client: InferenceClient, server: ServerControl, canary: Canary, base: str, most: int, longest: int, vocabulary: int
    ) -> None:
        """`base` is the server's name of the base model, `most` the number of adapters that it holds, `longest` its
        context in tokens."""
        self._client, self._server, self._canary = client, server, canary
        self._base, self._most, self._longest, self._vocabulary = base, most, longest, vocabulary
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
        path = saved.adapter.resolve()
        async with self._changed:
            self._users[path] += 1
            try:
                if path not in self._held:
                    await self._make_room()
                    self._held[path] = await asyncio.to_thread(self._load, saved, path)
            except BaseException:
                self._users[path] -= 1
                raise
            self._held.move_to_end(path)
        try:
            yield self._held[path]
        finally:
            async with self._changed:
                self._users[path] -= 1
                self._changed.notify_all()

    async def _make_room(self) -> None:
        while len(self._held) >= self._most:
            idle = next((path for path in self._held if not self._users[path]), None)
            if idle is None:
                await self._changed.wait()
            else:
                await asyncio.to_thread(adapter_sync.unload, self._server, self._held[idle])
                del self._held[idle], self._users[idle]

    def _load(self, saved: Saved, path: Path) -> str:
        self._number += 1
        name = f"{saved.path.model_id}-{saved.path.name}-{self._number}"
        adapter_sync.load(self._server, name, path)
        try:
            content = digest(adapter_file(saved))
            size = adapter_file(saved).stat().st_size
            self._canary.prove(SyncReport(self._number, name, name, size, 0.0, content), saved.scores())
        except SyncError:
            adapter_sync.unload(self._server, name)
            raise
        return name

    async def forget(self, saved: Saved) -> None:
        """Unload a snapshot that will not be used again, once its requests have ended."""
        path = saved.adapter.resolve()
        async with self._changed:
            await self._changed.wait_for(lambda: not self._users[path])
            if (name := self._held.pop(path, None)) is not None:
                await asyncio.to_thread(adapter_sync.unload, self._server, name)

    async def prove(self, saved: Saved) -> None:
        """Load a new snapshot, so that its proof does not wait for its first request."""
        async with self.using(saved):
            pass

    # ---- samples

    async def sample(self, saved: Saved | None, body: Asample) -> bytes:
        """Return the answer to a request. Raises RequestError and InferenceError."""
        prompt, params = self._prompt(body), body.sampling_params
        wanted = _sampling(params, self._longest - len(prompt))
        scored = body.prompt_logprobs or bool(body.topk_prompt_logprobs)
        async with self.using(saved) as model:

            async def one(number: int) -> Completion:
                own = dict(wanted)
                if params.seed is not None:
                    own["seed"] = (params.seed + number) % 2**63
                if scored and number == 0:
                    own["prompt_logprobs"] = body.topk_prompt_logprobs
                return await self._client.generate(prompt, model, own)

            completions = await asyncio.gather(*(one(number) for number in range(body.num_samples)))
        samples = [Sample(made.token_ids, made.logprobs, made.cut) for made in completions]
        scores = _scores(completions[0].prompt_logprobs, prompt, body.prompt_logprobs_last_n) if scored else None
        return sample_result(samples, scores, body.topk_prompt_logprobs)

    def _prompt(self, body: Asample) -> list[int]:
        refused = {
            "topk_sample_logprobs": body.topk_sample_logprobs,
            "target_prompt_logprobs": body.target_prompt_logprobs is not None,
            "prompt_alt_tokens_k": body.prompt_alt_tokens_k,
            "record_stability_info": body.record_stability_info,
        }
        if named := next((name for name, value in refused.items() if value), None):
            raise RequestError(f"{named}: is not supported by this service; leave it out")
        if kind := next((chunk.type for chunk in body.prompt.chunks if chunk.type != "encoded_text"), None):
            raise RequestError(f"prompt.chunks: got a chunk {kind!r:.100}; this service takes text only")
        prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
        if not prompt:
            raise RequestError("prompt: has no token; give at least one")
        if not 0 <= min(prompt) <= max(prompt) < self._vocabulary:
            raise RequestError(f"prompt: has ids outside of the model's 0 to {self._vocabulary - 1}")
        if len(prompt) >= self._longest:
            problem = f"prompt: has {len(prompt)} tokens, and the server's context is {self._longest}"
            raise RequestError(f"{problem}; shorten it, or start the service with a larger server.max_model_len")
        if (last := body.prompt_logprobs_last_n) is not None and last >= len(prompt):
            raise RequestError(f"prompt_logprobs_last_n: got {last}, and the prompt has {len(prompt)} tokens; lower it")
        return prompt


def _sampling(params: Sampling, room: int) -> dict[str, Any]:
    """Return vLLM's sampling parameters. Without `stop` a sequence ends at the model's end of sequence, with [] never."""
    wanted: dict[str, Any] = {"temperature": params.temperature, "max_tokens": min(params.max_tokens or room, room)}
    wanted |= {"top_k": params.top_k} if params.top_k > 0 else {}
    wanted |= {"top_p": params.top_p} if params.top_p < 1 else {}
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if stop == []:
        wanted["ignore_eos"] = True
    elif stop:
        kinds = {type(entry) for entry in stop}
        if len(kinds) > 1 or "" in stop:
            raise RequestError("sampling_params.stop: got an empty string, or texts and ids; give one kind")
        wanted["stop" if kinds == {str} else "stop_token_ids"] = stop
    return wanted


def _scores(listed: Any, prompt: list[int], last: int | None) -> PromptScores:
    """Return a server's scores of `prompt` by position, and only those of the `last` ones."""
    if not (isinstance(listed, list) and len(listed) == len(prompt)):
        raise SyncError(f"the server scored {len(listed or ())} of {len(prompt)} tokens of a prompt")
    found: list[dict[int, float] | None] = []
    for place, (token, scores) in enumerate(zip(prompt, listed, strict=True)):
        if scores is None or (last is not None and place < len(prompt) - last):
            found.append(None)
            continue
        by_token = {int(other): float(score["logprob"]) for other, score in scores.items()}
        found.append({token: by_token.pop(token), **by_token})
    return found
