"""Token in, token out: trained tokens are exactly the sampled ones, with equal server and trainer log-probabilities."""

import asyncio
import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.data import load_tasks
from agentfactory.rollout.evaluation.evaluate import open_runner
from agentfactory.rollout.text.load_renderer import make_renderer
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Trajectory
from tests.chat_tokenizers import MERGES_NEWLINE, REORDERS_KEYS, STRIPS_REASONING, make_tokenizer
from tests.conftest import QUICKSTART
from tests.recording_proxy import Recording, record
from tests.scripted_chains import ZERO, scripted_chains

pytestmark = pytest.mark.numbers

CHAINS = 100


@pytest.fixture(scope="module")
def played(warm_server: str, warm_start: Path, quickstart_run: Path) -> tuple[list[Trajectory], Recording]:
    return play_chains(
        warm_start, quickstart_run / "prepared" / "train.jsonl", {"engine": "embedded"}, warm_server, CHAINS
    )


def play_chains(
    model: Path, tasks_file: Path, server: dict, url: str, count: int, template: Path | None = None, **rollout: str
) -> tuple[list[Trajectory], Recording]:
    """`count` chains of the treasure hunt, and what passed between them and the server at `url`. `template` is
    `model.chat_template`.

    The turns of every fourth chain are truncated at 3 tokens, in the middle of a call."""
    recipe = RolloutRecipe.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32", "chat_template": template and str(template)},
            "data": {"path": str(tasks_file)},
            "tools": [str(QUICKSTART / "treasure_hunt.py:TreasureHunt")],
            "rollout": {"max_turns": 8, "max_tokens": 40, "max_total_tokens": 1024, "concurrency": 64, **rollout},
            "server": server,
        }
    )
    tasks = load_tasks(recipe.data)

    async def play() -> tuple[list[Trajectory], Recording]:
        async with record(url) as recording, open_runner(recipe, QUICKSTART, recording.url) as runner:
            cutting = ChainRunner(
                recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_tokens": 3})}),
                runner.renderer,
                runner.client,
                runner.toolset,
                runner.rewards,
            )
            sampling = [Sampling("policy", 1.0, seed=str(i)) for i in range(count)]
            runners = [runner if i % 4 else cutting for i in range(count)]
            chains = (runners[i].run(f"c{i}", tasks[i % len(tasks)], sampling[i]) for i in range(count))
            return list(await asyncio.gather(*chains)), recording

    return asyncio.run(play())


def check_rows(trajectories: list[Trajectory], exchanges: list[tuple[dict, list[int]]]) -> int:
    """Assert that the rows consist of exactly these (request, sampled ids) and return the number of turns.

    Each request must be a row up to one of its sampled spans, and that span what came back; nothing else is masked."""
    by_prompt = defaultdict(list)
    for request, sampled in exchanges:
        by_prompt[tuple(request["token_ids"])].append(sampled)
    turns = 0
    for trajectory in trajectories:
        for row in trajectory.rows:
            assert len(row.token_ids) == len(row.mask) == len(row.logprobs)
            covered = [0] * len(row.token_ids)
            for start, end in sampled_spans(row):
                candidates = by_prompt[tuple(row.token_ids[:start])]
                assert row.token_ids[start:end] in candidates, "the server was sent something else, or sampled it not"
                candidates.remove(row.token_ids[start:end])
                covered[start:end] = [1] * (end - start)
                turns += 1
            assert covered == row.mask
    assert not any(by_prompt.values()), "something was sampled that is in no row"
    return turns


def sampled_spans(row: Row) -> list[tuple[int, int]]:
    """Runs of sampled tokens; a turn is followed by context, so each is one turn."""
    edges = [i for i, (before, here) in enumerate(pairwise([0, *row.mask, 0])) if before != here]
    return list(zip(edges[::2], edges[1::2], strict=True))


