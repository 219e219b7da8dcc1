"""The canary: a few fixed contexts whose next-token log-probabilities server and trainer compute for every version.

Even with the right weights, a server may compute with others: a cache of older weights, a packed copy, a listed but
unapplied adapter, a replica that was not updated. The canary sends the same requests as rollouts, to each replica."""

import logging
import random
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from agentfactory.rollout.images.image_tokens import BANNED_BIAS, Vision
from agentfactory.rollout.images.parts import data_url
from agentfactory.rollout.images.store import ImageStore
from agentfactory.rollout.inference.routing import Replica
from agentfactory.rollout.token_row import ImageSpan
from agentfactory.trainers.batches.image_batches import ImageLoader
from agentfactory.trainers.networks.fp8 import in_high_precision
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync import weight_sync
from agentfactory.trainers.sync.canary_verdict import Drift, Scores, Verdict, judge_rows
from agentfactory.trainers.sync.server_control import ServerControl, ServerGoneError, SyncError
from agentfactory.trainers.sync.weight_sync import ForeignWeightsError, SyncReport

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CONTEXTS = 8
CONTEXT_TOKENS = {"vllm": 144, "embedded": 8, "sglang": 144}
"""Engine -> context length. More than a block of vLLM's or SGLang's prefix cache, at most 128 tokens: shorter contexts
are never cached, so a stale cache would not be detected. The embedded engine caches single tokens."""
CONTEXTS_AGAIN = 2
"""Number of contexts scored again before the next push; other weights would change them all."""
CANDIDATES = 16
"""Tokens scored after each context; vLLM returns at most 20."""
WATCHED = 4
"""Number of tokens with trained rows in each context and among its candidates."""
_INVALID = -9999.0
"""Value that vLLM sends for a NaN log-probability."""


class OtherVersionError(SyncError):
    """A server that generates with the wrong base weights; `versions` are their labels."""

    def __init__(self, message: str, versions: set[str]) -> None:
        super().__init__(message)
        self.versions = versions


Forward = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class CanaryRow:
    """A context, and the tokens scored at the position after it."""

    context: list[int]
    candidates: list[int]
    banned: tuple[int, ...] = ()
    """Image tokens: see Policy."""
    images: tuple[ImageSpan, ...] = ()
    collapsed: tuple[int, ...] = ()
    """The context with one token for the image (one or none), in the form that servers accept."""
    png: bytes = b""


def canary_rows(
    vocabulary: Sequence[int], longest: int, seed: int = 0, length: int = CONTEXT_TOKENS["vllm"]
) -> list[CanaryRow]:
    """Return the canary's rows: tokens of `vocabulary` drawn with `seed`, so all processes get the same rows. A context
    has `length` tokens, and at most `longest`."""
    draw = random.Random(seed)
    length, count = min(length, longest), min(CANDIDATES, len(vocabulary))
    return [CanaryRow(draw.choices(vocabulary, k=length), draw.sample(vocabulary, count)) for _ in range(CONTEXTS)]


