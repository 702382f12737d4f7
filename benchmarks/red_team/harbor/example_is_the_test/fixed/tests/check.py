import subprocess
import sys
CASES = [("12", "2 3 5 7 11"), ("3", "2"), ("30", "2 3 5 7 11 13 17 19 23 29")]

for given, wanted in CASES:
    done = subprocess.run([sys.executable, "-I", "/app/primes.py"], input=given, capture_output=True, text=True, timeout=20)
    if done.stdout.split() != wanted.split():
        sys.exit(1)
