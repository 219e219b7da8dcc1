"""Files left by a chain's programs are at the path that its trajectory gives."""

import json
from pathlib import Path

import pytest

from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.trajectory import Group, Outcome
from tests.saved_groups import write_groups
from tests.scripted_chains import scripted_chains

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
    call = f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': {'text': 'tea'}})}\n</tool_call>"
    async with scripted_chains(tmp_path, [call, "done", call, "done"], mcp_servers={"desk": entry}) as chains:
        one, again = [await chains.run() for _ in range(2)]
    assert [chain.outcome for chain in (one, again)] == [Outcome.COMPLETED] * 2
    kept = tmp_path / "kept" / "desk"
    assert (one.workspaces, again.workspaces) == ([str(kept / "c0")], [str(kept / "c0-2")])
    for folder in (*one.workspaces, *again.workspaces):
        assert (Path(folder) / "left.txt").read_text() == "tea"
    assert sorted(path.name for path in kept.iterdir()) == ["c0", "c0-2"]
    write_groups(tmp_path / "saved.jsonl", [Group("g000000", {"question": "go"}, [one])])
    [group] = read_groups(tmp_path / "saved.jsonl")
    assert group.trajectories[0].workspaces == one.workspaces
