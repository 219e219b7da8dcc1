"""`python -m agentfactory.tools.run_module FOLDERS MODULE [ARGUMENT ...]`: what `python -m MODULE` does, with FOLDERS
(a JSON list) at the end of the import path and not the current folder at its beginning.

A stdio server of a recipe is started so: a `mcp/` or a `json.py` beside the recipe would be taken for the library.
"""

import json
import runpy
import sys
from pathlib import Path

from agentfactory.tools.import_path import append_folders

if __name__ == "__main__":
    _, folders, module, *arguments = sys.argv
    append_folders(map(Path, json.loads(folders)))
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
