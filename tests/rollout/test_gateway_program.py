"""Programs as agents: each chain has its own process and folder, and both are cleaned up."""

import asyncio
import os
import re
import socket
import sys
import tempfile
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.processes.sandbox_limits import SandboxKind
from agentfactory.rollout.chains.chain_runner import begin
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import AgentConfig, ProgramOptions
from agentfactory.rollout.gateway.program_agent import ProgramAgent
from agentfactory.rollout.trajectory import Outcome, Trajectory
from tests.sandboxed_python import sandboxed_python
from tests.scripted_chains import NOTE, scripted_chains
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

AGENT = """
import os, subprocess, sys
from openai import OpenAI

client = OpenAI(max_retries=0)
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    answer = client.chat.completions.create(model="m", messages=messages)
    command = answer.choices[0].message.content
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    messages += [answer.choices[0].message, {"role": "user", "content": done.stdout or "nothing"}]
print("wrote", open("file").read().strip(), "in", os.path.basename(os.getcwd()) != "", os.environ.get("SECRET"))
"""

REWARD = f"""{NOTE}
@reward
def turns(workspace, trajectory, prediction):
    wrote = (workspace / "file").read_text().strip() if (workspace / "file").exists() else ""
    return dict(reward=float(wrote == "tea"), said=float("wrote tea" in prediction))
"""

DAEMON = """
import os, subprocess, sys, time

# a process that leaves the session and the group, as daemons do
script = "import os, time; os.setsid(); os.fork() and os._exit(0); print(os.getpid(), flush=True); time.sleep(600)"
pid = subprocess.run([sys.executable, "-c", script, sys.argv[2]], stdout=open("pid", "w"))
while not open("pid").read().strip():
    time.sleep(0.01)
print(open("pid").read().strip(), flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
sys.stderr.write("Traceback\\nRuntimeError: no plan\\n")
sys.exit(3 if sys.argv[1] == "fail" else 0)
"""


async def play(
    folder: Path, script: str, texts: list[str], *arguments: str, kind: str = "bubblewrap", **fields: Any
) -> Trajectory:
    """One chain of a Python script, which is in its folder. In the sandbox it runs on a Python that the sandbox's user
    may read."""
    agent = program_agent(folder, script, kind, *arguments, **fields.pop("program", {}))
    async with scripted_chains(folder, texts, agent=agent, source=REWARD, **fields) as chains:
        trajectory = await chains.run()
        chains.check(trajectory)
    return trajectory


def program_agent(folder: Path, script: str, kind: str, *arguments: str, **options: Any) -> ProgramAgent:
    template = folder / "template"
    template.mkdir(exist_ok=True)
    (template / "agent.py").write_text(script)
    program = {"workspace": str(template), "sandbox": kind, **options}
    given: dict[str, Any] = {"command": [sys.executable, "agent.py", *arguments]}
    if kind == "bubblewrap":
        given = sandboxed_python(openai, "agent.py", *arguments)
        own = given["options"]
        program["readable"] = [*own["readable"], *program.get("readable", [])]
        program["env"] = {**own["env"], **program.get("env", {})}
    return ProgramAgent(AgentConfig(command=given["command"], options=program), folder)


def program_chains(folder: Path, script: str, kind: str, **options: Any) -> Any:
    return scripted_chains(folder, ["yes"], agent=program_agent(folder, script, kind, **options), source=REWARD)


@pytest.mark.parametrize("kind", SandboxKind)
async def test_an_openai_program_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("SECRET", "mine")
    template = tmp_path / "template"
    template.mkdir()
    (template / "drink").write_text("tea\n")
    program = {"env": {"FOLDER": "${chain}"}}
    texts = ["cat drink > $FOLDER/file", "cat file"]
    trajectory = await play(tmp_path, AGENT, texts, "${task.question}", kind=kind, program=program)
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.metrics["said"]) == (1.0, 1.0)
    assert trajectory.result == "wrote tea in True None", "it does not get this process's variables"
    assert (trajectory.turns, len(trajectory.rows)) == (2, 1)
    assert [m["content"] for m in trajectory.messages if m["role"] == "user"] == ["go", "nothing"]


