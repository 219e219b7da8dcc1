"""A server's command line, and the interpretation of its log, without starting one."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.user_code.import_path import own_python
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.inference.server_command_line import explain, server_command
from agentfactory.rollout.inference.vllm.vllm_server import _api_servers, _cores


def command(
    weight_transfer: str | None = None, adapters: dict[str, Path] | None = None, lora: int = 0, **server: Any
) -> str:
    recipe = RolloutRecipe.model_validate(
        {"model": {"path": "m", "dtype": "bfloat16", "lora": {"rank": lora} if lora else None}, "server": server}
    )
    return shlex.join(server_command(recipe, adapters, weight_transfer))


def test_vllm_gets_what_the_recipe_says() -> None:
    text = command("file", options={"python": "/v/bin/python"}, max_model_len=512, max_num_seqs=7)
    server = shlex.join(own_python("-m", "agentfactory.rollout.inference.vllm.vllm_server", executable="/v/bin/python"))
    assert text.startswith(f"{server} m --host 127.0.0.1 --port 0 --dtype bfloat16 ")
    assert "--max-model-len 512 --max-num-seqs 7" in text
    assert "--logprobs-mode processed_logprobs" in text
    assert '--weight-transfer-config \'{"backend": "file"}\'' in text
    assert "lora" not in text
    parallel = {"tensor_parallel_size": 2, "data_parallel_size": 3}
    text = command(options=parallel | {"gpu_memory_utilization": 0.5}, quantization="fp8")
    assert "--tensor-parallel-size 2 --data-parallel-size 3 --gpu-memory-utilization 0.5 --quantization fp8" in text
    assert command(options={"args": ["--block-size", "32"]}).endswith(" --block-size 32")


def test_vllm_gets_adapters_of_a_rank_that_it_knows(tmp_path: Path) -> None:
    assert "--enable-lora --max-loras 4 --max-lora-rank 16" in command(lora=9)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 40}))
    text = command(adapters={"checkpoint": tmp_path})
    assert "--enable-lora --max-loras 4 --max-lora-rank 64" in text
    assert f"--lora-modules checkpoint={tmp_path}" in text


def test_vllm_accepts_rows_of_tokens_as_adapters_of_tables(tmp_path: Path) -> None:
    assert "--table-adapters" not in command(lora=9)
    for tokens, rank in (("auto", 16), ([f"<{n}>" for n in range(20)], 32)):
        model = {"path": "m", "lora": {"rank": 4, "trainable_tokens": tokens}}
        flags = server_command(RolloutRecipe.model_validate({"model": model}))
        assert "--table-adapters" in flags
        assert flags[flags.index("--max-lora-rank") + 1] == str(rank)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "rank_pattern": {"lm_head": 20}}))
    assert "--max-lora-rank 32 --table-adapters" in command(adapters={"checkpoint": tmp_path})


def test_only_adapters_of_replicas_need_one_api_server() -> None:
    assert [bool(_api_servers(*case)) for case in ((True, 2), (True, 1), (False, 2))] == [True, False, False]


def test_the_embedded_engine_gets_what_it_knows(tmp_path: Path) -> None:
    text = command("file", {"checkpoint": tmp_path}, engine="embedded", api_key_env="KEY")
    assert " -m agentfactory.rollout.inference.embedded m --host 127.0.0.1 --port 0 --dtype bfloat16 " in text
    assert f"--api-key-env KEY --adapter checkpoint={tmp_path}" in text
    assert "weight-transfer" not in text


SAID = {
    "error: cannot listen on 127.0.0.1:8000: [Errno 98] Address already in use": "127.0.0.1:8000 is taken",
    "  Value error, User-specified max_model_len (9000) is greater than the derived max_model_len "
    "(max_position_embeddings=1024.0 or model_max_length=None in model's config.json). To allow": (
        "server.max_model_len=9000 is more than the model supports (max_position_embeddings=1024.0"
    ),
    "(EngineCore pid=1) ERROR To serve at least one request with the model's max seq len (512), (0.5 GiB KV "
    "cache is needed, which is larger than the available KV cache memory (0.1 GiB). Try": (
        "server.max_model_len=512 tokens needs 0.5 GiB of cache, and there are 0.1 GiB"
    ),
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": "out of memory",
    "ValueError: Free memory on device cuda:0 (2.1/23.6 GiB) on startup is less than desired GPU memory": (
        "too little memory on device cuda:0 (2.1/23.6 GiB)"
    ),
    "ValueError: Invalid weight transfer backend: file. Available engines: ['nccl']": "VLLM_PLUGINS",
    "(EngineCore pid=1) ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting": (
        "Worker proc VllmWorker-0 was killed: out of memory?"
    ),
    "error: vLLM cannot be imported by /v/bin/python: No module named 'vllm'": "server.options.python",
    "/v/bin/python: Error while finding module specification for 'agentfactory.rollout.inference.vllm.vllm_server' "
    "(ModuleNotFoundError: No module named 'agentfactory')": "AgentFactory is not installed where vLLM is",
}


@pytest.mark.parametrize("line", SAID)
def test_usual_failures_are_explained_with_a_fix(line: str) -> None:
    log = ["INFO starting", line, "RuntimeError: Engine core initialization failed. See root cause above."]
    reason = explain(log)
    assert SAID[line] in reason
    assert "; fix: " in reason
    assert "\n" not in reason


def test_an_unknown_failure_shows_its_first_cause() -> None:
    log = ["(Worker pid=1) ERROR 1 ValueError: no kernel", "RuntimeError: Engine core initialization failed."]
    assert explain(log) == "ValueError: no kernel"
    assert explain(["all is well"]) is None


def test_each_worker_gets_cores_of_its_own() -> None:
    assert _cores([0, 1], 2) == "0|1"
    assert _cores([2, 3, 4, 7, 8], 2) == "2,3|4,7"
    assert _cores([0, 1], 3) == "0|1|0", "fewer cores than workers"
