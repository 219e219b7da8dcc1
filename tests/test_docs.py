"""docs/ and README.md: the site builds and needs no network, generated pages are up to date, every metric of a run is
described, and all shown code, recipes, commands and messages work."""

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from agentfactory.base.config import McpServerConfig, ToolsRecipe, fields_of
from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolCall
from agentfactory.commands import main
from agentfactory.commands.options import make_parser, parse
from agentfactory.launching.reach_early import check_servers_answer
from agentfactory.launching.run_folder import RunFolder
from agentfactory.placement.__main__ import place as plan_for
from agentfactory.placement.machine import Machine
from agentfactory.placement.plan_choice import GIB, Need
from agentfactory.placement.server_memory import ServerMemory
from agentfactory.recipe.composition import read_mapping
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.config import DataConfig, LoraConfig
from agentfactory.rollout.data import load_tasks
from agentfactory.rollout.inference.http_transport import missing_routes
from agentfactory.rollout.inference.server_command_line import explain
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.text.parsers import load_parser
from agentfactory.rollout.text.template_and_format import choose_template
from agentfactory.rollout.text.templates import RenderError
from agentfactory.tools.sandbox.bubblewrap import refusal as no_sandbox
from agentfactory.tools.serve import command_line as serve_command_line
from agentfactory.tools.sessions.toolset import open_toolset
from agentfactory.trainers.loop.health import Health
from agentfactory.trainers.loop.sft import conversation_rows
from agentfactory.trainers.metrics import METRICS, Metric
from agentfactory.trainers.sync.canary_verdict import Drift
from agentfactory.viewer.charts import CHAIN_METRICS, EVAL_METRICS
from agentfactory.worlds.commands.listing import meaning
from docs.reference_pages import PAGES, renewed, sections
from tests.chat_tokenizers import make_tokenizer, trl_template
from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
SHOWN = [*sorted(DOCS.glob("*.md")), REPOSITORY / "README.md"]
FENCE = re.compile(r"^(?P<fence>```+)(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
RUN_ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "tool-call-formats.md": "tests/rollout/test_parsers.py",
    "agents.md": "tests/test_agent.py",
    "rewards.md": "tests/rollout/test_reward_library.py",
    "tools.md": "tests/tools/test_tools_page.py",
}
"""Pages whose Python code has separate tests."""


def blocks(page: Path, *languages: str) -> list[str]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(block["text"]) for block in found if block["language"] in languages]


def by_page(*languages: str) -> list[Any]:
    return [pytest.param(page, id=page.stem) for page in SHOWN if blocks(page, *languages)]


# the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=quiet, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