def with_tokens(row: CanaryRow, tokens: Sequence[int], number: int) -> CanaryRow:
    """Return a row with some of `tokens` as candidates, and in every other row without image also in the context."""
    if not tokens:
        return row
    some = list(dict.fromkeys(tokens[(number + n) % len(tokens)] for n in range(WATCHED)))
    others = [token for token in row.candidates if token not in some]
    candidates = [*some, *others][: len(row.candidates)]
    context = list(row.context)
    if number % 2 == 0 and not row.images:
        for n in range(WATCHED):
            context[(n + 1) * len(context) // (WATCHED + 1)] = some[n % len(some)]
    return replace(row, candidates=candidates, context=context)


def with_image_rows(
    rows: Sequence[CanaryRow], vision: Vision, store: ImageStore | None, seed: int = 0
) -> list[CanaryRow]:
    """Return the rows for a vision-language model; with a `store`, every other one has an image if there is room."""
    rows = [replace(row, banned=vision.banned_token_ids) for row in rows]
    if store is None:
        return rows
    noise = Image.frombytes("RGB", (8, 8), random.Random(seed).randbytes(192))
    picture = vision.fit(noise.resize(vision.blank(vision.smallest()).size, Image.Resampling.NEAREST))
    image = store.put(picture), vision.grid(picture)
    tokens, length = vision.tokens(image[1]), len(rows[0].context)
    if tokens + 2 > length:
        return rows
    for number in range(0, len(rows), 2):
        text = rows[number].context[tokens:]
        half = len(text) // 2
        collapsed = [*text[:half], vision.image_token_id, *text[half:]]
        context, spans = vision.expand(collapsed, [image])
        shown: dict[str, Any] = {"images": tuple(spans), "collapsed": tuple(collapsed), "png": store.png(image[0])}
        rows[number] = replace(rows[number], context=context, **shown)
    return rows


@torch.no_grad()
def trainer_scores(
    policy: Policy, rows: Sequence[CanaryRow], forward: Forward | None = None, images: ImageLoader | None = None
) -> Scores:
    """Return the trainer's log-probabilities of all candidates, row by row, at temperature 1. If the policy is sharded,
    every process calls this, with a `forward` that gathers the weights. Rows with images need `images`."""
    device = next(policy.parameters()).device
    contexts = [row.context for row in rows]
    length = len(contexts[0])
    ends = torch.arange(1, len(rows) + 1, device=device) * length - 1
    labels = torch.tensor([row.candidates for row in rows], device=device)
    trained = policy.training
    policy.eval()  # disables an adapter's dropout
    seen = images.load_block(length, [row.images for row in rows], device) if images is not None else None
    inputs = torch.tensor(contexts, device=device), ends, labels, None, None, seen
    with in_high_precision(policy):
        logprobs, _ = (forward or policy)(*inputs)
    policy.train(trained)
    return logprobs.flatten().double().cpu().numpy()


def server_scores(
    server: ServerControl, rows: Sequence[CanaryRow], report: SyncReport, fresh: bool, replica: int | None = None
) -> Scores:
    """Return the scores of the same rows by a server's `replica`, with the weights of `report`. `fresh` avoids cached
    entries by a salt, and leaves them to become ever more stale for the requests that read them. Raises SyncError."""

    def score(row: CanaryRow) -> list[float]:
        # vLLM 0.32 truncates the list with the sampled token before the candidates, so one candidate is requested twice
        asked = [*row.candidates, row.candidates[0]]
        params = {"max_tokens": 1, "temperature": 1.0, "logprobs": len(asked), "logprob_token_ids": asked}
        body: dict[str, Any] = {"token_ids": row.context, "model": report.model, "sampling_params": params}
        if row.banned:
            params["logit_bias"] = {str(token): BANNED_BIAS for token in row.banned}
        if row.images:
            url = data_url(row.png)
            body["content_parts"] = [{"type": "image_url", "url": url, "uuid": image.digest} for image in row.images]
            body |= {"token_ids": row.collapsed, "return_token_ids": True}
        salt = secrets.token_hex(16) if fresh else report.cache_salt
        if salt is not None:
            body["cache_salt"] = salt
        try:
            answer = server.post("/inference/v1/generate", body, replica)
            choice = answer["choices"][0]
            versions = {span["version"] for span in choice["weight_versions"] or []}
            given = {entry["token_id"]: entry["logprob"] for entry in choice["logprobs"]["content"][0]["top_logprobs"]}
        except (KeyError, TypeError, IndexError) as error:
            problem = f"{server.url}/inference/v1/generate did not answer the canary with a completion ({error!r})"
            raise SyncError(f"{problem}; is a proxy in front of it?") from error
        if row.images and answer.get("prompt_token_ids") != row.context:
            raise SyncError(f"{server.url} tokenises an image of the canary differently from the trainer")
        if not report.is_adapter and versions != {report.label}:
            told = f"{server.url} generates with version {', '.join(map(repr, versions))}, not with {report.label!r}"
            raise OtherVersionError(told, versions)
        missing = [token for token in row.candidates if given.get(token, _INVALID) == _INVALID]
        if missing:
            raise SyncError(f"{server.url} returned no log-probability for token {missing[0]} of logprob_token_ids")
        return [given[token] for token in row.candidates]

    with ThreadPoolExecutor(len(rows)) as pool:
        return np.array([logprob for scores in pool.map(score, rows) for logprob in scores])


class Canary:
    """A check, for each version, that each replica's log-probabilities follow the trainer's. See Drift."""

    def __init__(
        self, servers: Sequence[ServerControl], rows: Sequence[CanaryRow], dtype: str, rounded: bool = False
    ) -> None:
        """`servers` is empty in processes that only compute the trainer's scores. `dtype` is the policy's. `rounded`:
        servers and trainer use different weights by design (see TrainRecipe.rounding)."""
        self.rows = list(rows)
        self._servers = servers
        self._dtype = dtype
        self._watched: set[int] = set()
        self._proven: SyncReport | None = None
        self._drifts: defaultdict[Replica, Drift] = defaultdict(lambda: Drift(dtype, len(self.rows), rounded))

    def watch(self, tokens: Sequence[int]) -> None:
        """Include these tokens in the contexts and candidates, in every process and before the first proof: random rows
        would not show whether a server has their weights."""
        self.rows = [with_tokens(row, tokens, number) for number, row in enumerate(self.rows)]
        self._watched = {*tokens}

    def trainer_scores(self, policy: Policy, *forward_and_images: Any, **named: Any) -> Scores:
        return trainer_scores(policy, self.rows, *forward_and_images, **named)

    def prove(self, report: SyncReport, trainer: Scores) -> dict[str, float]:
        """Score the version of `report` on every replica; `trainer` are the policy's scores of the same version. Return
        the metrics of the weakest proof. Raises SyncError if a replica does not serve the trainer's weights."""
        verdicts: list[Verdict] = []

        def judge(server: ServerControl) -> None:
            verdicts.extend(on_replicas(server, lambda replica: self._judge(server, replica, report, trainer)))

        weight_sync.on_each(self._servers, judge)
        self._proven = report
        slopes = [verdict.slope for verdict in verdicts if verdict.slope is not None]
        metrics = {
            "sync/provable": float(all(verdict.provable for verdict in verdicts)),
            "sync/canary_drift": max(verdict.drift for verdict in verdicts),
            "sync/canary_cache_gap": max(verdict.cache_gap for verdict in verdicts),
            "sync/canary_noise": max(drift.noise for drift in self._drifts.values()),
        }
        return {**metrics, "sync/canary_slope": min(slopes)} if slopes else metrics

    def prove_again(self, report: SyncReport, url: str) -> None:
        """Check that the server at `url` scores as before, after WeightSync.restore. Raises SyncError."""
        if self._proven is None:
            return
        server = weight_sync.find(self._servers, url)

        def judge_again(replica: int | None) -> None:
            if (drift := self._drifts[Replica(server.url, replica)]).started:
                scores = server_scores(server, self.rows, report, fresh=True, replica=replica)
                _accept(server, replica, report, drift.judge_again(scores))

        on_replicas(server, judge_again)

    def prove_unchanged(self) -> None:
        """Raise ForeignWeightsError if another process has changed a server's weights since the last proof. Servers
        that sleep, are gone, or were restarted with their initial weights are left to the next push."""
        if (report := self._proven) is not None:
            with suppress(ServerGoneError):
                weight_sync.on_each(self._servers, lambda server: self._compare_with_proof(server, report))

    def _touched(self) -> np.ndarray:
        pairs = [(not self._watched.isdisjoint(row.context), token) for row in self.rows for token in row.candidates]
        return np.array([in_context or token in self._watched for in_context, token in pairs])

    def _compare_with_proof(self, server: ServerControl, report: SyncReport) -> None:
        restarted = report.is_adapter and report.model not in weight_sync.served_models(server)
        if server.asleep or restarted:
            return

        def compare(replica: int | None) -> None:
            drift = self._drifts[Replica(server.url, replica)]
            if not drift.started:
                return
            try:
                scores = server_scores(server, self.rows[:CONTEXTS_AGAIN], report, fresh=True, replica=replica)
            except OtherVersionError as error:
                if error.versions != {weight_sync.INITIAL_LABEL}:
                    raise ForeignWeightsError(server, f"serves version {', '.join(sorted(error.versions))}") from error
                return
            verdict = drift.judge_again(scores)
            if verdict.failure is not None:
                changed = f"has changed its weights since it proved version {report.version}"
                raise ForeignWeightsError(server, f"{changed}: {verdict.failure}")

        on_replicas(server, compare)

    def _judge(self, server: ServerControl, replica: int | None, report: SyncReport, trainer: Scores) -> Verdict:
        drift = self._drifts[Replica(server.url, replica)]
        # together, in fewer passes: by its salt, the second leaves the cache entries of earlier versions to the first
        score = partial(server_scores, server, self.rows, report, replica=replica)
        with ThreadPoolExecutor(2) as pool:
            cached, fresh = pool.map(lambda is_fresh: score(fresh=is_fresh), (False, True))
        verdict = (drift.judge if drift.started else drift.start)(cached, fresh, trainer)
        if self._watched and verdict.failure is None:
            verdict = replace(verdict, failure=judge_rows(fresh - trainer, self._touched(), self._dtype))
        if not verdict.provable:
            logger.info("version %d: not yet provable by its log-probabilities on %s", report.version, server.url)
        return _accept(server, replica, report, verdict)


def on_replicas(server: ServerControl, act: Callable[[int | None], Result]) -> list[Result]:
    replicas = server.replicas()
    with ThreadPoolExecutor(len(replicas)) as pool:
        return [*pool.map(act, replicas)]


def _accept(server: ServerControl, replica: int | None, report: SyncReport, verdict: Verdict) -> Verdict:
    if verdict.failure is not None:
        named = server.url if replica is None else f"{server.url}, replica {replica}"
        raise SyncError(f"{named}, version {report.version} ({report.label}): {verdict.failure}")
    return verdict
