"""Tasks in Harbor's format: parsing and checks, the chain's sandbox, and tests that only real work passes."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.processes import environment
from agentfactory.rollout.config import DataConfig
from agentfactory.rollout.data import load_tasks
from agentfactory.rollout.trajectory import Outcome
from agentfactory.worlds.harbor.check import play
from agentfactory.worlds.harbor.harbor import Harbor
from tests.command_line_agents import call
from tests.conftest import REPOSITORY
from tests.project import load_and_check
from tests.scripted_chains import scripted_chains

TASKS = REPOSITORY / "recipes" / "harbor" / "tasks"
STANDARD = "FROM ubuntu:24.04\n\n# Install or copy over any environment dependencies here.\n\nWORKDIR /app"


def rows(folder: Path = TASKS, **image: Any) -> dict[str, dict[str, Any]]:
    images = {"ubuntu:24.04": {"root": "/", **image}}
    config = DataConfig.model_validate({"harbor": {"folder": str(folder), "images": images}})
    return {row["task"]: row for row in load_tasks(config)}


def make(folder: Path, dockerfile: str = STANDARD, **files: str) -> Path:
    """A task whose tests pass if /app/made has the word `good`."""
    contents = {
        "instruction.md": "<!-- benchmark canary GUID 1 -->\n\nMake it.\n",
        "task.toml": 'schema_version = "1.4"\n',
        "environment/Dockerfile": dockerfile,
        "solution/solve.sh": "#!/bin/bash\necho good > /app/made\n",
        "tests/test.sh": "#!/bin/bash\ngrep -qx good /app/made && echo 1 > /logs/verifier/reward.txt\n",
        **files,
    }
    task = folder / "a-task"
    for name, text in contents.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    return folder


@asynccontextmanager
async def opened(row: dict[str, Any]) -> AsyncIterator[Harbor]:
    shell = Harbor()
    try:
        await shell.reset(**row)
        yield shell
    finally:
        await shell.close()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["broken-parser", "busiest-address", "leap-year", "prime-table", "squares"])
async def test_the_solution_passes_and_nothing_else_does(name: str) -> None:
    row = rows()[name]
    assert (await play(row, solve=True))["success"] == 1.0
    assert (await play(row))["success"] == 0.0
    # it writes the reward itself, changes the tests and the verifier's folder, and leaves a running process
    mark = f"cheat-{os.getpid()}-{name}"
    cheats = [
        "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        'printf "#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n" > /tests/test.sh; chmod +x /tests/test.sh',
        "mv /tests /tests.old; ln -s /app /tests; ln -s /app /logs/verifier; rm -rf /logs",
        "for d in . /root /tmp; do ln -s /bin/true $d/diff; echo 1 > $d/reward.txt; done",
        f"setsid sh -c 'while true; do echo 1 > /logs/verifier/reward.txt; sleep 0.1; done' {mark} > /dev/null 2>&1 &",
    ]
    assert (await play(row, cheats))["success"] == 0.0
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]


WRITER = """#!/bin/sh
setsid sh -c 'while true; do echo 1 > /logs/verifier/reward.txt; done' > /dev/null 2>&1 &
echo '{"reward": 1}' > /logs/verifier/reward.json
"""
READER = """import os
own = os.environ["SETTINGS"] == "/app/settings.txt"
print(open("/tests/expected.txt" if own else "/tests/other-expected.txt").read())"""
PACKAGE = """python3 -c '
import os, site
os.makedirs(site.getusersitepackages())
code = "import os, sys\\nif any(part.startswith(\\"/tests\\") for part in sys.orig_argv): os._exit(0)"
open(site.getusersitepackages() + "/usercustomize.py", "w").write(code)
'"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("prime-table", PACKAGE),
        ("leap-year", f"cat > leap << 'END'\n{WRITER}END\nchmod +x leap"),
        ("leap-year", "printf '#!/bin/sh\ngrep \"^$1 \" /tests/years.txt | cut -c6-' > leap; chmod +x leap"),
        ("broken-parser", f"cat > writer << 'END'\n{WRITER}END\necho 'import os; os.system(\"sh w\")' > parser.py"),
        ("broken-parser", f"echo '{READER}' > parser.py"),
    ],
)
async def test_what_the_agent_left_for_the_tests_to_run_does_not_pass_them(name: str, command: str) -> None:
    assert (await play(rows()[name], [command]))["success"] == 0.0