@pytest.mark.parametrize("kind", SandboxKind)
@pytest.mark.parametrize("way", ["end", pytest.param("fail", marks=pytest.mark.extended), "wait"])
async def test_no_process_is_left(tmp_path: Path, way: str, kind: str) -> None:
    mark = f"left-{os.getpid()}-{way}-{kind}"
    trajectory = await play(tmp_path, DAEMON, [], way, mark, kind=kind, rollout={"timeout_seconds": 5.0})
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
    # it requests no turn
    expected = {"end": Outcome.AGENT_ERROR, "fail": Outcome.AGENT_ERROR, "wait": Outcome.TIMEOUT}
    assert trajectory.outcome is expected[way]
    if way == "fail":
        assert (trajectory.error or "").endswith(" ended with exit status 3: RuntimeError: no plan")
        assert (trajectory.result or "").isdigit()


async def test_the_program_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    from agentfactory.base.processes import end_with_parent as keeper

    (tmp_path / "agent.py").write_text(DAEMON)
    command = [sys.executable, "-I", "-S", keeper.__file__, sys.executable, str(tmp_path / "agent.py"), "wait", "mark"]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=tmp_path, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    pid = int(await process.stdout.readline())
    process.stdin.close()
    assert await process.wait() in (128 + 9, 128 + 15)
    wait_for(lambda: not psutil.pid_exists(pid))


REACHING = """
import os, socket, urllib.error, urllib.request

reached = []
for path in ("/root", "/home", "/etc/shadow", "SECRET"):
    try:
        reached += [path] if os.listdir(path) else []
    except NotADirectoryError:
        try:
            reached.append(open(path).read() and path)
        except OSError:
            pass
    except OSError:
        pass
for port in (PORT, 80):
    try:
        socket.create_connection(("127.0.0.1", port), 2)
        reached.append(port)
    except OSError:
        pass
for url in (os.environ["OPENAI_BASE_URL"] + "/models",):
    request = urllib.request.Request(url, headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    assert urllib.request.urlopen(request).status == 200
for path in ("/usr/x", "/etc/x", "/x"):
    try:
        open(path, "w")
        reached.append(path)
    except OSError:
        pass
print("reached", reached, os.getcwd(), open("README").read())
"""


async def test_it_reaches_the_gateway_and_nothing_else(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        secret = tmp_path / "secret"
        secret.write_text("secret")
        script = REACHING.replace("PORT", str(server.getsockname()[1])).replace("SECRET", str(secret))
        with tempfile.NamedTemporaryFile("w") as readable:
            readable.write("a file that the recipe names")
            readable.flush()
            os.chmod(readable.name, 0o644)
            script = script.replace("README", readable.name)
            trajectory = await play(tmp_path, script, [], program={"readable": [readable.name]})
            without = await play(tmp_path, script, [], kind="none")
        assert trajectory.result == "reached [] /workspace a file that the recipe names"
        assert str(server.getsockname()[1]) in (without.result or ""), "or the test would prove nothing"


async def test_a_limit_ends_it_and_types_the_chain(tmp_path: Path) -> None:
    mark = f"limit-{os.getpid()}"
    script = "x = bytearray(900 << 20); import time; time.sleep(60)"
    trajectory = await play(tmp_path, script, [], mark, program={"memory_mb": 300})
    assert trajectory.outcome is Outcome.AGENT_ERROR
    assert "more than 300 MiB of memory" in (trajectory.error or "")
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]


