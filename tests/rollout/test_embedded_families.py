"""Log-probabilities of the embedded engine for every text family of transformers, compared with the model alone."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from agentfactory.rollout.inference.embedded.engine import Engine
from agentfactory.rollout.inference.embedded.sampling import Request, UnsupportedModel
from tests.engine_runs import finish
from tests.text_families import FAMILIES, ROTATED, rows_of_many_lengths, scores_alone, tiny_network

pytestmark = pytest.mark.numbers


def deviation(family: str, static: bool, length: int = 128, **fields: Any) -> float:
    """Return the largest deviation of sampled tokens from the model alone: seven requests in four slots, of which the
    last three come later."""
    engine = Engine(tiny_network(family, **fields), max_model_len=length, max_num_seqs=4, static_decode=static)
    prompts = [np.array(row[: length - 6]) for row in rows_of_many_lengths()]
    requests = [Request(prompt, 6, lambda request: None, temperature=0.0) for prompt in prompts]
    for request in requests[:4]:
        engine.add(request)
    for _ in range(2):
        engine.step()
    finish(engine, *requests[4:])
    alone, largest = tiny_network(family, **fields), 0.0
    for request in requests:
        expected = scores_alone(alone, [*request.prompt.tolist(), *request.tokens])[len(request.prompt) - 1 :]
        largest = max(largest, float((torch.tensor(request.logprobs) - expected).abs().max()))
    return largest


OF_CI = [
    # layers of several widths that share keys; a gate; a head that is called decoder; windows in some layers, and all;
    *("gemma4_text", "afmoe", "modernbert-decoder", "ministral", "mistral"),
    # learned positions; sinks; experts; latent attention
    *("gpt2", "gpt_oss", "qwen3_moe", "deepseek_v3"),
]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", OF_CI)
def test_families_are_exact(family: str, static: bool) -> None:
    assert deviation(family, static) < 1e-3


@pytest.mark.parametrize(
    ("family", "words"),
    [
        # the second in transformers 5.24
        ("recurrent_gemma", "RecurrentGemmaForCausalLM keeps a state of each sequence|layers of type linear_attention"),
        ("jetmoe", "layer 0 has 4 query and 4 key heads of width 16, where the configuration has 4 and 2 of width 16"),
        ("mimo_v2_flash", "layer 0 has 4 query and 2 key heads of width 128"),
        ("gpt_bigcode", "4 query and 1 key heads"),
        ("bert-generation", "log-probabilities differ"),
        ("llama4_text", "layers of type chunked_attention"),
    ],
)
def test_families_are_refused(family: str, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        deviation(family, False)


@pytest.mark.parametrize(("family", "is_exact"), [("gpt_oss", True), ("longcat_flash", True), ("camembert", False)])
def test_rounding_in_half_precision_is_no_fault(family: str, is_exact: bool) -> None:
    """Single tokens of experts differ by more than all tokens at other positions."""
    network = tiny_network(family).to(torch.bfloat16)
    with nullcontext() if is_exact else pytest.raises(UnsupportedModel, match="log-probabilities differ"):
        Engine(network, max_model_len=128, max_num_seqs=4)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact_or_refused(family: str) -> None:
    try:
        assert max(deviation(family, static) for static in (False, True)) < 1e-3
    except UnsupportedModel as error:
        # no model has a fault that no rule names
        assert "Error:" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("kind", ROTATED)
def test_positions_that_depend_on_the_longest_sequence_of_a_pass(kind: str) -> None:
    family, fields = ROTATED[kind]
    assert deviation(family, False, 32, **fields) < 1e-3
    with pytest.raises(UnsupportedModel, match=f"{kind} positions, .* lower server.max_model_len=33 to 32"):
        deviation(family, False, 33, **fields)


def test_a_table_of_positions_must_be_long_enough() -> None:
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel has no position 128: lower server.max_model_len"):
        Engine(tiny_network("gpt2"), max_model_len=129, max_num_seqs=4)
