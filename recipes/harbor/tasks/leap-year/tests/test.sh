#!/bin/bash
# The reward is the share of years that are right, as several numbers.
right=0 count=0
while read -r year expected; do
  count=$((count + 1))
  [ "$(timeout 5 /app/leap "$year" 2>&1)" = "$expected" ] && right=$((right + 1))
done < /tests/years.txt
python3 -c "import sys; r, n = map(int, sys.argv[1:]); print('{\"reward\": %g, \"right\": %d}' % (r == n, r))" $right $count \
  > /logs/verifier/reward.json
