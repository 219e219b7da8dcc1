"""Configurations of other programs in a recipe: blocks of MCP servers, and names of settings."""

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from agentfactory.recipe.field_errors import all_fields, familiar_names
from agentfactory.recipe.schema import Recipe
from tests.conftest import REPOSITORY
from tests.project import load_and_check, refused

TIME = {"command": "python", "args": ["-m", "mcp_server_time"]}
FAR = {"url": "http://127.0.0.1:8/mcp"}
KEYED = {**FAR, "headers": {"Authorization": "Bearer ${HOME}"}}

# block -> the servers that come of it, by the fields that are set
TAKEN = {
    "Claude Code": (
        """{
          "mcpServers": {
            "time": {"type": "stdio", "command": "python", "args": ["-m", "mcp_server_time"], "env": {}},
            "far": {"type": "http", "url": "http://127.0.0.1:8/mcp", "headers": {"Authorization": "Bearer ${HOME}"}}
          }
        }""",
        {"time": {**TIME, "env": {}}, "far": KEYED},
    ),
    "Cursor": (
        """{
          "mcpServers": {
            "time": {"command": "python", "args": ["-m", "mcp_server_time"], "env": {"ZONE": "${env:HOME}"}},
            "far": {"url": "http://127.0.0.1:8/mcp", "headers": {"Authorization": "Bearer ${env:HOME}"}}
          }
        }""",
        {"time": {**TIME, "env": {"ZONE": "${HOME}"}}, "far": KEYED},
    ),
    "VS Code": (
        """{
          "inputs": [{"type": "promptString", "id": "unused", "description": "API key", "password": true}],
          "servers": {
            "time": {"type": "stdio", "command": "python", "args": ["-m", "mcp_server_time"]},
            "far": {"type": "http", "url": "http://127.0.0.1:8/mcp"}
          }
        }""",
        {"time": TIME, "far": FAR},
    ),
    "Gemini CLI": (
        """{
          "mcpServers": {
            "time": {
              "command": "python", "args": ["-m", "mcp_server_time"], "trust": false, "description": "clock",
              "includeTools": ["get_current_time"], "excludeTools": ["convert_time"]
            },
            "far": {"httpUrl": "http://127.0.0.1:8/mcp"}
          }
        }""",
        {"time": {**TIME, "allow": ["get_current_time"], "deny": ["convert_time"]}, "far": FAR},
    ),
    "Cline": (
        """{
          "mcpServers": {
            "time": {
              "command": "python", "args": ["-m", "mcp_server_time"],
              "disabled": false, "autoApprove": ["convert_time"], "alwaysAllow": []
            },
            "off": {"command": "no-such-program", "disabled": true},
            "far": {"type": "streamableHttp", "url": "http://127.0.0.1:8/mcp"}
          }
        }""",
        {"time": TIME, "far": FAR},
    ),
    "Windsurf": (
        """{
          "mcpServers": {"far": {"serverUrl": "http://127.0.0.1:8/mcp", "disabledTools": ["x"]}}
        }""",
        {"far": {**FAR, "deny": ["x"]}},
    ),
    "Zed": (
        """{
          "context_servers": {"time": {"source": "custom", "command": "python", "args": ["-m", "mcp_server_time"]}}
        }""",
        {"time": TIME},
    ),
    "opencode": (
        """{
          "mcp": {
            "time": {
              "type": "local", "command": ["python", "-m", "mcp_server_time"], "environment": {"A": "b"},
              "enabled": true
            },
            "far": {"type": "remote", "url": "http://127.0.0.1:8/mcp", "enabled": true}
          }
        }""",
        {"time": {**TIME, "env": {"A": "b"}}, "far": FAR},
    ),
    "Continue": ("mcpServers: [{name: time, command: python, args: [-m, mcp_server_time]}]", {"time": TIME}),
}


def whole(folder: Path, block: str) -> Path:
    """Write a recipe with this block, pasted without its outer braces."""
    rows = '{"question": "2 + 2", "answer": "4"}\n'
    (folder / "tasks.jsonl").write_text(rows)
    text = block
    if text.startswith("{"):
        # what is at the top of a recipe has no commas
        text = re.sub(r"^(\S.*),$", r"\1", dedent(text[1:-1]).strip(), flags=re.MULTILINE)
    base = "model: {path: none}\ndata: {path: tasks.jsonl}\nrewards: [exact_match]\ntrain: {steps: 1}\n"
    (folder / "recipe.yaml").write_text(f"{base}server: {{engine: embedded}}\n{text.rstrip().rstrip(',')}\n")
    return folder / "recipe.yaml"


def servers(file: Path, purpose: Any = "train") -> dict[str, Any]:
    recipe = load_and_check(file, purpose=purpose, lacks=[])
    found = {name: server.model_dump(exclude_unset=True) for name, server in recipe.mcp_servers.items()}
    for server in found.values():
        server.pop("cwd", None)
    return found


@pytest.mark.parametrize("program", TAKEN)
@pytest.mark.parametrize("where", ["at the top", "as mcp_servers", "as the file"])
def test_blocks_of_other_programs_are_taken(program: str, where: str, tmp_path: Path) -> None:
    block, expected = TAKEN[program]
    if where == "at the top":
        assert servers(whole(tmp_path, block)) == expected
    elif where == "as mcp_servers":
        indented = "\n".join(f"  {line}" for line in block.splitlines())
        assert servers(whole(tmp_path, f"mcp_servers:\n{indented}")) == expected
    else:
        (tmp_path / "mcp.json").write_text(block)
        assert servers(tmp_path / "mcp.json", "tools") == expected


