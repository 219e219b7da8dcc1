"""Log-probabilities of the trainer for every text family of transformers, compared with the model alone."""

import re
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from agentfactory.base.errors import SettingError
from agentfactory.rollout.inference.sequence_lengths import check_lengths, position_limit
from agentfactory.trainers.batches.batch import Batching, TrainingRow, make_batches
from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.networks.network import apply_options, resolve_batching
from agentfactory.trainers.networks.policy import Policy, check_head
from tests.text_families import FAMILIES, ROTATED, rows_of_many_lengths, scores_alone, tiny_network

LAYOUTS: tuple[Batching, ...] = ("padded", "packed", "tree")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["rembert", "cohere"])
def test_a_network_whose_head_is_not_supported_is_refused(family: str, dtype: torch.dtype) -> None:
    with pytest.raises(SettingError, match=r"model\.path: .*; fix: train another model"):
        check_head(tiny_network(family).to(dtype))


def test_rounding_that_deep_layers_amplify_is_no_fault() -> None:
    """As in pretrained networks of 24 layers, whose log-probabilities differ by .8 between kinds of attention."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 24, "initializer_range": 0.2}
    config = CONFIG_MAPPING["qwen2"](vocab_size=128, num_attention_heads=4, num_key_value_heads=2, **sizes)
    network = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    ids, scores = torch.arange(8)[None], []
    for kind in ("eager", "sdpa"):
        network.set_attn_implementation(kind)
        with torch.no_grad():
            scores.append(network(ids).logits.float().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None]))
    assert (scores[0] - scores[1]).abs().max() > 0.1
    check_head(network)


def test_only_attention_that_selects_keys_is_chosen() -> None:
    network, train = tiny_network("deepseek_v32"), TrainConfig(steps=1, attention="flex_attention")
    assert resolve_batching(network, TrainConfig(steps=1)) == "padded"
    with pytest.raises(SettingError, match=r"train\.attention: flex_attention would ignore the keys that .* selects"):
        apply_options(network, train, "cpu", "padded")


def deviation(network: Any, rows: list[list[int]], batching: Batching) -> float:
    expected = [scores_alone(network, row) for row in rows]
    policy = Policy(network, torch.float32, batching)
    given = [TrainingRow(row, list(range(1, len(row))), {"weight": [1.0] * (len(row) - 1)}) for row in rows]
    found = []
    for part in make_batches(given, batching, 2**20)[0].micro_batches:
        with torch.no_grad():
            scores, _ = policy(part.ids, part.sources, part.labels, part.positions, part.ends)
        found.append((scores - torch.cat([expected[index] for index in part.rows])).abs().max())
    return float(torch.stack(found).max())


@pytest.mark.numbers
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gpt2", "jetmoe", "mpt"),
        # windows, and layers of other widths; chunks; a state; selected keys
        *("gemma4_text", "llama4_text", "mamba2", "deepseek_v32"),
        # attention to what follows; numbers of a whole row; keys selected among equal ones
        *("bert-generation", "xlnet", "cpmant", "doge"),
        # a soft cap on attention scores; sliding windows; sinks; latent attention; another name of the cap on logits
        *("gemma2", "vaultgemma", "gemma3_text", "gpt_oss", "deepseek_v3", "recurrent_gemma"),
        *(pytest.param(family, marks=pytest.mark.long) for family in FAMILIES),
    ],
)
def test_every_layout_of_every_family_is_exact_or_refused(family: str) -> None:
    network = tiny_network(family)
    for batching in LAYOUTS:
        if (error := refusal(network, batching)) is None:
            assert deviation(network, rows_of_many_lengths(), batching) < 1e-3
        else:
            # no network has a fault that no rule names
            assert re.match(r"(model\.path|train\.batching): (?!.*Error:)", str(error))


def refusal(network: Any, batching: Batching) -> SettingError | None:
    try:
        check_head(network)
        assert resolve_batching(network, TrainConfig(steps=1, batching=batching)) == batching
    except SettingError as error:
        return error
    return None


def test_networks_that_fail_are_refused_by_name() -> None:
    for check, words in (
        (check_head, r"model\.path: LlamaForCausalLM fails in a first forward pass: ZeroDivisionError: division"),
        (
            lambda network: resolve_batching(network, TrainConfig(steps=1, batching="packed")),
            "packed would be wrong: LlamaForCausalLM fails on rows that share a line: ZeroDivisionError",
        ),
    ):
        network = tiny_network("llama")
        network.model.norm.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(SettingError, match=words):
            check(network)


@pytest.mark.numbers
@pytest.mark.parametrize("kind", ROTATED)
def test_positions_that_depend_on_the_longest_row_of_a_pass(kind: str) -> None:
    """Up to the limit every layout is exact; beyond it rows change each other, and are refused."""
    family, fields = ROTATED[kind]
    network = tiny_network(family, **fields)
    check_head(network)
    rows, limit = rows_of_many_lengths(), position_limit(network.config.to_dict())
    assert limit == (kind, 32)
    short = [row[:32] for row in rows]
    for batching in LAYOUTS:
        assert resolve_batching(network, TrainConfig(steps=1, batching=batching)) == batching
        assert deviation(network, short, batching) < 1e-3
    assert deviation(network, [rows[1], rows[3]], "padded") > 0.1
    # factors of an earlier pass do not stay
    assert deviation(network, short, "padded") < 1e-3
    lengths = {"server.max_model_len": 64, "rollout.max_total_tokens": 33}
    with pytest.raises(SettingError, match=r"server\.max_model_len: got 64: .* and rollout.max_total_tokens=32"):
        check_lengths(network.config.to_dict(), lengths)
    check_lengths(network.config.to_dict(), dict.fromkeys(lengths, 32))