FLOOD = """
import os, select, socket
from urllib.parse import urlsplit
from openai import OpenAI

url = urlsplit(os.environ["OPENAI_BASE_URL"])
connections = [socket.create_connection((url.hostname, url.port)) for _ in range(400)]
closed = set()
while select.select(connections, [], [], 2)[0]:
    closed |= {one for one in connections if select.select([one], [], [], 0)[0]}
    connections = [one for one in connections if one not in closed]
print(len(connections), "open", len(closed), "closed")
for one in connections:
    one.close()
messages = [{"role": "user", "content": "go"}]
print(OpenAI().chat.completions.create(model="m", messages=messages).choices[0].message.content)
"""


@pytest.mark.extended
async def test_a_program_cannot_take_all_open_files_of_the_worker(tmp_path: Path) -> None:
    trajectory = await play(tmp_path, FLOOD, ["tea"])
    assert (trajectory.error, trajectory.result) == (None, "256 open 144 closed\ntea")


FOREIGN = """
import os, sys
import openai

messages = [{"role": "user", "content": "go"}]
for arguments in ({"api_key": sys.argv[1]}, {"api_key": os.environ["OPENAI_API_KEY"]}):
    for ask in (lambda c: c.chat.completions.create(model="m", messages=messages), lambda c: c.models.list()):
        try:
            ask(openai.OpenAI(max_retries=0, **arguments))
            print("answered", end=" ")
        except openai.AuthenticationError:
            print("refused", end=" ")
"""


async def test_the_key_of_another_chain_gives_nothing_in_a_sandbox(tmp_path: Path) -> None:
    """Even a key that the program has obtained; here the row contains it."""
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "agent.py").write_text(FOREIGN)
    given = sandboxed_python(openai, "agent.py", "${task.key}")
    given["options"]["workspace"] = str(tmp_path / "template")
    agent = ProgramAgent(AgentConfig(**given), tmp_path)
    async with scripted_chains(tmp_path, ["tea", "other"], agent=agent, source=REWARD) as chains:
        sampling = Sampling("policy", 1.0, seed="s")
        other = chains.runner.player(Episode(chains.runner.setup, begin("other"), {"question": "go"}, sampling))
        with chains.runner.gateway.serving(other) as endpoint:
            trajectory = await chains.run(key=endpoint.key)
            assert trajectory.result == "refused refused answered answered"
            assert len(chains.server.requests) == 1
            async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
                assert [model.id async for model in client.models.list()] == ["policy"], "it was good outside"


async def test_fields_that_are_not_text_are_written_as_json(tmp_path: Path) -> None:
    wanted, shelf = ["boots", "Hüte", None, True], {"row": 4}
    code = "import os, sys; print(sys.argv[1], os.environ['SHELF'])"
    given = {"command": [sys.executable, "-c", code, "${task.wanted}"], "options": {"env": {"SHELF": "${task.shelf}"}}}
    given["options"]["sandbox"] = "none"
    agent = ProgramAgent(AgentConfig(**given), tmp_path)
    async with scripted_chains(tmp_path, [], agent=agent, source=REWARD) as chains:
        trajectory = await chains.run(wanted=wanted, shelf=shelf)
    assert trajectory.result == '["boots", "Hüte", null, true] {"row": 4}'


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    agent = ProgramAgent(AgentConfig(command=["no-such-agent"]), tmp_path)
    async with scripted_chains(tmp_path, [], agent=agent) as chains:
        trajectory = await chains.run()
    assert trajectory.outcome is Outcome.AGENT_ERROR
    assert "no-such-agent cannot be started: No such file or directory" in (trajectory.error or "")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"env": {"TOKEN": "${NO_SUCH_TOKEN}"}}, r"env\.TOKEN: .*NO_SUCH_TOKEN is not set"),
        ({"workspace": "/no/such/folder"}, r"workspace: .*not a folder"),
        ({"workspace": "desks/${task.order}"}, r"workspace: got .*; fix: give files by task"),
        ({"workspace": "desk"}, r"workspace: .*desk has 3 MiB, and a sandboxed chain may have 2; fix: make it smaller"),
        ({"readable": ["/no/such/file"]}, r"readable: there is no /no/such/file"),
        ({"files": "/no/such/files"}, r"files: there is no folder .*; fix: name an existing folder"),
    ],
)
def test_what_a_program_cannot_have_is_found_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ProgramOptions, "disk_mb", 2)
    (tmp_path / "desk").mkdir()
    with (tmp_path / "desk" / "large").open("wb") as file:
        file.truncate(3 << 20)
    with pytest.raises(SettingError, match=rf"rollout\.agent\.options\.{problem}"):
        ProgramAgent(AgentConfig(command=["sh"], options=fields), tmp_path)


