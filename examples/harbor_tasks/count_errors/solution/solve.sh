#!/bin/bash
python3 - <<'EOF'
import collections, json, pathlib
lines = [line.split() for line in pathlib.Path("/app/service.log").read_text().splitlines()]
counts = collections.Counter(service for _, service, level in lines if level == "ERROR")
pathlib.Path("/app/errors.json").write_text(json.dumps(counts))
EOF
