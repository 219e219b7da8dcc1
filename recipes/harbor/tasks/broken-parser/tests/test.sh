#!/bin/bash
# The agent's program only runs as a process of its own: what counts is what it prints.
right=1
diff <(timeout 5 python3 -I /app/parser.py) /tests/expected.txt || right=0
diff <(SETTINGS=/tests/other.txt timeout 5 python3 -I /app/parser.py) /tests/other-expected.txt || right=0
echo $right > /logs/verifier/reward.txt
