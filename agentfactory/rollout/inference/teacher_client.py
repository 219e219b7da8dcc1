"""The client of a teacher behind a server: its log-probabilities, at temperature 1, of the tokens that the policy
sampled. The server computes them as `prompt_logprobs` of a whole row, in one forward pass without its prefix cache."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from jaxtyping import Float, Int
from transformers import PreTrainedTokenizerBase

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import write_whole
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.config.server import TeacherServer
from agentfactory.rollout.inference import http_transport
from agentfactory.rollout.inference.http_transport import InferenceError, ServerUnreachableError
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.text.tokenizer import load_tokenizer, tokens_missing
from agentfactory.rollout.token_row import LARGEST_LOGPROB, LEAST_LOGPROB
from agentfactory.rollout.trajectory import Group, Trajectory

ANSWERS_WITHIN = 10.0
"""Seconds within which the server must describe itself."""
CANARY_TEXTS = (
    "The quick brown fox jumps over the lazy dog. Then it rests in the shade of an old oak tree and waits for night.",
    "def add(a: int, b: int) -> int:\n    return a + b\n\n\nprint(add(12, 30))  # 42\n",
    'Question: 17 + 25 = ?\nAnswer: {"name": "calculate", "arguments": {"expression": "17 + 25"}} is 42.',
)
"""Texts whose tokens show whether a server still has the same weights."""
LEAST_DRIFT = 0.02
"""Mean difference in nats below which the canary's log-probabilities count as equal: half precision differs by this
much between batches."""
_NOISES = 10.0
"""Multiple of the noise, measured at the start, below which they count as equal."""
_ENGINES = "serve it by vLLM >= 0.32, or by `agentfactory serve` with server.engine=embedded"
_MOST_MASS = 1.01
"""Largest sum of the probabilities of a token's alternatives, rounded in half precision."""


class _Canary(msgspec.Struct):
    contexts: list[list[int]]
    logprobs: list[list[float]]
    tolerance: float


class _Grades(NamedTuple):
    """The log-probabilities of tokens, and for top_k the k most likely tokens there (-1: missing) and theirs."""

    own: Float[np.ndarray, "places"]
    top: tuple[Int[np.ndarray, "places k"], Float[np.ndarray, "places k"]] | None = None


