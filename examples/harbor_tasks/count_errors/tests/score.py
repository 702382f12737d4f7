import json
from pathlib import Path

try:
    found = json.loads(Path("/app/errors.json").read_text())
except (OSError, ValueError):
    found = None
print(1 if found == {"search": 2, "billing": 1} else 0)
