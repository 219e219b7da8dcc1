"""Refusals of recipes that SGLang cannot serve: field, value and fix."""

import sys
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.recipe.load import load_recipe

URL = "http://127.0.0.1:30000"
REFUSED = {
    "an adapter": (["model.lora.rank=8"], "model.lora", "set model.lora=null, or set server.engine=vllm"),
    "quantised weights": (["server.quantization=fp8"], "server.quantization", "remove it, or set server.engine=vllm"),
    "kept caches": (["rollout.inflight=keep", "rollout.max_staleness=1"], "rollout.inflight", "remove it"),
    "one GPU": (["placement.mode=split"], "placement.mode", "use separate"),
    "turns on one GPU": (["placement.mode=time_share"], "placement.mode", "use separate"),
    "a GPU's memory": (["sync.backend=ipc"], "sync.backend", "use file or auto"),
    "a key as a flag": (["server.options.args=[--api-key, secret]"], "server.options.args", "remove it"),
    "replicas": (["server.options.args=[--dp-size=2]"], "server.options.args", "remove it"),
    "another model": (["server.options.args=[--model-path=x]"], "server.options.args", "set model.path"),
    "a context": (["server.options.args=[--context-length=9]"], "server.options.args", "set server.max_model_len"),
    "an option of vLLM": (["server.options.data_parallel_size=2"], "server.options.data_parallel_size", ""),
    "no such Python": (["server.options.python=/nowhere/python"], "server.options.python", "name the Python"),
    "a program that is no Python": (["server.options.python=/bin/false"], "server.options.python", "name the Python"),
    "a program that says nothing": (["server.options.python=/bin/true"], "server.options.python", "name the Python"),
    "a Python without SGLang": ([f"server.options.python={sys.executable}"], "server.options.python", "pip install"),
    "no address": (["server.options.attach=gpu:30000"], "server.options.attach", "http://127.0.0.1:30000"),
    "a port that there is not": (["server.options.attach=http://gpu:99999"], "server.options.attach", ":30000"),
    "half an address": (["server.options.attach=http://[::1"], "server.options.attach", "http://127.0.0.1:30000"),
    "two servers": (
        [f"server.options.attach={URL}", "server.url=http://127.0.0.1:1"],
        "server.options.attach",
        "server.url=null",
    ),
    "a flag for a running server": (
        [f"server.options.attach={URL}", "server.options.args=[--x]"],
        "server.options.args",
        "attach=null",
    ),
    "a key without a server": (["server.options.attach_key_env=KEY"], "server.options.attach_key_env", "remove it"),
    "a key that is not set": (
        [f"server.options.attach={URL}", "server.options.attach_key_env=NOT_SET_HERE"],
        "server.options.attach_key_env",
        "export it",
    ),
}


def cases() -> list[Any]:
    starting = {"a Python without SGLang", "a program that is no Python", "a program that says nothing"}
    return [pytest.param(name, marks=pytest.mark.processes) if name in starting else name for name in REFUSED]


@pytest.mark.parametrize("case", cases())
def test_refused_with_the_fix(project: Path, case: str) -> None:
    overrides, field, fix = REFUSED[case]
    with pytest.raises(SettingError) as caught:
        load_recipe("recipe.yaml", ["server.engine=sglang", *overrides], purpose="train")
    assert caught.value.field == field
    assert fix in caught.value.fix


def test_a_running_server_needs_no_sglang_here(project: Path) -> None:
    recipe = load_recipe("recipe.yaml", ["server.engine=sglang", f"server.options.attach={URL}"], purpose="train")
    assert recipe.server.sglang.attach == URL
    assert not recipe.server.starts


def test_a_model_that_accepts_images(project: Path) -> None:
    config = Path("model", "config.json")
    config.write_text('{"vision_config": {}}')
    with pytest.raises(SettingError, match=r"server\.engine: got 'sglang', and .* accepts images") as caught:
        load_recipe("recipe.yaml", ["server.engine=sglang", f"server.options.attach={URL}"], purpose="train")
    assert caught.value.fix == "use vllm, or a text-only model"