class TeacherClient:
    """A client that grades chains; use it as an async context manager, and call `check` first. Raises SettingError for
    what only another recipe or server can heal, ServerUnreachableError if the server has not answered for
    `retry_seconds`, and InferenceError for one answer that cannot be used."""

    def __init__(self, server: TeacherServer, policy: str, longest: int, retry_seconds: float) -> None:
        self.server = server
        self._policy = policy
        self._longest = longest
        self._client = InferenceClient(server.url, server.api_key_env, retry_seconds, section="teacher")
        self._model = ""
        self._missing: dict[int, str] = {}
        self._label: str | None = None
        self._canary: _Canary | None = None

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.__aexit__(*exception)

    def _fault(self, problem: str, fix: str) -> SettingError:
        return SettingError(self.server.field, problem, fix)

    # ---- checks

    async def check_server(self) -> dict[str, Any]:
        """Check the server without the policy: its routes and context length. Return the card of its model."""
        url = self.server.url
        try:
            async with asyncio.timeout(ANSWERS_WITHIN):
                await self._client.check_routes()
                cards = await self._client.connection.models(self._client.urls[0])
        except TimeoutError:
            raise self._fault(f"{url} has not answered within {ANSWERS_WITHIN:g} s", "restart the server") from None
        except ServerUnreachableError as error:
            problem, _, fix = str(error).rpartition("; ")
            if not problem:
                problem, fix = fix, "start it: agentfactory serve RECIPE"
            if "SGLang" in problem or fix.endswith("?"):
                # the advice for server.url would change the policy's server
                fix = f"{_ENGINES}, and write its address without a path such as /v1"
            raise self._fault(problem, fix.removeprefix("fix: ")) from error
        card = next((card for card in cards if not card.get("parent")), None)
        if card is None:
            raise self._fault(f"{url} lists no model at /v1/models", "start a server with a model")
        self._model = card["id"]
        # the server also samples a token
        if type(limit := card.get("max_model_len")) not in (int, NoneType):
            raise self._fault(f"{url} says max_model_len: {limit!r} at /v1/models", _ENGINES)
        if limit is not None and limit <= self._longest:
            problem = f"{url} reads {limit} tokens, and a chain may have rollout.max_total_tokens={self._longest}"
            fix = f"start it with a context of at least {self._longest + 1} tokens, or lower rollout.max_total_tokens"
            raise self._fault(problem, fix)
        return card

    async def check(self) -> None:
        """Check that the server can grade this policy: its routes, context length, tokenizer, and one answer."""
        url, card = self.server.url, await self.check_server()
        own, theirs = await asyncio.to_thread(self._load_tokenizers, card.get("root"))
        if (self.server.top_k or 0) > len(own):
            problem = f"got {self.server.top_k}, and the policy's vocabulary has {len(own)} tokens"
            raise SettingError("teacher.top_k", problem, "lower it")
        try:
            self._missing = {} if theirs is None else tokens_missing(own, theirs, url)
        except SettingError as error:
            raise error.at(self.server.field) from None
        contexts = [own.encode(text, add_special_tokens=False)[: self._longest] for text in CANARY_TEXTS]
        contexts = [ids for ids in contexts if len(ids) > 1 and self._missing.keys().isdisjoint(ids)]
        if not contexts:
            problem = "the policy's tokenizer has no text that could show whether the teacher's weights change"
            raise self._fault(problem, "use teacher.model")
        try:
            alone = [await self._ask_all(ids) for ids in contexts]
            together = await asyncio.gather(*map(self._ask_all, contexts))
        except InferenceError as error:
            raise self._fault(f"{url} cannot grade tokens: {error}", _ENGINES) from error
        tolerance = max(LEAST_DRIFT, _NOISES * _drift(alone, together))  # other batches have other rounding
        self._canary = _Canary(contexts, [values.tolist() for values in alone], tolerance)

    def _load_tokenizers(self, root: Any) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase | None]:
        own = load_tokenizer(self._policy)
        if root == self._policy:
            return own, None
        problem = f"the model at {self.server.url} calls itself {root!r}, which has no tokenizer here: whether its "
        problem += "ids mean the policy's tokens cannot be checked"
        fix = "put its tokenizer files into a folder of that name here, or serve it by its hub name"
        if not isinstance(root, str) or not root or (os.path.isabs(root) and not Path(root).is_dir()):
            raise self._fault(problem, fix)
        try:
            return own, load_tokenizer(root)
        except SettingError as error:
            raise self._fault(problem, fix) from error

    def _remedy(self, error: str) -> str:
        if self.server.top_k is not None and "logprobs" in error and "max" in error:
            return f"start vLLM with --max-logprobs {self.server.top_k}, or lower teacher.top_k"
        if "vocab" in error or "token_ids: must be" in error:
            return "name a teacher whose vocabulary has all of the policy's ids"
        return _ENGINES

    async def _ask_all(self, ids: list[int]) -> np.ndarray:
        return (await self._ask(ids, np.arange(1, len(ids)), f"canary-{len(ids)}")).own

    async def remember(self, file: Path, writes: bool = True) -> None:
        """Compare the server's weights with those that this run began with, by `file`, or write it (`writes`) if this
        is the beginning. Call it after `check`."""
        if not file.exists():
            if writes:
                write_whole(file, msgspec.json.encode(self._canary))
            return
        try:
            self._canary = msgspec.json.decode(file.read_bytes(), type=_Canary)
        except msgspec.DecodeError as error:
            raise self._fault(f"{file} is damaged: {error}", "begin another run with output=OTHER") from error
        await self.check_weights()

    async def check_weights(self) -> None:
        """Raise SettingError if fixed contexts show that the server has other weights than at the start."""
        canary = self._canary
        assert canary is not None
        try:
            found = await asyncio.gather(*map(self._ask_all, canary.contexts))
        except InferenceError as error:
            raise self._fault(f"its fixed contexts fail: {error}", "restart the server") from error
        drift = _drift([np.asarray(values) for values in canary.logprobs], found)
        if not drift <= canary.tolerance:
            tokens = sum(map(len, canary.logprobs))
            problem = f"{self.server.url} has other weights than when the run began: the log-probabilities of {tokens} "
            problem += f"fixed tokens differ by {drift:.3g} nats on average (equal: up to {canary.tolerance:.3g})"
            raise self._fault(problem, "serve the first weights again, and resume")

    # ---- grades

    async def grade(self, chain: Trajectory) -> int:
        """Add grades to the rows of a chain that has ended. Return the number of tokens that the server computed."""
        asked = 0
        for row in chain.rows:
            graded = row.graded()
            if not graded.size:
                continue
            if row.images:
                problem = f"chain {chain.id} has images, which are not sent to a teacher's server"
                raise self._fault(problem, "use teacher.model, of the policy's family")
            ids = [int(token) for token in row.token_ids[: graded[-1] + 1]]
            if found := sorted(self._missing.keys() & set(ids)):
                named = ", ".join(f"{self._missing[number]!r} ({number})" for number in found[:5])
                problem = f"its model has no token {named}, which the policy's chains contain"
                raise self._fault(problem, "name a teacher with it, or set model.chat_template to one without it")
            grades = await self._ask(ids, graded, chain.id)
            if grades.top is None:
                row.teacher_logprobs, row.teacher_tokens = grades.own, None
            else:
                row.teacher_tokens, row.teacher_logprobs = (values.ravel() for values in grades.top)
            asked += len(ids)
        return asked

    async def grade_again(self, groups: Sequence[Group]) -> None:
        """Replace the grades of groups that an earlier attempt of the run saved: it may have ended before it found that
        the server had other weights."""
        chains = [chain for group in groups for chain in group.trajectories]
        try:
            await asyncio.gather(*map(self.grade, chains))
        except InferenceError as error:
            raise self._fault(f"{self.server.url} cannot grade tokens: {error}", _ENGINES) from error

    async def _ask(self, ids: Sequence[int], places: Int[np.ndarray, "places"], chain: str) -> _Grades:
        """Return the grades of the tokens at `places` (none is 0). One replica gets the requests of one `chain`."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": self.server.top_k or 0}
        try:
            completion = await self._client.generate(ids, self._model, sampling, chain=chain)
        except http_transport.ContextOverflowError as error:
            problem = f"a chain of {len(ids)} tokens does not fit into its context: {error}"
            raise self._fault(problem, "serve it with a longer one, or lower rollout.max_total_tokens") from error
        except http_transport.RefusedError as error:
            reason, _, fix = str(error).partition("; fix: ")
            problem = f"{self.server.url} refuses to grade {len(ids)} tokens: {reason}"
            raise self._fault(problem, fix or self._remedy(reason)) from error
        except ServerUnreachableError as error:
            told = f"{self.server.field}: {error}; fix: start it again, and resume the run"
            raise ServerUnreachableError(told) from error
        for span in completion.versions:
            self._label = before = self._label or span.version
            if span.version != before:
                problem = f"{self.server.url} graded with weights called {span.version!r}, and before with {before!r}"
                raise self._fault(problem, "name a server whose weights nobody updates, and begin again")
        return _grades(completion.prompt_logprobs, ids, places, self.server.top_k)


def canary_file(server: TeacherServer, source: str) -> str:
    """Return the name of the file with the fixed contexts of the server of `source`, and their log-probabilities."""
    return "teacher.json" if server.field == TeacherServer.field else f"teacher-{source}.json"


@asynccontextmanager
async def open_teachers(
    servers: Mapping[str, TeacherServer], recipe: RolloutRecipe
) -> AsyncIterator[dict[str, TeacherClient]]:
    """Open the clients of the servers, by the source of their chains. Sources with the same server share one."""
    limits = {part.name: part.recipe.rollout.max_total_tokens for part in recipe.parts()}
    opened: dict[TeacherServer, TeacherClient] = {}
    async with AsyncExitStack() as stack:
        for server in dict.fromkeys(servers.values()):
            own = (limits.get(name, recipe.rollout.max_total_tokens) for name, of in servers.items() if of == server)
            teacher = TeacherClient(server, recipe.model.path, max(own), recipe.server.retry_seconds)
            opened[server] = await stack.enter_async_context(teacher)
        yield {name: opened[server] for name, server in servers.items()}


def _drift(before: Sequence[np.ndarray], now: Sequence[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(list(before)) - np.concatenate(list(now))).mean())


def _grades(scores: Any, ids: Sequence[int], places: np.ndarray, top_k: int | None) -> _Grades:
    """Read vLLM's prompt_logprobs: for each token but the first, {id: {logprob, rank}} of the token itself and of the
    most likely ones. Raise InferenceError for values that no teacher can have."""
    if not isinstance(scores, list) or len(scores) != len(ids):
        count = len(scores) if isinstance(scores, list) else "no"
        raise InferenceError(f"the teacher's server sent {count} prompt_logprobs for {len(ids)} tokens")
    try:
        for place, token in enumerate(ids[1:], 1):
            if str(token) not in scores[place]:
                raise InferenceError(f"the teacher's server graded other ids: token {place} is {token}, not listed")
        listed = [scores[place] for place in places.tolist()]
        own = np.array([entry[str(ids[place])]["logprob"] for place, entry in zip(places, listed, strict=True)], float)
        _check_values(own)
        if top_k is None:
            return _Grades(own.astype(np.float32))
        tokens = np.full((len(places), top_k), -1, np.int32)
        logprobs = np.zeros((len(places), top_k))
        for line, entry in enumerate(listed):
            # the token itself is listed, too, where it is not among the most likely
            ranked = sorted((-shown["logprob"], int(token)) for token, shown in entry.items())[:top_k]
            if any(token < 0 for _, token in ranked):
                raise ValueError(f"a negative id among {[token for _, token in ranked]}")
            tokens[line, : len(ranked)] = [token for _, token in ranked]
            logprobs[line, : len(ranked)] = [-value for value, _ in ranked]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InferenceError(f"the teacher's server sent other prompt_logprobs than vLLM's: {error!r}") from error
    _check_values(logprobs)
    if (mass := np.where(tokens >= 0, np.exp(logprobs), 0.0).sum(-1).max(initial=0.0)) > _MOST_MASS:
        raise InferenceError(f"the probabilities of the teacher's most likely tokens sum to {mass:.4g}")
    return _Grades(own.astype(np.float32), (tokens, logprobs.astype(np.float32)))


def _check_values(logprobs: np.ndarray) -> None:
    if (wrong := logprobs[~((logprobs >= LEAST_LOGPROB) & (logprobs <= LARGEST_LOGPROB))]).size:
        raise InferenceError(f"the teacher's server sent {wrong[0]} as a log-probability")