@pytest.mark.processes
def test_the_site_has_every_page_and_asks_nothing_of_the_network(site: Path) -> None:
    pages = {page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")}
    assert pages == {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")} - {Path("404")}
    in_menu = re.findall(r"\w[\w/-]*\.md", (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert sorted(in_menu) == sorted(f"{page}.md" for page in pages)
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"'\s>]+)", text)
        fetched += re.findall(r"<link\b[^>]*\bhref=[\"']?([^\"'\s>]+)", text)
        assert len(fetched) > 3
        assert not [address for address in fetched if re.match(r"(https?:)?//", address)], page.name
        # the theme would fetch mermaid from elsewhere for these
        assert 'class="mermaid"' not in text
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//|@import", style.read_text(encoding="utf-8")), style.name


# the generated pages


@pytest.mark.parametrize("page", PAGES)
def test_the_made_pages_are_up_to_date(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text == renewed(page, text), f"docs/{page}: run `make docs`"


def test_every_field_is_described() -> None:
    described = {}
    for section in sections(Recipe):
        assert section.__doc__, section.__name__
        for name, field in fields_of(section).items():
            described[f"{section.__name__}.{name}"] = meaning(field)
    assert len(described) > 120
    assert [name for name, text in described.items() if not text] == []


# the metrics


def described_by(name: str) -> Metric | None:
    """The tables' entry for `name` itself, not a placeholder for arbitrary logged names."""
    inside = re.fullmatch(r"(trajectory|eval|rollout)/(?:(?:sampled|greedy)/)?(.+)", name)
    table = [metric for metric in METRICS if metric.name != "eval/<metric>"]
    if inside is not None:
        table = CHAIN_METRICS + [metric for metric in METRICS if metric.name == "reward"]
        table += EVAL_METRICS if inside[1] == "eval" else []
    for metric in table:
        pattern = re.sub(r"<\w+>", "[^/]+", metric.name)
        if re.fullmatch(pattern, inside[2] if inside else name):
            return metric
    return None


def test_every_metric_of_a_run_is_described(quickstart_run: Path) -> None:
    names: set[str] = set()
    for stage in ("sft", "grpo"):
        for line in (quickstart_run / stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            names |= json.loads(line).keys()
    assert len(names) > 100
    assert sorted(name for name in names if described_by(name) is None) == []
    assert described_by("trajectory/nothing") is None
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    for metric in (*METRICS, *CHAIN_METRICS, *EVAL_METRICS):
        assert f"| `{metric.name}` |" in text


def test_the_metrics_that_the_pages_speak_of_exist() -> None:
    prefixes = ("trajectory/", "eval/", "mismatch/", "outcome/", "seconds/", "groups/", "staleness/", "critic/")
    said = {
        name
        for page in SHOWN
        for name in re.findall(r"`([\w/<>]+)`", page.read_text(encoding="utf-8"))
        if name.startswith(prefixes) and "." not in name
    }
    assert len(said) > 20
    unknown = {name for name in said if described_by(name) is None and name not in {metric.name for metric in METRICS}}
    assert unknown == {name for name in unknown if name.endswith(("/<name>", "/<figure>"))}


# snippets


def test_python_is_run_by_some_test() -> None:
    for page, test in RUN_ELSEWHERE.items():
        assert page in (REPOSITORY / test).read_text(encoding="utf-8"), f"{test} is about {page}"


@pytest.mark.parametrize("page", [page for page in by_page("python") if page.values[0].name not in RUN_ELSEWHERE])
def test_python(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write blocks that begin with `# FILE.py` to that file, import them, and run their tests."""
    monkeypatch.syspath_prepend(tmp_path)
    files = []
    for block in blocks(page, "python"):
        compile(block, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if named := re.match(r"# (\w+)\.py\n", block):
            (tmp_path / f"{named[1]}.py").write_text(block)
            files.append(named[1])
    for name in files:
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        for test in [thing for key, thing in vars(module).items() if key.startswith("test_")]:
            test()
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("page", by_page("yaml"))
def test_recipes(page: Path, tmp_path: Path) -> None:
    """Each is part of a recipe (or of an `mcp_servers` entry), with existing fields only."""
    for block in blocks(page, "yaml"):
        file = tmp_path / "recipe.yaml"
        file.write_text(block)
        data = read_mapping(file, str(page), "recipe")
        if data.keys() <= McpServerConfig.model_fields.keys() and not data.keys() & Recipe.model_fields.keys():
            data = {"mcp_servers": {"one": {"command": "python", **data}}}
        for key in ("extends", "stages"):
            data.pop(key, None)
        for section, least in {"model": {"path": "none"}, "train": {"steps": 1}}.items():
            data[section] = {**least, **data.get(section, {})}
        Recipe.model_validate({"name": "snippet", "output": tmp_path, **data})


@pytest.mark.parametrize("page", by_page("json"))
def test_json(page: Path) -> None:
    for block in blocks(page, "json"):
        for text in (block,) if block.startswith("[") or "\n  " in block else block.splitlines():
            json.loads(text)


@pytest.mark.parametrize("page", by_page("bash", "sh", ""))
def test_commands(page: Path) -> None:
    lines = [line for block in blocks(page, "bash", "sh", "") for line in block.replace("\\\n", " ").splitlines()]
    makefile = (REPOSITORY / "Makefile").read_text()
    for line in lines:
        if not re.match(r"(agentfactory|make|python|sbatch|accelerate) ", line):
            continue
        words = shlex.split(line, comments=True)
        match words:
            case ["agentfactory", "tools", "serve", *rest]:
                serve_command_line("serve").parse_args(rest)
            case ["agentfactory", *rest]:
                assert parse(rest).command == rest[0]
            case ["make", *targets]:
                names = [target for target in targets if "=" not in target]
                assert names
                assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in names), line
        for path in re.findall(r"(?<![\w/.$])(?:recipes|benchmarks|tests)/[\w./-]+", " ".join(words)):
            assert (REPOSITORY / path).exists(), line


def test_what_the_prose_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    commands, targets, files = set(), set(), set()
    for page in [*SHOWN, REPOSITORY / "CONTRIBUTING.md"]:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        commands |= set(re.findall(r"`agentfactory ([a-z]+)", text))
        targets |= set(re.findall(r"`make ([\w-]+)(?!/)\b", text))
        in_folder = r"(?:recipes|benchmarks|tests|trainers|rollout|tools)/[\w/.-]+\.(?:py|yaml|sh)"
        files |= set(re.findall(rf"`(?:python )?({in_folder})", text))
        if page.parent == REPOSITORY:
            files |= set(re.findall(r"\]\(((?!https?:)[^)#]+)", text))
    assert len(commands) > 5
    assert len(targets) > 3
    assert len(files) > 20
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            parse([command, "--help"])
        assert ended.value.code == 0, f"agentfactory {command}"
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()
    assert {file for file in files if not (REPOSITORY / file).exists()} == set()


def test_every_option_is_among_the_commands() -> None:
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    _, commands = make_parser()
    for name, command in commands.choices.items():
        assert f"`agentfactory {name}" in page
        for action in command._actions:
            for option in action.option_strings:
                assert option in ("-h", "--help") or f"`{option}" in page, f"{name} {option}"


async def test_the_environment_of_the_page_plays(tmp_path: Path) -> None:
    page = DOCS / "environments.md"
    (tmp_path / "guess.py").write_text(blocks(page, "python")[0])
    shown = yaml.safe_load(blocks(page, "yaml")[0])
    row = json.loads(blocks(page, "json")[0])
    recipe = ToolsRecipe(mcp_servers=shown["mcp_servers"])
    async with open_toolset(recipe, tmp_path) as toolset, toolset.chain("a", row) as session:
        assert session.opening == "I think of a number from 1 to 100."
        assert (await session.call(ToolCall("1", "guess", {"number": 50}))).content == "It is smaller."
        assert (await session.call(ToolCall("2", "guess", {"number": 42}))).finish
        verdict = await session.reward()
    assert (verdict.reward, verdict.metrics) == (1.0, {"success": 1.0, "guesses": 2.0})


def test_the_data_of_the_page_loads(tmp_path: Path, warm_start: Path) -> None:
    page = DOCS / "data.md"
    rows, conversation = blocks(page, "json")
    file = tmp_path / "tasks.jsonl"
    file.write_text(rows)
    assert [row["answer"] for row in load_tasks(DataConfig(path=str(file)))] == ["4.83", "26.22"]
    scope: dict[str, Any] = {}
    exec(blocks(page, "python")[0], scope)
    scope["prepare"](tmp_path, 0)
    made = load_tasks(DataConfig(path=str(file)))
    assert len(made) == 100
    Rewards(["exact_match"]).check(made[0])
    renderer = load_renderer(Recipe(**LEAST, model={"path": str(warm_start)}).model, "hermes", print, tools=True)
    (row,) = conversation_rows([json.loads(conversation)], renderer)
    assert 0 < sum(row.weights or []) < len(row.token_ids)


LEAST: dict[str, Any] = {"name": "test", "output": Path("nowhere"), "train": {"steps": 1}}


# messages


@cache
def literals() -> str:
    """All messages in the packages' code, with `...` in place of inserted values."""
    texts = []
    for package in ("agentfactory", "rollout", "tools", "trainers"):
        for file in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.JoinedStr):
                    texts.append("".join(n.value if isinstance(n, ast.Constant) else "..." for n in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return "\n".join(texts)


@pytest.mark.processes
def test_troubleshooting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for block in blocks(DOCS / "troubleshooting.md", "text") for line in block.splitlines()]
    assert len(lines) >= 14
    said = provoked(tmp_path, monkeypatch, capsys)
    unheard = []
    for line in lines:
        pattern = re.escape(line).replace(r"\.\.\.", ".*")
        if not any(re.match(pattern, text, re.DOTALL) for text in said):
            unheard.append(line)
    # messages that need a server, a GPU's memory or an unusual tokenizer are provoked by other tests
    for line in unheard:
        pieces = [piece.strip(" ,;:") for piece in line.split("...") if len(piece) > 8]
        assert pieces, line
        for piece in pieces:
            assert piece in literals(), f"nothing says {piece!r}"
    assert len(unheard) <= 2, unheard


def dying_steps() -> list[dict[str, Any]]:
    """A run that loses its output format from step 16 on."""
    figures = {"grad_norm": 0.1, "groups/equal_rewards": 0.0, "success": 0.5, "turns": 5.0}
    lost = {"mismatch/kl": 0.2, "trajectory/tool_errors/malformed_call": 3.0}
    return [{"step": n, **figures, "mismatch/kl": 0.001, **(lost if n > 15 else {})} for n in range(1, 20)]


def provoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "2 + 2"}\n')
    (tmp_path / "questions.jsonl").write_text('{"question": "2 + 2"}\n')
    (tmp_path / "good.jsonl").write_text('{"question": "2 + 2", "answer": "4"}\n')
    RunFolder.create(tmp_path / "full", "name: full\nimport_path: [/recipes/mine]\n")
    said = []
    attached = {"rewards": ["exact_match"], "server": {"url": "http://127.0.0.1:9"}}
    for recipe in (
        {"train": {"steps": 1, "learnig_rate": 1}},
        {"rewards": ["exact_match"]},
        {},
        attached,
        {**attached, "data": {"path": "questions.jsonl"}},
        {**attached, "data": {"path": "good.jsonl"}, "output": "full"},
    ):
        model = {"path": "none", "dtype": "float32"}
        whole = {"model": model, "data": {"path": "tasks.jsonl"}, "train": {"steps": 1}, **recipe}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(whole))
        assert main.main(["train", "recipe.yaml"]) == main.REFUSED
        said.append(capsys.readouterr().err)
    dead = Recipe.model_validate({**LEAST, "model": {"path": "none"}, **attached})
    with pytest.raises(SettingError) as unreached:
        check_servers_answer(dead)
    said.append(f"{unreached.value.problem}; fix: {unreached.value.fix}")
    said.append("; ".join(missing_routes("http://here", ["/health"], ["/inference/v1/generate"]) or ()))
    said.append(str(no_sandbox("setting up uid map: Permission denied")))
    said.append(f"agentfactory: {refused_placement()}")
    said.append(explain(["torch.OutOfMemoryError: CUDA out of memory."]) or "")
    without_tools = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    without_tools += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    for template in (trl_template("qwen3_5_nothink"), without_tools):
        with pytest.raises(RenderError) as unfit:
            choose_template(make_tokenizer(), template, True, load_parser("hermes"))
        said.append(str(unfit.value))
    zeros, moved = np.zeros(8), np.full(8, 100.0)
    drift = Drift("float32", contexts=2)
    said.append(f"http://here, version 0 (0): {drift.start(moved, moved, zeros).failure}")
    drift = Drift("float32", contexts=2)
    drift.start(zeros, zeros, zeros)
    said.append(f"http://here, version 1 (1): {drift.judge(zeros, zeros, moved).failure}")
    health = Health()
    said += [f"warning: {finding.text}" for step in dying_steps() for finding in health.note(step)]
    return said


def refused_placement() -> SettingError:
    """The error for a recipe that exceeds one GPU by 4 GiB of activations at a budget of 8,192 tokens."""

    def estimate(asked: Recipe, device: str, memory: int | None) -> Need:
        activations = asked.train.token_budget * GIB // 1024
        return Need({"weights": 6 * GIB, "activations": activations}, ServerMemory({"weights": 6 * GIB}, 1, 0, 2 * GIB))

    sizes = {"rollout": {"max_total_tokens": 4096}, "server": {"engine": "vllm"}, "model": {"path": "none"}}
    placement = {"placement": {"mode": "split", "gpu_memory_gib": 24}}
    asked = Recipe(**{**LEAST, **sizes, **placement, "train": {"steps": 1, "token_budget": 16384}})
    asked.model.lora = LoraConfig(rank=8)
    return SettingError(*plan_for(asked, Machine((), 64 * GIB, 60 * GIB), estimate)["refused"], source="recipe")