@pytest.mark.processes
async def test_env_copy_and_workdir_of_a_dockerfile(tmp_path: Path) -> None:
    dockerfile = """
# escape is a backslash
ARG PLACE=/opt/work
FROM ubuntu:24.04
ARG PLACE=/opt/work
ENV FIRST="one two" \\
    SECOND=$PLACE/x
ENV THIRD three and ${MISSING:-four}
WORKDIR $PLACE
WORKDIR deep
COPY a.txt b.txt ./
COPY tree/ copied
COPY --chmod=755 a.txt /usr/local/lib/own/tool
COPY ["a.txt", "/etc/our own"]
"""
    files = {f"environment/{name}": name for name in ("a.txt", "b.txt", "tree/c.txt", "tree/d/e.txt")}
    row = rows(make(tmp_path, dockerfile, **files))["a-task"]
    assert row["question"] == "Make it.", "without the canary"
    async with opened(row) as shell:
        command = 'pwd; echo "$FIRST|$SECOND|$THIRD|$HOME"; find . -type f | sort; cat "/etc/our own"; whoami'
        seen = await shell.shell(
            command + "; stat -c %a /usr/local/lib/own/tool; ls /etc/passwd; ls /usr/local/lib | wc -l"
        )
        assert seen["observation"].splitlines() == [
            "/opt/work/deep",
            "one two|/opt/work/x|three and four|/root",
            *("./a.txt", "./b.txt", "./copied/c.txt", "./copied/d/e.txt"),
            "a.txtroot",
            "755",
            "/etc/passwd",
            str(len(os.listdir("/usr/local/lib")) + 1),
        ]
        # files persist in every writable folder
        await shell.shell("echo kept | tee made /tmp/made /root/made /etc/made")
        assert (await shell.shell("cat made /tmp/made /root/made /etc/made"))["observation"] == "kept\n" * 3 + "kept"
        assert "Read-only" in (await shell.shell("touch /usr/bin/x"))["observation"]
        assert "No such file" in (await shell.shell("cat /etc/shadow"))["observation"], "the copy of /etc lacks it"
        assert not Path("/etc/made").exists()


@pytest.fixture
def root() -> Iterator[Path]:
    """A world-readable root file system with a shell, three programs, and the result of a RUN in /app."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        made.chmod(0o755)
        (made / "app").mkdir()
        (made / "app" / "built").write_text("by RUN\n")
        (made / "bin").symlink_to("usr/bin")
        needed = set()
        for name in ("bash", "cat", "chmod", "grep"):
            program = Path(f"/usr/bin/{name}")
            loaded = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
            needed |= {program, *map(Path, re.findall(r"(/\S+)", loaded))}
        for path in needed:
            copy = made / path.relative_to("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        (made / "usr" / "bin" / "sh").symlink_to("bash")
        yield made


@pytest.mark.processes
async def test_a_root_file_system_of_the_users_own(tmp_path: Path, root: Path) -> None:
    row = rows(make(tmp_path, STANDARD + "\nRUN make\n"), root=str(root), run_done=True)["a-task"]
    async with opened(row) as shell:
        assert (await shell.shell("cat built; echo changed > built; cat built"))["observation"] == "by RUN\nchanged"
        seen = (await shell.shell("echo /*"))["observation"]
        assert seen == "/app /bin /dev /lib /lib64 /logs /proc /root /run /tmp /usr"
        assert "command not found" in (await shell.shell("python3"))["observation"]
    assert (root / "app" / "built").read_text() == "by RUN\n"
    assert (await play(row, solve=True))["success"] == 1.0


@pytest.mark.processes
async def test_run_is_taken_as_done_if_the_recipe_says_so(tmp_path: Path) -> None:
    folder = make(tmp_path, STANDARD + "\nRUN apt-get install -y everything\n")
    with pytest.raises(SettingError, match=r"task a-task: environment/Dockerfile, line 6: RUN apt-get .*run_done"):
        rows(folder)
    assert (await play(rows(folder, run_done=True)["a-task"], solve=True))["success"] == 1.0


NO_REWARD = {"reward": 0.0, "success": 0.0, "no_reward": 1.0}
REWARDS = {
    'echo "{\\"reward\\": 0.5, \\"speed\\": 2}" > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt': (
        {"reward": 0.5, "speed": 2.0, "success": 0.0}
    ),
    'echo "{\\"a\\": 1, \\"b\\": 0}" > /logs/verifier/reward.json': {"reward": 0.5, "a": 1.0, "b": 0.0, "success": 0.0},
    "echo 1.0 > /logs/verifier/reward.txt; exit 1": {"reward": 1.0, "success": 1.0},
    "echo '[1]' > /logs/verifier/reward.json": NO_REWARD,
    "head -c 100000 /dev/zero | tr '\\0' '[' > /logs/verifier/reward.json": NO_REWARD,
    "(echo '{\"reward\": 1'; seq -f ',\"m%g\": 1' 200; echo '}') > /logs/verifier/reward.json": NO_REWARD,
    "true": NO_REWARD,
    "echo 1 > /logs/verifier/reward.txt; sleep 60": NO_REWARD,
}


@pytest.mark.processes
@pytest.mark.parametrize("script", REWARDS)
async def test_the_reward_is_what_the_tests_wrote(tmp_path: Path, script: str) -> None:
    files = {"tests/test.sh": f"#!/bin/bash\n{script}\n", "task.toml": "[verifier]\ntimeout_sec = 2\n"}
    assert await play(rows(make(tmp_path, **files))["a-task"]) == REWARDS[script]


@pytest.mark.processes
@pytest.mark.parametrize("command", ["chmod 000 . /app", "rm -rf /app/src", "mv /app/src x; ln -s /no/such /app/src"])
async def test_an_agent_cannot_keep_the_tests_from_judging_it(tmp_path: Path, command: str) -> None:
    dockerfile = "FROM ubuntu:24.04\nCOPY a.txt /app/\nWORKDIR /app/src\n"
    row = rows(make(tmp_path, dockerfile, **{"environment/a.txt": "a"}))["a-task"]
    assert row["harbor"]["writable"][0] == "/app"
    assert await play(row, [command]) == NO_REWARD


@pytest.mark.extended
@pytest.mark.processes
async def test_the_tasks_own_limits_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "red")
    environment.name_variables(["COLOUR"])
    config = """
