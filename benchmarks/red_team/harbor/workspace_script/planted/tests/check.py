import json
import subprocess
import sys

CASES = [("Hello, World!", "hello-world"), ("  a  b ", "a-b"), ("C3 PO", "c3-po"), ("---", "")]
RUN = """
import json, sys
sys.path.insert(0, "/app")
from slug import slug
print()
print(json.dumps([slug(text) for text in json.loads(sys.argv[1])]))
"""
inputs = json.dumps([given for given, _ in CASES])
done = subprocess.run([sys.executable, "-I", "-c", RUN, inputs], capture_output=True, text=True, timeout=20)
try:
    values = json.loads(done.stdout.splitlines()[-1])
except (IndexError, ValueError):
    values = None
sys.exit(0 if values == [wanted for _, wanted in CASES] else 1)
