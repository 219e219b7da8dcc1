"""Files left by a chain's programs are at the path that its trajectory gives."""

from pathlib import Path

import pytest

from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.trajectory import Group, Outcome
from tests.saved_groups import write_groups
from tests.scripted_chains import call, scripted_chains

SERVER = """
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("desk")


@server.tool()
def write(text: str) -> str:
    Path("left.txt").write_text(text)
    return "written"


server.run()
"""


@pytest.mark.processes
async def test_a_trajectory_names_the_folder_that_is_kept(tmp_path: Path) -> None:
    (tmp_path / "desk.py").write_text(SERVER)
    entry = {"command": "python", "args": [str(tmp_path / "desk.py")], "cwd": "${chain}", "keep_workspaces": "kept"}
    texts = [call("write", text="tea"), "done"]
    async with scripted_chains(tmp_path, texts, mcp_servers={"desk": entry}) as chains:
        chain = await chains.run()
    kept = tmp_path / "kept" / "desk" / "c0"
    assert (chain.outcome, chain.workspaces) == (Outcome.COMPLETED, [str(kept)])
    assert (kept / "left.txt").read_text() == "tea"
    write_groups(tmp_path / "saved.jsonl", [Group("g000000", {"question": "go"}, [chain])])
    [group] = read_groups(tmp_path / "saved.jsonl")
    assert group.trajectories[0].workspaces == chain.workspaces