[agent]
timeout_sec = 5.0
[environment]
memory = "256M"
env = {COLOUR = "${COLOUR}", SHAPE = "${NO_SUCH_SHAPE:-round}"}
"""
    async with opened(rows(make(tmp_path, **{"task.toml": config}))["a-task"]) as shell:
        assert (await shell.shell("echo $COLOUR $SHAPE"))["observation"] == "red round"
        big = await shell.shell("python3 -c 'import time; x = bytearray(700 << 20); time.sleep(9)'")
        assert "more than 256 MiB" in big["observation"]
        assert "it ran for more than" in (await shell.shell("sleep 60"))["observation"]
        assert "the task's 5 s are over" in (await shell.shell("echo on"))["observation"]


@pytest.mark.processes
async def test_a_chain_works_by_the_tool_and_is_judged_by_the_tests(tmp_path: Path) -> None:
    row = rows()["squares"]
    write = "for n in 1 2 3 4 5 6 7 8 9 10; do echo $((n * n)); done > squares.txt"
    texts = [call("I write.", "shell", command=write), call("I look.", "shell", command="cat squares.txt"), "Done."]
    async with scripted_chains(tmp_path, texts, tools=["harbor"], rewards=[]) as chains:
        await chains.runner.check([row])
        trajectory = await chains.run(**row)
        chains.check(trajectory)
    assert (trajectory.outcome, trajectory.reward, trajectory.metrics["success"]) == (Outcome.COMPLETED, 1.0, 1.0)
    told = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert told == ["(no output)", "\n".join(str(n * n) for n in range(1, 11))]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"task.toml": "[[steps]]\nname = 'x'"}, r"task\.toml: steps is not supported; fix: split"),
        ({"task.toml": "[verifier]\ntimeout_sec = 'x'"}, r"verifier\.timeout_sec: got 'x'; fix: give a number"),
        ({"task.toml": "[environment]\ngpus = 1"}, r"environment\.gpus: got 1"),
        ({"task.toml": "[verifier]\nenvironment_mode = 'separate'"}, r"verifier\.environment_mode: got 'separate'"),
        ({"environment/Dockerfile": "FROM python:3\nWORKDIR /app"}, r"FROM python:3, .*images names no root"),
        ({"environment/Dockerfile": "FROM ubuntu:24.04"}, r"no WORKDIR: .*; fix: add WORKDIR"),
        ({"environment/Dockerfile": STANDARD + "\nCOPY no.txt ."}, r"line 6: COPY no\.txt: there is no such file"),
        ({"environment/Dockerfile": STANDARD + "\nENTRYPOINT x"}, r"ENTRYPOINT is not supported"),
    ],
)
def test_what_a_task_asks_for_in_vain_is_told(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    with pytest.raises(SettingError, match=r"data\.harbor: task a-task: ") as told:
        rows(make(tmp_path, **files))
    assert told.match(problem)


@pytest.mark.processes
def test_the_recipe_is_valid_and_its_tasks_are_checked_at_once(tmp_path: Path) -> None:
    file = REPOSITORY / "recipes" / "harbor" / "3b-lora-24gb.yaml"
    recipe = load_and_check(file, lacks=[])
    assert recipe.data.registered[1].model_dump()["images"]["ubuntu:24.04"]["root"] == "/"
    assert len(load_tasks(recipe.data)) == 5
    with pytest.raises(SettingError, match=r"data\.harbor\.folder: there is no folder"):
        load_and_check(file, [f"data.harbor.folder={tmp_path / 'none'}"], lacks=[])