def largest_difference(trajectories: list[Trajectory], folder: Path) -> float:
    """The largest difference between the log-probabilities of the server and of the model in `folder`, over all
    sampled tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    worst = 0.0
    with torch.no_grad():
        for trajectory in trajectories:
            for row in trajectory.rows:
                ids = torch.tensor([row.token_ids])
                scores = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
                for i in range(1, len(row.token_ids)):
                    if row.mask[i]:
                        worst = max(worst, abs(float(scores[i - 1]) - row.logprobs[i]))
    return worst


def check_exactness(trajectories: list[Trajectory], recording: Recording) -> None:
    """Assert that trained rows match the server's requests and samples, including after truncated turns."""
    assert not any(t.outcome.failed for t in trajectories), {t.error for t in trajectories}
    exchanges = [(request, answer["choices"][0]["token_ids"]) for request, answer in recording.exchanges]
    turns = check_rows(trajectories, exchanges)
    assert turns == sum(t.turns for t in trajectories) > 2 * len(trajectories)
    cut = sum(t.metrics["truncated_turns"] for t in trajectories)
    assert cut == sum(answer["choices"][0]["finish_reason"] == "length" for _, answer in recording.exchanges)
    assert cut > len(trajectories) / 4, "chains went on after a cut turn"


def test_pieces_are_what_the_server_was_sent(played: tuple[list[Trajectory], Recording]) -> None:
    check_exactness(*played)


def test_every_sampled_token_names_its_weights(played: tuple[list[Trajectory], Recording]) -> None:
    for trajectory in played[0]:
        for row in trajectory.rows:
            named = [0] * len(row.token_ids)
            for span in row.versions:
                assert span.version == "default"
                named[span.start : span.end] = [1] * (span.end - span.start)
            assert named == row.mask


def test_server_and_trainer_agree_on_logprobs(played: tuple[list[Trajectory], Recording], warm_start: Path) -> None:
    worst = largest_difference(played[0], warm_start)
    print(f"largest difference over {CHAINS} chains: {worst:.2e}")
    assert worst <= 1e-4


@pytest.mark.parametrize("template", [STRIPS_REASONING, MERGES_NEWLINE, REORDERS_KEYS])
async def test_adversarial_templates_train_no_token_that_was_not_sampled(template: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(template, splits=template is not MERGES_NEWLINE)
    renderer = make_renderer(tokenizer)
    assert renderer.info["reasons"]
    rng = random.Random(0)
    call = '<tool_call>\n{"arguments": {"b": 2, "a": 1}, "name": "add"}\n</tool_call>'
    texts = [f"<think>hm {i}</think>{call}" for i in range(5)] + ["<think>so</think>3.\n", "no idea", call[:-9]]

    def script(_: str) -> list[int]:
        ids = tokenizer.encode(rng.choice(texts), add_special_tokens=False)
        # like a sampler: includes tokens that retokenising would merge
        noise = [rng.randrange(10, 200) for _ in range(rng.randrange(3))]
        return noise + ids + ([renderer.stop_token_ids[0]] if rng.random() < 0.7 else [])

    source = "from agentfactory import tool\n\n@tool\ndef add(a: int, b: int) -> int:\n    'Add.'\n    return a + b\n"
    fields = {"tools": ["notes.py:add"], "rewards": ["notes.py:nothing"], "rollout": {"max_turns": 6, "max_tokens": 60}}
    asked = {"messages": [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "<think>a</think>x"}]}
    asked["messages"].append({"role": "user", "content": "again"})
    async with scripted_chains(tmp_path, script, source=source + ZERO, renderer=renderer, **fields) as chains:
        trajectories = await chains.run_all([asked] * 30)
        server = chains.server
    assert not any(t.outcome.failed for t in trajectories), {t.error for t in trajectories}
    assert max(t.turns for t in trajectories) > 2
    for t in trajectories:
        said = [m["content"] for m in t.messages[len(asked["messages"]) :] if m["role"] == "assistant"]
        turns = [t.rows[row].token_ids[start:end] for row, start, end in t.turn_spans()]
        assert [renderer.parse(ids).message["content"] for ids in turns] == said, "each turn is found in the rows"
    check_rows(trajectories, list(zip(server.requests, server.responses, strict=True)))
