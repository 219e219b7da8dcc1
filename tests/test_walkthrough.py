"""README.md and the pages of docs/, followed in a terminal as by a new user: every `bash` block, line by line.

It takes minutes, so it is in `make test-long`. Blocks that only show a command's syntax are marked `sh`."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentfactory.base.config import ToolsRecipe
from agentfactory.tools.sessions.toolset import open_toolset
from tests.conftest import REPOSITORY
from tests.test_docs import DOCS, FENCE, blocks

FOLLOWED = {"README", "quickstart", "evaluation", "commands", "viewer", "placement", "environments", "tools", "studies"}
ELSEWHERE = {"make test"}
"""Commands that run this very test, or run separately."""
QUICKSTART = "agentfactory train recipes/quickstart/quickstart"
HABIT = ["sft.train.steps=40", "sft.train.warmup_steps=5"]
TWO_STEPS = ["train.steps=2", "train.warmup_steps=0", "eval.data=null"]
SHORTER = {
    f"{QUICKSTART}-lora.yaml": [*HABIT, *(f"grpo-lora.{words}" for words in TWO_STEPS)],
    f"{QUICKSTART}.yaml grpo.train.algorithm=ppo": [*HABIT, *(f"grpo.{words}" for words in TWO_STEPS)],
    f"{QUICKSTART}.yaml grpo.train.steps": [*HABIT, "grpo.train.batch_size=2", "grpo.eval.data=null"],
    "agentfactory eval runs/quickstart/recipe.yaml --": ["grpo.eval.data.limit=20"],
    "python benchmarks/studies.py": ["--quick"],
}
"""Start of a line -> arguments to append: `make learn` trains these to the end, and studies take hours."""


@dataclass
class Terminal:
    """A shell in a folder that looks like a fresh clone, into which lines are typed in sequence."""

    folder: Path
    typed: set[str] = field(default_factory=set)
    activated: list[str] = field(default_factory=list)
    """Lines that change the shell itself."""

    def run(self, line: str, statuses: tuple[int, ...] = (0,), typing: str = "") -> str:
        """Run a line and return its output, including errors. `typing` goes to its standard input."""
        whole = " && ".join([*self.activated, line])
        done = subprocess.run(
            ["bash", "-c", whole],
            cwd=self.folder,
            # `make test-long ARGS=...` passes its arguments to every nested make
            env={name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS")},
            input=typing,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode in statuses, f"{line}\n{done.stdout}"
        return done.stdout

    @contextmanager
    def running(self, line: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run a line until the block ends, then send it Ctrl-C."""
        whole = " && ".join([*self.activated, f"exec {line}"])
        with log.open("wb") as output:
            process = subprocess.Popen(["bash", "-c", whole], cwd=self.folder, stdout=output, stderr=output)
            try:
                yield process
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(60)
                finally:
                    process.kill()


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    installed, setup = Path(sys.prefix) / ".installed", REPOSITORY / "setup.py"
    if not installed.exists() or installed.stat().st_mtime < setup.stat().st_mtime:
        pytest.fail("`make quickstart` would install this folder's links; fix: run `make setup` first")
    folder = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "setup.py", "train.py", "recipes", "benchmarks"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return Terminal(folder)


@pytest.fixture(scope="module")
def readme(terminal: Terminal) -> dict[str, str]:
    return follow(terminal, REPOSITORY / "README.md")


