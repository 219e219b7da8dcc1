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


def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        assert main(["index", *arguments]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        return told

    corpus, folder = str(write_jsonl(tmp_path / "c.jsonl", [*ROWS, {"id": 1}])), str(tmp_path / "index")
    assert f"{corpus}:21 has neither contents nor text but id; fix: " in refused("build", corpus, "--output", folder)
    assert not Path(folder).exists()
    assert "language: got 'klingon'" in refused("build", corpus, "--output", folder, "--language", "klingon")
    assert f"--output: {tmp_path} exists" in refused("build", corpus, "--output", str(tmp_path))
    assert "there is no index in" in refused("serve", folder)
    assert "--topk: got 0; fix: use at least 1" in refused("serve", folder, "--topk", "0")
