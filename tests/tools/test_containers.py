"""Tests of a server in a real container, if docker or podman works: state, death and removal."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.tools.mcp_servers.server_entry import find_program
from agentfactory.tools.sessions.toolset import open_toolset
from tests.tools.conftest import ask, check_own_words, recipe_of

pytestmark = pytest.mark.processes

PYTHON = Path(sys.executable).resolve()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def pack(file: Path, notebook: Path) -> None:
    """Pack a file system with this Python, its standard library, and the server, so that no registry is needed."""
    libraries = [Path(found) for found in re.findall(r"(?:=> )?(/\S+) \(0x", run("ldd", str(PYTHON)).stdout)]
    standard = Path(sysconfig.get_paths()["stdlib"])
    unused = re.compile(r"/(site-packages|test|idlelib|__pycache__|config-[^/]*|ensurepip|lib2to3|tkinter|pydoc_data)$")
    with tarfile.open(file, "w") as archive:
        for path in (PYTHON, *libraries):
            archive.add(path.resolve(), str(path).lstrip("/"))
        archive.add(standard, filter=lambda member: None if unused.search(member.name) else member)
        archive.add(notebook, "notebook.py")


@pytest.fixture
async def image(tmp_path: Path, folder: Path) -> AsyncIterator[tuple[str, str]]:
    try:
        program = await find_program()
    except ToolInfrastructureError as reason:
        pytest.skip(str(reason))
    name = f"agentfactory-test:{uuid.uuid4().hex[:8]}"
    pack(tmp_path / "image.tar", folder / "notebook.py")
    made = run(program, "import", str(tmp_path / "image.tar"), name)
    assert made.returncode == 0, made.stderr
    try:
        tried = run(program, "run", "--rm", name, str(PYTHON), "-S", "-c", "")
        if tried.returncode != 0:
            pytest.skip(f"{program} runs nothing here: {tried.stderr}")
        yield program, name
    finally:
        run(program, "rmi", "--force", name)


async def test_chains_in_containers(image: tuple[str, str], folder: Path) -> None:
    program, name = image
    pool = {"capacity": 2}
    entry = {"container": name, "args": [str(PYTHON), "-S", "/notebook.py"], "isolation": "process", "pool": pool}

    server = f"pad{uuid.uuid4().hex[:8]}"

    def alive() -> list[str]:
        return run(program, "ps", "-aq", "--filter", f"name=agentfactory-{server}-").stdout.split()

    async with open_toolset(recipe_of(**{server: entry}), folder) as toolset:
        await check_own_words(toolset, range(4))
        async with toolset.chain("killed", {}) as session:
            assert await ask(session, "read") == "nothing"
            for container in alive():
                run(program, "kill", container)
            with pytest.raises(ToolInfrastructureError, match=f"tool server {server} died"):
                await ask(session, "read")
        await check_own_words(toolset, [5])
    assert alive() == []
