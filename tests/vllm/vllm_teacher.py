"""Real vLLM as the server of a teacher: grades against a dense forward pass, and its limit on top_k."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentfactory.base.errors import SettingError
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.token_advantages import Credit
from tests.chat_tokenizers import make_tokenizer
from tests.server_process import VLLM_PYTHON, serve
from tests.trainers.test_served_teachers import LONGEST, PLAIN, chains, dense, graded, with_url


def test_grades_equal_a_dense_forward_pass(tmp_path: Path) -> None:
    tokenizer, folder, policy = make_tokenizer(), tmp_path / "teacher", tmp_path / "policy"
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, initializer_range=0.3,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for place in (folder, policy):
        tokenizer.save_pretrained(place)
    base = TrainRecipe.model_validate({"model": {"path": str(policy)}, "train": {"steps": 1, **PLAIN}})
    server = {"engine": "vllm", "max_model_len": LONGEST + 1, "options": {"python": VLLM_PYTHON}}
    with serve({"model": {"path": str(folder), "dtype": "float32"}, "server": server}, tmp_path) as url:
        for kind, count in (("sampled", None), ("reverse_kl", 8)):
            recipe = with_url(base, url, divergence=kind, top_k=count)
            rows = Credit(graded(recipe, chains()), recipe).rows
            with torch.no_grad():
                _, logits = dense(folder, rows)
            for row, line in zip(rows, logits, strict=True):
                theirs = line.log_softmax(-1)
                if count is None:
                    labels = torch.from_numpy(row.token_ids[row.targets])[:, None]
                    found, wanted = torch.from_numpy(row.streams["teacher"]), theirs.gather(-1, labels)[:, 0]
                else:
                    tokens, found = torch.from_numpy(row.streams["teacher_top"]).unbind(1)
                    wanted = theirs.topk(count).values
                    assert tokens.tolist() == theirs.topk(count).indices.tolist()
                torch.testing.assert_close(found, wanted, atol=5e-5, rtol=0)
        recipe = with_url(base, url, divergence="reverse_kl", top_k=40)
        with pytest.raises(SettingError, match=r"teacher\.url: .* fix: start vLLM with --max-logprobs 40"):
            graded(recipe, chains())
