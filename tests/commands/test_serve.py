"""`agentfactory serve`: a server of the recipe's model in the foreground, with its log in a run folder."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentfactory.commands import server_commands
from agentfactory.commands.main import main
from agentfactory.rollout.inference.http_transport import authorization
from tests.server_process import only_loopback

pytestmark = pytest.mark.processes


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    server = {"engine": "embedded", "max_model_len": 64}
    text = json.dumps({"model": {"path": "model", "dtype": "float32"}, "server": server})
    (tmp_path / "served.yaml").write_text(text)
    return tmp_path / "served.yaml"


def test_a_server_runs_until_it_is_ended(recipe: Path) -> None:
    command = [sys.executable, "-m", "agentfactory", "serve", str(recipe)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ready = next(line for line in process.stdout if line.startswith("ready "))
    models = ready.split()[1] + "/v1/models"
    assert only_loopback(process.pid)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(models, timeout=30)
    with urllib.request.urlopen(urllib.request.Request(models, headers=authorization(models, None))) as answer:
        assert json.load(answer)["data"][0]["id"] == "policy"
    folder = recipe.parent / "runs" / "served" / "serve"
    assert "ready http" in (folder / "logs" / "server.log").read_text()
    assert (folder / "recipe.yaml").exists()
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=15)
    assert process.returncode == 130
    assert "interrupted by SIGTERM" in said
    assert not [child for child in children if child.is_running()]


def test_to_chat_a_run_of_one_stage_serves_its_last_checkpoint(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Path | None] = []
    monkeypatch.setattr(server_commands, "serve", lambda recipe, checkpoint, *_: served.append(checkpoint))
    run = recipe.parent / "runs" / "served"
    checkpoint = run / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    (run / "recipe.yaml").write_text(recipe.read_text().replace('"path": "model"', f'"path": "{recipe.parent}/model"'))
    for option in (["--chat"], []):
        assert main(["serve", str(run / "recipe.yaml"), *option]) == 0
    assert served == [checkpoint, None]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["server.url=http://127.0.0.1:1"], ["server.url", "already running", "null"]),
        (["server.engine=vllm", "server.host=0.0.0.0"], ["server.host", "no key guards", "server.api_key_env"]),
        (["server.engine=vllm", f"server.options.python={sys.base_prefix}/bin/python3"], ["has no vLLM"]),
    ],
)
def test_what_cannot_be_served_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: list[str]
) -> None:
    assert main(["serve", str(recipe), *overrides]) == 2
    told = capsys.readouterr().err
    assert [words for words in [*said, "fix:"] if words not in told] == []
    assert not (recipe.parent / "runs").exists()
