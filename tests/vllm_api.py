"""The part of vLLM that AgentFactory uses, read from the sources of its wheels without importing them.

`python -m tests.vllm_api FOLDER ...` renews the rows of `vllm_api.json` from unpacked wheels, one per version: for what
AgentFactory begins to use, first add a row by hand. tests/rollout/test_vllm_api.py compares rows, wheels and our code.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.source_names import description, fields_of, find, parsed

TABLE = Path(__file__).with_suffix(".json")
COMMON = "common"
"""Key of the rows that all versions share."""
_SPEAKERS = ["config", "distributed/weight_transfer", "entrypoints/generate/base", "renderers", "v1/**"]
_SPEAKERS += ["model_executor/model_loader", "model_executor/models", "utils"]
"""Folders of vLLM with log lines and messages that AgentFactory reads."""

Table = dict[str, dict[str, Any]]
"""Part -> row -> what vLLM has; null for what it lacks."""


def load_tables() -> dict[str, Table]:
    """Return the committed table of each version."""
    stored = json.loads(TABLE.read_text(encoding="utf-8"))
    common, tables = stored.pop(COMMON), stored.items()
    return {version: {p: rows | own.get(p, {}) for p, rows in common.items()} for version, own in tables}


def store(tables: dict[str, Table]) -> None:
    """Write the tables, rows that are equal in all of them once."""
    first, *others = tables.values()
    equal = {p: {k: v for k, v in rows.items() if all(t[p][k] == v for t in others)} for p, rows in first.items()}
    own = {v: {p: {k: r for k, r in t[p].items() if k not in equal[p]} for p in t} for v, t in tables.items()}
    own = {version: {part: rows for part, rows in table.items() if rows} for version, table in own.items()}
    TABLE.write_text(f"{json.dumps({**own, COMMON: equal}, indent=1, sort_keys=True)}\n", encoding="utf-8")


def read_table(wheel: Path) -> tuple[str, Table]:
    """Return the version of an unpacked wheel, and what it has for each row of the committed table."""
    asked = {part: {*rows} for table in load_tables().values() for part, rows in table.items()}
    [about] = wheel.glob("vllm-*.dist-info/METADATA")
    metadata, vllm = about.read_text(encoding="utf-8"), wheel / "vllm"
    variables, metrics = ((vllm / name).read_text(encoding="utf-8") for name in ("envs.py", "v1/metrics/loggers.py"))
    read: Table = {
        "requires": dict(re.findall(r"^Requires-Dist: (\w+)([^;\n]*)$", metadata, re.M)),
        "routes": dict(_routes(vllm / "entrypoints")),
        "fields": {name: fields_of(wheel, name) or None for name in asked["fields"]},
        "names": {name: description(found[1]) for name in asked["names"] if (found := find(wheel, name))},
        "flags": dict.fromkeys(_flags(vllm), True),
        "variables": dict.fromkeys(re.findall(r'^    "(\w+)": ', variables, re.M), True),
        # as prometheus_client shows them: it appends _total to counters
        "metrics": {f"{name}_total": "counter" for name in re.findall(r'_counter_cls\(\s*name="(.*)"', metrics)}
        | {name: "gauge" for name in re.findall(r'(?:_gauge_cls\(\s*name=|^ +name = )"(.*)"', metrics, re.M)},
        "texts": dict.fromkeys(_told(vllm, asked["texts"]), True),
    }
    [version] = re.findall(r"^Version: (.*)$", metadata, re.M)
    return version, {part: {row: read[part].get(row) for row in sorted(rows)} for part, rows in asked.items()}


def _routes(entrypoints: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each route with its method, the names and classes that it takes, and the keys that it answers with."""
    for node in (node for file in sorted(entrypoints.rglob("*.py")) for node in ast.walk(parsed(file))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Mount":
            yield ast.literal_eval(node.args[0]), {"method": "GET", "takes": [], "answers": []}
        for call in node.decorator_list if isinstance(node, ast.AsyncFunctionDef) else []:
            if isinstance(call, ast.Call) and (found := re.fullmatch(r"router\.(get|post)", ast.unparse(call.func))):
                kinds = {arg.arg: ast.unparse(arg.annotation or arg) for arg in node.args.args}
                takes = [k if k.endswith("Request") else name for name, k in kinds.items() if k != "Request"]
                body = "\n".join(map(ast.unparse, node.body))
                takes += re.findall(r"\.get(?:list)?\('(\w+)'", body)
                answers = sorted({*re.findall(r"[{ ]'(\w+)': ", body)})
                yield ast.literal_eval(call.args[0]), {"method": found[1].upper(), "takes": takes, "answers": answers}


def _flags(vllm: Path) -> Iterator[str]:
    for file in (file for each in ("engine", "entrypoints/*") for file in vllm.glob(f"{each}/*arg*.py")):
        text = file.read_text(encoding="utf-8")
        yield from re.findall(r'"(--[a-z][a-z-]*)"', text)
        # fields of FrontendArgs
        own = re.findall(r"^    (\w+): ", text, re.M) if file.name == "cli_args.py" else []
        yield from (f"--{name.replace('_', '-')}" for name in own)


def _told(vllm: Path, patterns: set[str]) -> Iterator[str]:
    """Yield the patterns that a text in vLLM's code matches, with 1 for each value in it."""
    for node in (node for each in _SPEAKERS for file in vllm.glob(f"{each}/*.py") for node in ast.walk(parsed(file))):
        if isinstance(node, ast.JoinedStr | ast.Constant):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in parts)
            yield from (pattern for pattern in patterns if re.search(pattern, text))


if __name__ == "__main__":
    store(dict(map(read_table, map(Path, sys.argv[1:]))))