@pytest.mark.parametrize(
    ("entry", "field", "problem", "fix"),
    [
        ('"env": {"A": "${input:api-key}"}', "env.A", "got ${input:api-key}", "write the value, or ${NAME} in env"),
        ('"env": {"A": "$HOME"}', "env.A", "got $HOME", "write ${HOME}"),
        ('"args": ["--token=${TOKEN}"]', "args.0", "got ${TOKEN}", "${NAME} in env or headers"),
        ('"envFile": ".env"', "envFile", "no such field", "write its variables in env, as NAME: ${NAME}"),
        ('"timeout": 30000', "timeout", "got 30000", "write timeout_seconds: 30"),
        ('"type": "sse"', "type", "got 'sse'", "streamable HTTP"),
        ('"deny": ["a"], "excludeTools": ["b"]', "excludeTools", "given with deny", "keep one of the two"),
    ],
)  # fmt: skip
def test_what_is_not_taken_has_a_line_to_write(entry: str, field: str, problem: str, fix: str, tmp_path: Path) -> None:
    file = whole(tmp_path, f'{{"mcpServers": {{"s": {{"command": "python", {entry}}}}}}}')
    error = refused(re.escape(problem), path=file)
    assert error.field == f"mcpServers.s.{field}"
    assert fix in error.fix
    assert error.source.endswith("recipe.yaml")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ('mcpServers: {\n\t"a": {"command": "x"}\n}', "indent with spaces, not with tabs"),
        ('a: 1\n{\n  "servers": {"a": {"command": "x"}}\n}\n', "indent pasted braces"),
        ('mcpServers: {\n  // mine\n  "a": {"command": "x"}\n}', "write comments with #, not //"),
    ],
)
def test_json_that_is_no_yaml_is_explained(text: str, fix: str, tmp_path: Path) -> None:
    refused(f"not YAML: .*fix: .*{fix}", path=whole(tmp_path, text))


def fields_of(text: str) -> list[str]:
    return [] if text.startswith("the option") else text.split(", ")


def test_familiar_names_are_refused_with_fields_that_exist() -> None:
    known = {*all_fields(Recipe)}
    assert {
        field
        for names in familiar_names().values()
        for ours in names.values()
        for field in fields_of(ours)
        if field not in known
    } == set()


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("num_generations: 8", "write rollout.group_size for TRL's num_generations"),
        ("train: {steps: 1, lr: 1e-6}", "write train.learning_rate for verl's actor_rollout_ref.actor.optim.lr"),
        ("model: {path: none, name: a}", "write model.path for prime-rl's model.name"),
        ("train: {steps: 1, loss: {options: {delta: 2}}}", "write train.loss.options.dual_clip for TRL's delta"),
        ("actor_rollout_ref: {rollout: {n: 8}, actor: {optim: {lr: 1e-6}, clip_ratio_c: 3}}",
         "write rollout.group_size for verl's actor_rollout_ref.rollout.n; "
         "train.learning_rate for verl's actor_rollout_ref.actor.optim.lr; "
         "train.loss.options.dual_clip for verl's actor_rollout_ref.actor.clip_ratio_c"),
        ("model: {path: none, lora: {r: 8}}", "write model.lora.rank for TRL's peft_config.r"),
        ("train: {steps: 1, learnig_rate: 1}", "did you mean train.learning_rate?"),
    ],
)  # fmt: skip
def test_a_familiar_name_is_refused_with_ours(setting: str, fix: str, tmp_path: Path) -> None:
    file = whole(tmp_path, "")
    (key,) = re.findall(r"^\w+", setting)
    lines = [line for line in file.read_text().splitlines() if not line.startswith(f"{key}:")]
    file.write_text("\n".join([*lines, setting]))
    assert refused("unknown key", path=file).fix == fix


def sections_of_the_page() -> dict[str, list[tuple[str, str]]]:
    """Program -> rows of its table: familiar names, our fields."""
    text = (REPOSITORY / "docs" / "coming-from.md").read_text(encoding="utf-8")
    found = {}
    for part in text.split("\n## ")[1:]:
        program = part.splitlines()[0].split("'s ")[0]
        if program in familiar_names():
            rows = re.findall(r"^\| (.*`.*) \| (.*) \|$", part, re.MULTILINE)
            found[program] = [(theirs, ours) for theirs, ours in rows if theirs not in ("here", program)]
    return found


def test_the_page_and_the_errors_agree() -> None:
    rows = sections_of_the_page()
    assert {*rows} == {"TRL", "verl", "prime-rl", "ms-swift"}
    wrong = []
    for program, found in rows.items():
        for theirs, ours in found:
            for name in re.findall(r"`([\w.]+)", theirs):
                if name.startswith("_") or name in Recipe.model_fields:
                    continue  # the end of a name in the same row, or our name too
                ends = {key.rpartition(".")[2]: value for key, value in familiar_names()[program].items()}
                known = familiar_names()[program].get(name) or ends.get(name.rpartition(".")[2], "missing")
                fields = fields_of(known)
                if not all(f"`{field}" in ours or f"`{field.rpartition('.')[2]}" in ours for field in fields):
                    wrong.append(f"{program}: {name}: the errors say {fields}, the page {ours}")
    assert wrong == [], "\n".join(wrong)
