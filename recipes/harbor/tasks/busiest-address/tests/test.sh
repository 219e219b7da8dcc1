#!/bin/bash
# Counted again from the logs of the task, because those in LOGS may have been changed.
expected=$(cat /tests/logs/*.log | awk '$4 == 500 { n[$1]++ } END { for (a in n) print n[a], a }' | sort -nr | awk 'NR == 1 { print $2, $1 }')
if [ "$(cat "$REPORT")" = "$expected" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
