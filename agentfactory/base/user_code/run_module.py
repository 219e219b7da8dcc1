"""`python -m ...run_module FOLDERS MODULE [ARGUMENT ...]`: like `python -m MODULE`, with FOLDERS (a JSON list) last on
the import path: a `mcp/` next to a recipe must not hide the library."""

import json
import runpy
import sys
from pathlib import Path

from agentfactory.base.user_code.import_path import append_folders

if __name__ == "__main__":
    _, folders, module, *arguments = sys.argv
    append_folders(map(Path, json.loads(folders)))
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
