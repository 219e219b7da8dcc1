"""Shared parts of the client programs: data, a step, and named cases, whose results are printed as a line of JSON."""

import json
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import tinker
from tinker import types

BASE = "Qwen/Qwen3-8B-Base"
WORDS = [[40, 50, 60, 70, 80, 90], [41, 52, 63, 74, 85], [42, 44, 46, 48, 50, 52, 54]]
"""Token ids that models of the tests learn by heart."""


def create(service: tinker.ServiceClient, rank: int = 8, seed: int = 1) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE, rank=rank, seed=seed).result()


def datum(ids: Sequence[int], **inputs: Any) -> types.Datum:
    """Return a datum that predicts each next token; `inputs` replace or complete targets and weights."""
    own = {"target_tokens": [*ids[1:]], "weights": [1.0] * (len(ids) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints([*ids[:-1]]), loss_fn_inputs=inputs or own)


def learn(client: tinker.TrainingClient, data: list[types.Datum], rate: float = 5e-3, steps: int = 1) -> list[float]:
    """Train by cross_entropy; return the loss before each step."""
    adam, losses = types.AdamParams(learning_rate=rate), []
    for _ in range(steps):
        passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(adam)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def loss(client: tinker.TrainingClient, data: list[types.Datum]) -> float:
    return client.forward(data, "cross_entropy").result().metrics["loss:sum"]


def refusal(call: Callable[[], Any]) -> dict[str, str]:
    """Return the error of a call that must fail."""
    try:
        call()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": "none", "text": ""}


def main(cases: Sequence[Callable[[tinker.ServiceClient], Any]]) -> None:
    """Run the cases one by one, each in a session of its own, also after one has failed."""
    results: dict[str, Any] = {}
    for case in cases:
        service = tinker.ServiceClient()
        try:
            results[case.__name__] = case(service)
        except Exception:
            results[case.__name__] = {"failed": traceback.format_exc()}
        service.close("success").result()
    print(json.dumps(results))