def test_a_program_of_the_system_is_shown_already() -> None:
    """/lib, a link to the system's folder, does not make / count as the folder of a separate Python."""
    ProgramAgent(AgentConfig(command=["/bin/sh", "-c", "true"]), Path.cwd())


READS = """
import os, sys
from pathlib import Path
from openai import OpenAI

OpenAI(max_retries=0).chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
logo = Path("logo")
print(Path("data/shelf.csv").read_text().strip(), logo.read_bytes() == bytes([0, 255]), os.access(logo, os.W_OK))
"""


@pytest.mark.parametrize("kind", SandboxKind)
async def test_a_rows_files_are_in_the_folder_of_its_chain(tmp_path: Path, kind: str) -> None:
    files = {"data/shelf.csv": "boots,4\n", "logo": {"base64": "AP8="}}
    async with program_chains(tmp_path, READS, kind) as chains:
        trajectory = await chains.run(files=files)
    assert (trajectory.error, trajectory.result) == (None, "boots,4 True True")

    folder = tmp_path / "cases"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "shelf.csv").write_text("hats,2\n")
    (folder / "logo").write_bytes(bytes([0, 255]))
    async with program_chains(tmp_path, READS, kind, files=str(folder)) as chains:
        trajectory = await chains.run(files=["data/shelf.csv", "logo"])
    assert (trajectory.error, trajectory.result) == (None, "hats,2 True True")


GO: dict[str, Any] = {"question": "go"}
PASSES = r"data, row 2: question: empty, but rollout\.agent\.command\.1 passes it .* fix:"


@pytest.mark.parametrize(
    ("command", "rows", "words"),
    [
        (["x", "${task.repository}"], [GO], r"row 1 of data has no repository, only question; fix: give"),
        (["x"], [GO, {**GO, "files": ["a.csv"]}], r"row 2: files: the row names .*; fix: set the option `files` to"),
        (["x"], [GO, {**GO, "files": {"../a": "b"}}], r"row 2: files: '\.\./a' does not name a file of the workspace"),
        (["x"], [GO, {**GO, "files": "a.csv"}], r"row 2: files: got 'a.csv'; fix: give a mapping of name to text"),
        (["x"], [{**GO, "files": {}}, {**GO, "files": None}, GO], r'data, row 3: files: missing, .*write "files": {}'),
        (["x", "${task.question}"], [GO, {"question": " "}], PASSES),
        (["x"], [{**GO, "files": {}}, {**GO, "files": None}], None),
        (["x"], [GO, {"question": " "}], None),
    ],
)
def test_rows_that_a_program_cannot_use_are_refused_before_a_run(
    tmp_path: Path, command: list[str], rows: list[dict[str, Any]], words: str | None
) -> None:
    agent = ProgramAgent(AgentConfig(command=command, options={"sandbox": "none"}), tmp_path)
    with pytest.raises(SettingError, match=words) if words else nullcontext():
        agent.check_rows(rows, "data")


