#!/bin/bash
if diff <(printf '%s\n' 1 4 9 16 25 36 49 64 81 100) /app/squares.txt; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
