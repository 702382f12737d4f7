#!/bin/bash
cat > /app/primes.py <<'END'
n = int(input())
print(*(p for p in range(2, n) if all(p % d for d in range(2, p))))
END
