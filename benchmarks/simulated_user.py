"""A language model as the user of a trained agent: how often the user is at fault, against the scripted customer.

RUN is a run of recipes/service_desk, MODEL the folder of a causal language model with its tokenizer. The agent of RUN
serves the same held-out tasks twice: for the scripted customer, and for MODEL as the simulated user, at a chat endpoint
(`agentfactory serve --chat`). The last line is JSON:

- `success_scripted`, `success_model`: the agent's success; the difference is what the user changes.
- `user_error`: the share of chains whose user was at fault by the framework's rules.
- `wrong_user`: the share of chains, among the others, in which the user said a code that is not the order's, or left
  before the agent answered.

    python benchmarks/simulated_user.py RUN MODEL [--tasks 50]
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agentfactory import read_groups

DESK = Path(__file__).parents[1] / "recipes" / "service_desk"
PROMPT = (
    "You are a customer of an online shop. You have asked: {question} The code of your order is {code}; say it when "
    "you are asked for the code. You know nothing else."
)


def evaluate(run: Path, folder: Path, tasks: int, **user: Any) -> list[tuple[dict[str, Any], Any]]:
    """Return (row, chain) of each task, after `agentfactory eval` of the run's last checkpoint."""
    rows = [json.loads(line) for line in (run / "prepared" / "heldout.jsonl").read_text().splitlines()[:tasks]]
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps({**row, "code": row["orders"][row["order"]]["code"]}) + "\n" for row in rows))
    checkpoint = max((run / "grpo" / "checkpoints").glob("step-*"))
    command = [sys.executable, "-m", "agentfactory", "eval", str(run / "grpo" / "recipe.yaml")]
    command += [
        "--checkpoint",
        str(checkpoint),
        f"eval.data.path={data}",
        "eval.greedy=false",
        f"output={folder / 'out'}",
    ]
    if user:
        command.append(f"rollout.user={json.dumps(user)}")
    subprocess.run([*command, "rollout.concurrency=8"], check=True, stdout=sys.stderr)
    groups = [group for file in (folder / "out").rglob("*sampled*.jsonl") for group in read_groups(file)]
    return [(group.task, chain) for group in groups for chain in group.trajectories]


def is_wrong(row: dict[str, Any], chain: Any) -> bool:
    """Return whether the user said a wrong code, or left although the agent had not answered."""
    said = [message["content"] for message in chain.messages if "speaker" in message]
    known = {row["order"], row["code"]}
    wrong_code = any(set(re.findall(r"\d+", text)) - known for text in said)
    words = [m["content"] for m in chain.messages if m["role"] == "assistant" and not m.get("tool_calls")]
    left_early = chain.stop_reason == "user_done" and (not words or "code" in words[-1])
    return wrong_code or left_early


def success(chains: list[tuple[dict[str, Any], Any]]) -> float:
    return sum(chain.reward or 0.0 for _, chain in chains) / len(chains)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tasks", type=int, default=50)
    options = parser.parse_args()
    tasks = options.tasks
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipe = {
            "model": {"path": str(options.model.absolute())},
            "rollout": {"max_total_tokens": 2048},
            "server": {"engine": "embedded", "max_model_len": 2048, "max_num_seqs": 8},
        }
        (folder / "user.yaml").write_text(json.dumps({**recipe, "output": str(folder / "user")}))
        log = folder / "log"
        with log.open("w") as stream:
            command = [sys.executable, "-m", "agentfactory", "serve", str(folder / "user.yaml"), "--chat"]
            server = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            while "OPENAI_API_KEY" not in (exports := dict(re.findall(r"export (\w+)=(\S+)", log.read_text()))):
                assert server.poll() is None, log.read_text()
                time.sleep(0.5)
            (folder / "a").mkdir()
            (folder / "b").mkdir()
            scripted = evaluate(options.run, folder / "a", tasks)
            os.environ["OPENAI_API_KEY"] = exports["OPENAI_API_KEY"]
            address = {"url": exports["OPENAI_BASE_URL"], "api_key_env": "OPENAI_API_KEY"}
            model = {**address, "model": options.model.name, "prompt": PROMPT, "temperature": 0.3}
            played = evaluate(options.run, folder / "b", tasks, name="model", options=model)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
    for row, chain in played[:3]:
        print("\n".join(f"  {m['role']}: {m['content'] or m.get('tool_calls')}" for m in chain.messages), row["wish"])
    faults = [chain for _, chain in played if chain.outcome == "user_error"]
    for chain in faults[:5]:
        print(f"  {chain.error}")
    others = [(row, chain) for row, chain in played if chain.outcome != "user_error"]
    shares = {
        "success_scripted": success(scripted),
        "success_model": success(played),
        "user_error": len(faults) / len(played),
        "wrong_user": sum(is_wrong(row, chain) for row, chain in others) / len(others),
    }
    print(json.dumps({name: round(value, 3) for name, value in shares.items()}))


if __name__ == "__main__":
    main()
