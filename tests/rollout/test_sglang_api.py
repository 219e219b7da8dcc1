"""tests/sglang_api.json is what SGLang's wheel says, at the version that docs/servers.md names.

If the variable AGENTFACTORY_SGLANG_PYTHON names a Python that can import SGLang, its own classes read our requests.
That needs no GPU: `pip install --no-deps sglang==0.5.23 triton` beside torch, with a stub of torchvision."""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentfactory.rollout.inference.sglang.translation import WeightUpdates, to_sglang
from tests.rollout.test_sglang import HASHES, Recorded, turn
from tests.sglang_api import TABLE, load_table, read_api
from tests.source_names import unpacked_wheel

SGLANG_PYTHON = os.environ.get("AGENTFACTORY_SGLANG_PYTHON")
VERSION = load_table()["version"]


def test_the_documented_version_is_that_of_the_table() -> None:
    assert f"SGLang {VERSION}" in (Path(__file__).parents[2] / "docs" / "servers.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_table_is_the_wheels(tmp_path: Path) -> None:
    """Downloads 39 MB. After a change: `python -m tests.sglang_api FOLDER` with the unpacked wheel."""
    assert read_api(unpacked_wheel(f"sglang=={VERSION}", tmp_path)) == load_table(), f"{TABLE} is of another version"


async def requests() -> list[tuple[str, Any]]:
    """The bodies of all requests that the front sends, with SGLang's names of their classes."""
    sglang = Recorded()
    updates = WeightUpdates(sglang, on_gpu=True)
    group = {"master_address": "10.0.0.1", "rank_offset": 1, "world_size": 2, "packed_buffer_size_bytes": 100}
    for port in (4, 5):
        await updates.join({**group, "master_port": port})
    await updates.start()
    await updates.load({"path": str(Path(__file__).parent)})
    await updates.load({"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[30], [2, 2]]})
    await updates.finish("run-v1")
    await updates.checksums()
    bodies = load_table()["bodies"]
    found = [(bodies[path], body) for path, body in sglang.calls if path in bodies]
    found += [("PauseGenerationReqInput", {"mode": mode}) for mode in ("retract", "abort")]
    found += [("ContinueGenerationReqInput", {}), ("AbortReq", {"rid": "r"})]
    params = {"temperature": 0.7, "max_tokens": 9, "stop_token_ids": [4], "stop": ["x"], "ignore_eos": True}
    params |= {"logit_bias": {"3": -100.0}, "logprobs": 2, "logprob_token_ids": [4, 5]}
    found += [("GenerateReqInput", to_sglang(body, 100)) for body in (turn(), {**turn(**params), "cache_salt": "v1"})]
    assert {name for name, _ in found} == set(bodies.values())
    return found


@pytest.mark.long
@pytest.mark.skipif(SGLANG_PYTHON is None, reason="needs SGLang: AGENTFACTORY_SGLANG_PYTHON")
def test_sglangs_own_classes_take_every_request_and_the_hashes_are_sglangs(tmp_path: Path) -> None:
    lines = [json.dumps(each) for each in asyncio.run(requests())]
    start, env = [str(SGLANG_PYTHON), "-m", "tests.sglang_itself"], {**os.environ, "SGLANG_HASH_FOLDER": str(tmp_path)}
    done = subprocess.run(start, input="\n".join(lines), capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    count, hashes = json.loads(done.stdout.splitlines()[-1])
    assert count == len(lines)
    assert [tuple(pair) for pair in hashes] == HASHES
