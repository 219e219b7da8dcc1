"""The part of SGLang's HTTP API that AgentFactory uses, read from the source of its wheel without importing it.

`python -m tests.sglang_api FOLDER` writes `sglang_api.json` from the unpacked wheel in FOLDER. A test compares the two
(tests/rollout/test_sglang_api.py), and the stand-in for SGLang refuses what is not in the file
(tests/sglang_server.py)."""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".json")
ROUTES = (
    *("/generate", "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/ready", "/health"),
    *("/model_info", "/server_info", "/v1/models", "/weights_checker", "/update_weight_version"),
    *("/update_weights_from_disk", "/init_weights_update_group", "/destroy_weights_update_group"),
    *("/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"),
)
FLAGS = (
    *("model_path", "served_model_name", "dtype", "context_length", "max_running_requests", "enable_metrics"),
    *("host", "port", "api_key", "tp_size", "mem_fraction_static"),
)
SETTINGS = ("tp_size", "pp_size", "dp_size", "device", "quantization", "disaggregation_mode")
"""Fields of /server_info that the front reads: SGLang's own arguments."""
METRICS = (
    *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_used_tokens", "sglang:token_usage"),
    "sglang:realtime_tokens_total",
)


def load_table() -> dict[str, Any]:
    """Return the committed table."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def read_api(wheel: Path) -> dict[str, Any]:
    """Read the table from an unpacked wheel."""
    srt = wheel / "sglang" / "srt"
    server = _parsed(srt / "entrypoints" / "http_server.py")
    structs = _classes(srt / "managers" / "io_struct.py")
    contract = _classes(wheel / "sglang" / "api" / "v1" / "api_types.py")
    flags = [each for file in sorted((srt / "arg_groups" / "fields").glob("*.py")) for each in _settings(file)]
    collector = (srt / "observability" / "metrics_collector.py").read_text(encoding="utf-8")
    manager = _parsed(srt / "managers" / "tokenizer_manager.py")
    spans = _parsed(srt / "utils" / "weight_versions.py")
    finish = _classes(srt / "managers" / "schedule_batch.py", keys_of="to_json")
    bodies = {route: body for _, route, body, _ in _routes(server)}
    return {
        "version": next(wheel.glob("sglang-*.dist-info")).name.split("-")[1].removesuffix(".dist"),
        "routes": {path: sorted(method for method, route, _, _ in _routes(server) if route == path) for path in ROUTES},
        "bodies": {path: bodies[path] for path in ROUTES if bodies.get(path)},
        "fields": {name: structs[name] for name in sorted({b for p, b in bodies.items() if p in ROUTES and b})},
        # what /generate's own schema knows: it ignores other fields without a word, and refuses parameters
        "generate": sorted(contract["GenerateRequest"]),
        "sampling": sorted(contract["SamplingParams"]),
        "answers": {path: sorted(_keys(function)) for _, path, _, function in _routes(server) if path in ROUTES},
        "turn": sorted(_assigned(manager, "out_dict")),
        "meta": sorted(_assigned(manager, "meta_info") | _assigned(spans, "meta_info")),
        "finish": {name: sorted(keys) for name, keys in finish.items() if name.startswith("FINISH_")},
        "checksum": sorted(structs["ChecksumInfo"]),
        "place": sorted(structs["ParallelismInfo"]),
        "span": sorted(_classes(srt / "utils" / "weight_versions.py")["WeightVersionSpan"]),
        "flags": {name: names for name, names in flags if name in FLAGS},
        "settings": sorted(name for name, _ in flags if name in SETTINGS),
        "metrics": sorted(name for name in METRICS if f'"{name}"' in collector),
        "modes": re.findall(r'\("(\w+)", \w+_tokens\)', collector)[:3],
    }


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _classes(file: Path, keys_of: str | None = None) -> dict[str, Any]:
    """Return each class's fields, those of its bases in the file included: name -> whether it may be left out. With
    `keys_of`, the keys of the dictionary that this method returns."""
    found: dict[str, Any] = {}
    for node in _parsed(file).body:
        if not isinstance(node, ast.ClassDef):
            continue
        if keys_of is not None:
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == keys_of]
            if methods:
                found[node.name] = _keys(methods[0])
            continue
        fields: dict[str, bool] = {}
        for base in node.bases:
            fields |= found.get(getattr(base, "id", ""), {})
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                fields[each.target.id] = each.value is not None
        found[node.name] = fields
    return found


def _routes(server: ast.Module) -> Iterator[tuple[str, str, str | None, ast.AST]]:
    """Yield (method, path, class of the body, function) of FastAPI's routes."""
    for node in ast.walk(server):
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        body = next((name for each in node.args.args if (name := _body_class(each.annotation))), None)
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args:
                path = call.args[0]
                if not isinstance(path, ast.Constant):
                    continue
                if call.func.attr == "api_route":
                    [methods] = [ast.literal_eval(word.value) for word in call.keywords if word.arg == "methods"]
                    yield from ((method, path.value, body, node) for method in methods)
                elif call.func.attr in ("get", "post"):
                    yield call.func.attr.upper(), path.value, body, node


def _body_class(annotation: ast.AST | None) -> str | None:
    names = [each.id for each in ast.walk(annotation) if isinstance(each, ast.Name)] if annotation else []
    return next((name for name in names if name.endswith(("ReqInput", "AbortReq"))), None)


def _keys(node: ast.AST) -> set[str]:
    """Return the constant keys of all dictionaries in a piece of code, and of assignments to their items."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Dict):
            found |= {key.value for key in each.keys if isinstance(key, ast.Constant)}
        elif isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Constant):
            found.add(each.slice.value)
    return {key for key in found if isinstance(key, str)}


def _assigned(module: ast.Module, variable: str) -> set[str]:
    """Return the keys that a module gives to the dictionary `variable`."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == variable and isinstance(node.value, ast.Dict):
                    found |= _keys(node.value)
                if isinstance(target, ast.Subscript) and getattr(target.value, "id", "") == variable:
                    found |= _keys(target)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"{variable}.update":
            found |= {key for argument in node.args for key in _keys(argument)}
    return found


def _settings(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield SGLang's settings with the names of their flags."""
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own = [f"--{node.target.id.replace('_', '-')}"]
            for word in (each for each in ast.walk(node.annotation) if isinstance(each, ast.keyword)):
                if word.arg == "aliases" and isinstance(word.value, ast.List):
                    own += ast.literal_eval(word.value)
                elif word.arg == "cli_name":
                    own[0] = ast.literal_eval(word.value)
            yield node.target.id, own


if __name__ == "__main__":
    TABLE.write_text(f"{json.dumps(read_api(Path(sys.argv[1])), indent=1)}\n", encoding="utf-8")
