"""Move the modules of one package to their floors, and rewrite every mention of them: imports, dotted names, paths.

`python house.py PACKAGE`, in a clean checkout. Run once for each package, then deleted.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ALL: dict[str, str] = {}
"""Old module or package -> new one, both below `agentfactory`."""


def floor(new: str, old: str, names: str) -> None:
    """Move `names` from the folder `old` to the folder `new`; `a=b` renames."""
    for name in names.split():
        before, _, after = name.partition("=")
        ALL[f"{old}.{before}"] = f"{new}.{after or before}"


floor("worlds.images", "tools.images", "image_interpreter image_tools pictures boxes")
floor("worlds", "tools", "alfworld harbor scienceworld screens search web=browse webshop")
floor("worlds.browse", "tools.search", "cache=answer_cache")
for world in ("alfworld", "harbor", "scienceworld", "webshop"):
    floor(f"worlds.{world}", f"tools.{world}", f"environment={world}")
floor("worlds.screens", "tools.screens", "marks=number_marks")
floor("worlds.browse", "tools.web", "pages=web_pages")
floor("worlds.webshop", "tools.webshop", "pages=shop_pages")
floor("worlds.scienceworld", "tools.scienceworld", "prompt=published_prompt tasks=published_tasks")
floor("tools.user_code", "tools", "user_code=loading import_path extension option_types row_files run_module schemas")
floor("tools.calls", "tools", "limits results truncation retries message_filter notices")
floor("tools.environments", "tools", "environment_host pool pool_ledger anchors=state_anchors workspaces shared")
floor("tools.mcp_servers", "tools", "mcp_client mcp_server stdio targets containers tool_server call_cache")
floor("tools.sessions", "tools", "session=tool_session toolset")
floor("tools.processes", "tools", "keeper parent_watch killable threads memory byte_cache=lru_cache")
floor("tools.files", "tools", "disk untrusted_files lock_file removal")
floor("tools.http", "tools", "http_server connections loopback key_guard server_keys")
floor("tools.prebuilt", "tools", "calculator code_interpreter shell prebuilt=registry")
floor(
    "rollout.text",
    "rollout",
    "encoding fast_encoding tokenizer templates template_choice template_renderer renderer load_renderer "
    "conversation_rows transcript roles=token_roles stop_strings parsers probing chat_templates",
)
floor("rollout.text.parsers", "rollout", "reasoning_tags")
floor(
    "rollout.text.parsers.formats",
    "rollout.parsers",
    "code_block deepseek gemma glm granite harmony hermes hunyuan invoke kimi llama3_json mistral nemotron phi4 "
    "pythonic qwen3_coder react tags",
)
floor("rollout.text.probing", "rollout.probing", "tools=tool_probe turns=turn_probe")
floor(
    "rollout.inference",
    "rollout",
    "client=inference_client connection server_metrics routing recovery stalls serving weight_digest weight_versions "
    "concurrency embedded",
)
floor("rollout.inference.vllm", "rollout", "vllm_arguments vllm_server vllm_plugin vllm_guard")
floor(
    "rollout.inference.embedded",
    "rollout.embedded",
    "attention=paged_attention images=request_images lora=adapters weights=weight_updates plan=step_plan "
    "sampling=token_sampling server=embedded_server",
)
floor(
    "rollout.chains",
    "rollout",
    "episode chain_runner chain_outcomes agent=turn sampling context timeline tool_errors prompt=opening "
    "first_prompt=prompt_preview chat_chain chat_endpoint",
)
floor(
    "rollout.groups", "rollout", "producer staleness filter=group_filter curriculum resume=resumed_groups group_files"
)
floor("rollout.workers", "rollout", "delivery=worker_socket worker=rollout_worker workers=worker_pool event_loop")
floor("rollout.evaluation", "rollout", "evaluate pass_at_k intervals")
floor("rollout.images", "rollout.images", "sight=image_intake requests=image_requests")
floor(
    "rollout.gateway",
    "rollout.gateway",
    "agents=client_agents asked=request_options episode=gateway_episode likeness=message_matching "
    "messages=anthropic_messages outside=outside_agent program=program_agent runner=gateway_runner "
    "server=gateway_server tree=token_tree turns=gateway_turns",
)
floor("trainers.loop", "trainers", "rl sft source=group_source credit advantages anchors stopping health time_share")
floor("trainers.update", "trainers", "learner learner_state policy_update losses mismatch optimizer offload")
floor("trainers.batches", "trainers", "batch tree=prefix_tree images=image_batches")
floor(
    "trainers.networks",
    "trainers",
    "policy critic reference=reference_policy network attention backbone adapters=lora vision_tower "
    "weights=gathered_weights layout=exact_layouts image_check",
)
floor("trainers.checkpoints", "trainers", "checkpoints=checkpoint checkpoint_writer best_checkpoint train_state")
floor("trainers.processes", "trainers", "accelerator rendezvous sharding host_memory")
floor("trainers.sync", "trainers", "server_control")
floor("trainers.sync", "trainers.sync", "file=file_sync lora=adapter_sync ipc=ipc_sync nccl=nccl_sync full=full_sync")
floor(
    "viewer.runs",
    "viewer",
    "runs=run_data follower growing_file saved_groups index=chain_index query text_search series recipe_difference",
)
floor("viewer.trajectories", "viewer", "trajectory_page token_texts marks=image_marks images=chain_images")
floor("viewer", "viewer", "export=html_export guard=access command=view_command")
floor("doctor", "doctor", "recipe=recipe_checks machine=machine_checks coordinates=coordinate_checks")
floor("commands", "commands", "export=export_command tools=tools_command")
floor("launching", "launching", "resume=resumption plan=launch_plan")

WORLDS = {
    **{f"tests.tools.{world}": f"tests.worlds.{world}" for world in ("alfworld", "scienceworld", "screens", "search")},
    **{"tests.tools.web": "tests.worlds.browse", "tests.tools.webshop": "tests.worlds.webshop"},
    "tests.tools.images": "tests.worlds.images",
    "tests.tools.test_harbor": "tests.worlds.harbor.test_harbor",
}

PACKAGE = sys.argv[1]
MODULES = {
    old: new
    for old, new in ALL.items()
    if (new.split(".")[0] == "worlds" if PACKAGE == "worlds" else new.split(".")[0] == old.split(".")[0] == PACKAGE)
}
TESTS = WORLDS if PACKAGE == "worlds" else {}


def new_name(module: str) -> str:
    """Return the new name of a module, or of a name in one, without `agentfactory.`."""
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        if (known := ".".join(parts[:count])) in MODULES:
            return ".".join([MODULES[known], *parts[count:]])
    return module


def main() -> None:
    files = [Path(name) for name in subprocess.check_output(["git", "ls-files"], text=True).split("\n") if name]
    files = [file for file in files if file.is_file() and not file.is_symlink() and file.name != "house.py"]
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if (made := rewritten(text, file)) != text:
            file.write_text(made, encoding="utf-8")
    for file in files:
        if (target := new_place(file)) != file:
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", file, target], check=True)


def new_place(file: Path) -> Path:
    """Return where a file goes."""
    parts = list(file.parts)
    if parts[0] == "agentfactory" and file.suffix == ".py":
        return Path("agentfactory", *new_name(".".join([*parts[1:-1], file.stem])).split(".")).with_suffix(".py")
    if parts[0] == "agentfactory":
        for count in range(len(parts) - 1, 1, -1):
            if (known := ".".join(parts[1:count])) in MODULES:
                return Path("agentfactory", *MODULES[known].split("."), *parts[count:])
    if parts[0] == "tests":
        parts[-1] = file.stem
        for count in range(len(parts), 1, -1):
            if (known := ".".join(parts[:count])) in TESTS:
                return Path(*TESTS[known].split("."), *parts[count:]).with_suffix(file.suffix)
    return file


_DOTTED = re.compile(r"\b(agentfactory)\.((?:tools|rollout|trainers|viewer|doctor|commands|launching)(?:\.\w+)+)")
_DONE = "agentfactory" + "_moved"
_TESTS = re.compile(r"\btests((?:[./])tools(?:[./])(?:\w+))")
_PATH = re.compile(
    r"(?<![\w./-])(agentfactory/)?((?:tools|rollout|trainers|viewer|doctor|commands|launching)(?:/\w+)+)(\.py\b|/)?"
)


def rewritten(text: str, file: Path) -> str:
    """Return the text of a file with all mentions rewritten."""
    if file.suffix == ".py":
        text = imports_of_modules(text)
    text = _DOTTED.sub(lambda found: f"agentfactory.{new_name(found[2])}", text)
    text = _PATH.sub(path, text)
    return _TESTS.sub(test_name, text).replace(_DONE, "agentfactory")


def path(found: re.Match[str]) -> str:
    """Return the new form of a path."""
    old = found[2].replace("/", ".")
    new = new_name(old)
    if new == old or (found[3] is None and found[1] is None):
        return found[0]
    return f"{found[1] or ''}{new.replace('.', '/')}{found[3] or ''}"


def test_name(found: re.Match[str]) -> str:
    """Return the new form of a test's name or path."""
    mark = found[1][0]
    old = "tests" + found[1].replace("/", ".")
    return TESTS.get(old, old).replace(".", mark)


def imports_of_modules(text: str) -> str:
    """Rewrite `from agentfactory.PACKAGE import MODULE`."""
    lines = text.split("\n")
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    for node in sorted(found, key=lambda node: -node.lineno):
        if not (node.module or "").startswith("agentfactory."):
            continue
        package = (node.module or "").removeprefix("agentfactory.")
        moved = [alias for alias in node.names if f"{package}.{alias.name}" in MODULES]
        if not moved:
            continue
        indent = " " * node.col_offset
        made = []
        for alias in moved:
            folder, _, name = MODULES[f"{package}.{alias.name}"].rpartition(".")
            called = alias.asname or alias.name
            suffix = "" if called == name else f" as {called}"
            made.append(f"{indent}from {_DONE}.{folder} import {name}{suffix}")
        if rest := [alias for alias in node.names if alias not in moved]:
            names = ", ".join(alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in rest)
            made.append(f"{indent}from {node.module} import {names}")
        lines[node.lineno - 1 : node.end_lineno] = made
    return "\n".join(lines)


if __name__ == "__main__":
    main()
