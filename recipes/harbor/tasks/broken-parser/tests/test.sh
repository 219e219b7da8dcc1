#!/bin/bash
# The agent's program has the rights of this script: so what is expected is removed before it runs, and when the reward
# is written, it runs no more and what it wrote is gone.
expected=$(cat /tests/expected.txt) other_expected=$(cat /tests/other-expected.txt) other=$(mktemp)
cat /tests/other.txt > "$other"
rm -rf /tests/*
right=1
[ "$(timeout 5 python3 -I /app/parser.py)" = "$expected" ] || right=0
[ "$(SETTINGS=$other timeout 5 python3 -I /app/parser.py)" = "$other_expected" ] || right=0
for process in /proc/[0-9]*; do
  case ${process#/proc/} in 1 | $$ | $PPID) ;; *) kill -9 "${process#/proc/}" 2> /dev/null ;; esac
done
rm -rf /logs/verifier/reward*
echo $right > /logs/verifier/reward.txt
