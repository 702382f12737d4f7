"""What `make demo` runs: the examples, each with an expert and a random agent, and their tables side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rich.columns import Columns
from rich.console import Console

from reward_kit.runs.summary import summary_from_json
from reward_kit.runs.tables import summary_table

HERE = Path(__file__).parent
EXAMPLES = {"alfworld_household": ["-n", "1"], "frozen_lake": [], "mcp_filesystem": ["-n", "1"], "sqlite_analyst": []}


def run(name: str, more: list[str]) -> Path:
    """Run one example with both policies; progress is shown, the summary is left in the run's directory."""
    options = ["--policy", "expert", "--policy", "random", *more]
    print(f"\n=== .venv/bin/reward-kit run examples/{name}/task.yaml {' '.join(options)}", flush=True)
    command = [sys.executable, "-m", "reward_kit.cli.main", "run", str(HERE / name / "task.yaml")]
    finished = subprocess.run([*command, *options, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(json.loads(finished.stdout)["run"])


def main() -> None:
    """Run the examples and show what came of them."""
    tables = []
    for name, more in EXAMPLES.items():
        path = run(name, more)
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        tables.append(summary_table(summary_from_json(summary), name))
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False, soft_wrap=False)
    console.print()
    console.print(Columns(tables, padding=(0, 4)))
    print("The runs are in runs/. Play yourself:")
    print("  .venv/bin/reward-kit run examples/frozen_lake/task.yaml --policy human --limit 1 -n 1")
    print("The household on TextWorld's own engine, which needs 400 MB more:")
    print("  .venv/bin/pip install -e '.[text-games]'")
    print("  .venv/bin/reward-kit run examples/alfworld_household/task.yaml --policy expert --limit 3 -n 1 \\")
    print("      -T resource_type=alfworld_real")


if __name__ == "__main__":
    main()
