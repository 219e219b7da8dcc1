"""A process of KillableProcesses that answers with its number, and says with the second answer that it ends."""

import json
import os
import sys

print(json.dumps({"ready": True}), flush=True)
for count, _ in enumerate(sys.stdin):
    print(json.dumps({"pid": os.getpid(), "ends": count == 1}), flush=True)
