#!/bin/bash
awk '$4 == 500 { count[$1]++ } END { for (a in count) print a, count[a] }' "$LOGS"/*.log | sort -k2,2nr | head -1 > "$REPORT"
