#!/bin/bash
# The reward is the share of years that are right, as several numbers. The agent's program has the rights of this script:
# see broken-parser.
mapfile -t years < /tests/years.txt
rm -rf /tests/*
right=0
for line in "${years[@]}"; do
  read -r year expected <<< "$line"
  [ "$(timeout 5 /app/leap "$year" 2>&1 < /dev/null)" = "$expected" ] && right=$((right + 1))
done
for process in /proc/[0-9]*; do
  case ${process#/proc/} in 1 | $$ | $PPID) ;; *) kill -9 "${process#/proc/}" 2> /dev/null ;; esac
done
rm -rf /logs/verifier/reward*
printf '{"reward": %d, "right": %d}\n' $((right == ${#years[@]})) $right > /logs/verifier/reward.json
