"""`python -m agentfactory.base.user_code.run_module FOLDERS MODULE [ARGUMENT ...]`: like `python -m MODULE`, with
FOLDERS (a JSON list) at the end of the import path and without the current folder at its beginning.

The stdio servers of a recipe are started this way: otherwise a `mcp/` or a `json.py` next to the recipe would hide the
library of that name.
"""

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
