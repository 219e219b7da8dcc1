#!/bin/bash
python3 - <<'PROGRAM' > /app/primes.csv
print("number,prime")
for n in range(1, 61):
    print(f"{n},{'yes' if n > 1 and all(n % d for d in range(2, n)) else 'no'}")
PROGRAM
