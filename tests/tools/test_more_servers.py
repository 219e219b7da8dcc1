"""Third-party servers as their users install them: listed, rendered for several templates, called by one chain with
good and bad arguments, and by eight chains in parallel with the isolation that is chosen by default."""

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import ToolCall, ToolSpec, text_of
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.text.load_renderer import make_renderer
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.trajectory import Outcome
from agentfactory.tools.sessions.toolset import open_toolset
from tests.chat_tokenizers import make_tokenizer, trl_template
from tests.scripted_chains import call as written
from tests.scripted_chains import scripted_chains
from tests.tools.more_servers import SERVERS, Tried, entry_of, install
from tests.tools.roughness.serving import noticed

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(1800)]

CHAINS = 8
TEMPLATES = ("qwen2_5", "lfm2_2_5", "nemotron_3_nano")


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent  # shared by the workers of pytest-xdist
    folder /= "servers"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            install(folder)
            (folder / "done").touch()
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for file, text in {"code/code.py": "def f(x):\n    return x\n", "vault/a.md": "# A\nhello world\n"}.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    return tmp_path


@pytest.mark.parametrize("tried", SERVERS, ids=[tried.package for tried in SERVERS])
async def test_a_server(tried: Tried, installed: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ToolsRecipe.model_validate({"mcp_servers": {"tried": entry_of(tried, installed)}})
    with noticed() as notices:
        async with open_toolset(recipe, place) as toolset, toolset.chain("a", {}) as session:
            check_rendered(toolset.specs)
            for call in tried.calls:
                result = await session.call(ToolCall("1", call.tool, call.arguments), 60.0)
                assert result.error is call.error, result
                assert call.reads in str(result.content)
    told = [str(notice) for notice in notices]
    assert all(any(part in text for text in told) for part in tried.notices), told
    with capsys.disabled():
        print(f"\n{tried.package}: {len(toolset.specs)} tools; {told}")


@pytest.mark.parametrize("tried", [tried for tried in SERVERS if tried.chain], ids=lambda tried: tried.package)
async def test_eight_chains(tried: Tried, installed: Path, place: Path) -> None:
    def script(prompt: str) -> str:
        number = prompt.count("<tool_response>\n")
        if number == len(tried.chain):
            return "done"
        return written(tried.chain[number].tool, **tried.chain[number].arguments)

    entry = {**entry_of(tried, installed), "timeout_seconds": 90}
    fields: dict[str, Any] = {"tools": [], "rewards": ["notes.py:turns"], "mcp_servers": {"tried": entry}}
    fields["rollout"] = {"max_total_tokens": 200_000}  # the tokenizer is small, so its prompts are long
    async with scripted_chains(place, script, **fields) as chains:
        runner = chains.runner
        sampling = Sampling("policy", 1.0, seed="s")
        ended = await asyncio.gather(
            *(runner.run(f"c{n}", {"question": "go"}, sampling, runner.setup.config.scored) for n in range(CHAINS))
        )
    for trajectory in ended:
        assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
        read = [text_of(message["content"]) for message in trajectory.messages if message["role"] == "tool"]
        assert len(read) == len(tried.chain)
        assert all(call.reads in text for call, text in zip(tried.chain, read, strict=True)), read
    chains.check(*ended)


@cache
def renderer_of(template: str) -> Renderer:
    return make_renderer(make_tokenizer(trl_template(template)))


def check_rendered(specs: list[ToolSpec]) -> None:
    for template in TEMPLATES:
        renderer = renderer_of(template)
        text = renderer.tokenizer.decode(renderer.open([{"role": "user", "content": "go"}], specs))
        for spec in specs:
            names = [spec.name, *(spec.parameters.get("properties") or {})]
            assert all(json.dumps(name, ensure_ascii=False)[1:-1] in text for name in names), (template, spec.name)
