"""`agentfactory index build`: its output, its index, and the command lines that it refuses."""

from pathlib import Path

import pytest

from agentfactory.commands.main import main
from tests.worlds.search.corpora import write_jsonl

ROWS = [{"id": number, "contents": f'"T{number}"\nword{number}'} for number in range(20)]


def test_it_builds_an_index_that_the_tool_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, folder = write_jsonl(tmp_path / "c.jsonl", ROWS), tmp_path / "deep" / "index"
    assert main(["index", "build", str(corpus), "--output", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("indexed 20 passages in ")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"mcp_servers:\n  search:\n    module: search\n    options: {{source: {folder}}}\n")
    assert main(["tools", "call", str(recipe), "search", "query=title: word7 AND"]) == 0
    assert capsys.readouterr().out == 'Doc 1(Title: "T7") word7\ninfo: {"documents": ["7"]}\n'
    assert main(["tools", "check", str(recipe)]) == 0
    assert main(["tools", "list", str(recipe)]) == 0
    assert "search: search(query: string)" in capsys.readouterr().out