def lines(page: Path) -> list[str]:
    """The lines of the page's `bash` blocks, without comments."""
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    return [shlex.join(words) for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def follow(terminal: Terminal, page: Path) -> dict[str, str]:
    """Type the page's lines, except those typed before; return each line's output."""
    printed: dict[str, str] = {}
    found = lines(page)
    assert found, f"{page.name} has no bash block"
    for line in found:
        if line in terminal.typed or line in ELSEWHERE:
            continue
        terminal.typed.add(line)
        shorter = [words for start, words in SHORTER.items() if line.startswith(start) and page.stem != "README"]
        whole = " ".join([line, *(shorter[0] if shorter else [])])
        if line.startswith(". "):
            terminal.activated.append(line)
        elif line.startswith("agentfactory view"):
            printed[line] = look(terminal, line)
        elif line.startswith("agentfactory chat"):
            printed[line] = terminal.run(whole, typing="\n")
        elif line.startswith("agentfactory doctor"):
            printed[line] = terminal.run(whole, statuses=(0, 1))
        elif not line.startswith(("agentfactory serve", "agentfactory tools serve")):
            printed[line] = terminal.run(whole)
    return printed


def look(terminal: Terminal, line: str) -> str:
    if "--export" in line:
        said = terminal.run(line)
        assert "<html" in (terminal.folder / line.split()[-1]).read_text(encoding="utf-8")[:200]
        return said
    log = terminal.folder / "view.log"
    with terminal.running(line, log) as process:
        address = awaited(process, log, r"http://127\.0\.0\.1:\d+/")
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert b"<html" in answer.read()
    return log.read_text()


def awaited(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    deadline = time.monotonic() + 120
    while not (found := re.search(pattern, log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return found[0]


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def page_of(name: str) -> Path:
    return REPOSITORY / "README.md" if name == "README" else DOCS / f"{name}.md"


def test_every_page_with_commands_is_followed() -> None:
    pages = {page.stem for page in [page_of("README"), *DOCS.glob("*.md")] if blocks(page, "bash")}
    # those are followed by tests/test_database_page.py, tests/doctor/test_sample.py and tests/learn/learn_quickstart.py
    assert pages == FOLLOWED | {"database", "first-look", "teachers"}


def test_every_command_and_option_that_the_readme_names_is_typed() -> None:
    typed = [line for name in FOLLOWED for line in lines(page_of(name)) if line.startswith("agentfactory ")]
    text = FENCE.sub("", page_of("README").read_text(encoding="utf-8"))
    code = " ".join(re.findall(r"`([^`]+)`", text))
    commands = set(re.findall(r"\bagentfactory ([a-z]+)", code))
    assert commands
    assert commands <= {line.split()[1] for line in typed}
    options = set(re.findall(r"(?<!\S)--[a-z]+(?:-[a-z]+)*", code)) - {"--no-deps", "--config"}
    assert options
    assert options <= {word for line in typed for word in line.split()}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_readme(terminal: Terminal, readme: dict[str, str]) -> None:
    folder = terminal.folder
    trained = summary(folder / "runs" / "quickstart")
    assert trained["success_before"] <= 0.25
    assert trained["success_after"] >= 0.85
    told = {line.split()[1]: text for line, text in readme.items() if line.startswith("agentfactory")}
    assert "->" in told["chat"]
    assert "pass@4" in told["eval"]
    assert (folder / "exported" / "model.safetensors").exists()
    assert summary(folder / "runs" / "word_problems-tiny")["success_after"] >= 0.85
    assert re.search(r"^problem +", told["doctor"], re.MULTILINE)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("readme")
def test_the_quickstart(terminal: Terminal) -> None:
    follow(terminal, DOCS / "quickstart.md")
    follow(terminal, DOCS / "viewer.md")  # it shows the same runs
    runs = terminal.folder / "runs"
    assert summary(runs / "short")["steps"] == 40
    assert {"quickstart", "quickstart-lora", "ppo", "short"} <= {run.name for run in runs.iterdir()}


@pytest.mark.long
@pytest.mark.usefixtures("readme")
def test_evaluation(terminal: Terminal) -> None:
    page, log = DOCS / "evaluation.md", terminal.folder / "serve.log"
    (serve,) = [line for line in lines(page) if line.startswith("agentfactory serve")]
    with terminal.running(serve, log) as process:
        awaited(process, log, r"ready http://127\.0\.0\.1:8000")
        printed = follow(terminal, page)
    assert len(printed) >= 5
    folders = [folder for folder in (terminal.folder / "runs" / "quickstart").glob("eval*") if folder.is_dir()]
    evaluated = [summary(folder) for folder in folders]
    # --checkpoint shows the bad habit, the other options the trained behaviour
    assert min(one["sampled/success"] for one in evaluated) <= 0.35
    assert sum(one["sampled/success"] >= 0.8 for one in evaluated) >= 4


@pytest.mark.long
@pytest.mark.usefixtures("readme")
@pytest.mark.parametrize("page", ["commands", "placement"])
def test_what_the_other_pages_show(terminal: Terminal, page: str) -> None:
    follow(terminal, DOCS / f"{page}.md")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("readme")
def test_the_studies(terminal: Terminal) -> None:
    printed = follow(terminal, DOCS / "studies.md")
    assert len(printed) >= 3
    for line, text in printed.items():
        study = shlex.split(line)[2]
        assert all(name.startswith(f"{study}/") for name in json.loads(text.splitlines()[-1]))
        assert list((terminal.folder / "docs").glob(f"studies-{study}-*.png"))


@pytest.mark.long
def test_the_environment_of_the_page(terminal: Terminal, tmp_path: Path) -> None:
    page = DOCS / "environments.md"
    (tmp_path / "guess.py").write_text(blocks(page, "python")[0])
    (tmp_path / "recipe.yaml").write_text(blocks(page, "yaml")[0])
    (tmp_path / "tasks.jsonl").write_text(blocks(page, "json")[0])
    here = Terminal(tmp_path, activated=[f". {terminal.folder}/.venv/bin/activate"])
    printed = follow(here, page)
    assert [line.split()[2] for line in printed] == ["list", "call", "check"]
    assert "It is smaller." in printed[next(line for line in printed if " call " in line)]


@pytest.mark.long
async def test_tools_served_to_others(tmp_path: Path) -> None:
    page = DOCS / "tools.md"
    (tmp_path / "my_tools.py").write_text("\n".join(blocks(page, "python")))
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"
    shown = [line for line in lines(page) if line.startswith("agentfactory tools serve")]
    assert len(shown) == 3
    for line in shown:
        words = shlex.split(line)
        if "--http" not in words:
            entry = {"command": words[0], "args": words[1:], "env": {"PATH": path}}
            async with open_toolset(ToolsRecipe(mcp_servers={"one": entry}), tmp_path) as toolset:
                assert {"convert", "plot"} <= {spec.name for spec in toolset.specs}
            continue
        here = Terminal(tmp_path, activated=[f"export PATH={shlex.quote(path)}"])
        log = tmp_path / "serve.log"
        with here.running(line, log) as process:
            address = awaited(process, log, r"http://127\.0\.0\.1:8000\S*")
            entry = {"url": address}
            async with open_toolset(ToolsRecipe(mcp_servers={"one": entry}), tmp_path) as toolset:
                assert {spec.name for spec in toolset.specs} >= {"add"}