@pytest.mark.parametrize(
    "command",
    [
        ["python", "agent.py"],
        ["bash", "-e", "lib/agent.sh", "x"],
        ["env", "node", "${chain}/agent.js"],
        ["uv", "run", "a.py"],
    ],
)
def test_a_script_is_in_its_chains_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    number = next(number for number, part in enumerate(command) if "." in part)
    script = Path(command[number].removeprefix("${chain}/"))
    (tmp_path / script).parent.mkdir(exist_ok=True)
    (tmp_path / script).touch()  # the current folder does not count
    rows = [{"question": "go", "files": {str(script): "", "b": ""}}, {"question": "go", "files": {}}]
    problem = rf"rollout\.agent\.command\.{number}: .*{script}: no such file in the chain's folder"
    fix = rf"; fix: write \${{here}}/{script} for a file beside the recipe, or put it into"
    agent = ProgramAgent(AgentConfig(command=command, options={"sandbox": "none"}), tmp_path)
    with pytest.raises(SettingError, match=f"{problem}, which begins empty{fix}"):
        agent.check_rows([{"question": "go"}], "data")
    with pytest.raises(SettingError, match=f"{problem} for row 2 of data, which begins empty{fix}"):
        agent.check_rows(rows, "data")
    agent.check_rows(rows[:1], "data")
    for folder, found in (("empty", False), (".", True)):
        Path(folder).mkdir(exist_ok=True)
        agent = ProgramAgent(
            AgentConfig(command=command, options={"sandbox": "none", "workspace": str(tmp_path / folder)}), tmp_path
        )
        if found:
            agent.check_rows(rows, "data")
            continue
        with pytest.raises(SettingError, match=f"{problem}, which begins as a copy of {tmp_path}/empty{fix}"):
            agent.check_rows([{"question": "go"}], "data")


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "agent", "a.py"],
        ["sh", "-c", "touch a.py", "a.py"],
        ["my-agent", "--edit", "a.py"],
        ["node", "-e", "1", "a.js"],
        ["python", "${task.script}.py"],
    ],
)
def test_other_relative_paths_may_be_outputs(tmp_path: Path, command: list[str]) -> None:
    agent = ProgramAgent(AgentConfig(command=command, options={"sandbox": "none"}), tmp_path)
    agent.check_rows([{"question": "go", "script": "a"}], "data")


def test_a_program_of_the_folder_is_there_and_executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "desk"):
        folder.mkdir(exist_ok=True)
        (folder / "agent.sh").write_text("#!/bin/sh\n")
    for program in ("./agent.sh", "${chain}/agent.sh"):
        with pytest.raises(
            SettingError, match=r"command\.0: .*agent.sh: no such file in the chain's folder, .* empty; fix"
        ):
            ProgramAgent(AgentConfig(command=[program]), tmp_path)
    config = AgentConfig(command=["./agent.sh"], options={"workspace": str(tmp_path / "desk")})
    with pytest.raises(
        SettingError, match=r"command\.0: \./agent\.sh is not executable; fix: chmod \+x .*desk/agent\.sh$"
    ):
        ProgramAgent(config, tmp_path)
    (tmp_path / "desk" / "agent.sh").chmod(0o755)
    ProgramAgent(config, tmp_path)


ADDRESS = "fix: let its client take its address and key from the variables OPENAI_BASE_URL and"


@pytest.mark.parametrize(
    ("code", "words", "is_address"),
    [
        ("print('I am done')", "requesting a turn of the model; its output ends with: I am done; fix: let its", True),
        ("OpenAI(base_url='http://127.0.0.1:9', max_retries=0).models.list()", "Connection error.*; it has not", True),
        ("OpenAI(api_key='mine', max_retries=0).models.list()", "401.*; it has not requested a turn", True),
        ("raise KeyError('a')", "KeyError: 'a'$", False),
        (
            "try: OpenAI(max_retries=0).chat.completions.create(model='m', messages=[])\nexcept Exception: print('oh')",
            "without a turn; its last request was refused: messages: .*; its output ends with: oh$",
            False,
        ),
    ],
)
async def test_an_agent_without_a_turn_gets_the_fix(tmp_path: Path, code: str, words: str, is_address: bool) -> None:
    trajectory = await play(tmp_path, f"from openai import OpenAI\n{code}\n", [], kind="none")
    assert trajectory.outcome is Outcome.AGENT_ERROR
    assert re.search(words, trajectory.error or ""), trajectory.error
    assert (ADDRESS in (trajectory.error or "")) == is_address
