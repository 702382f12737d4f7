"""What `make demo` runs: two examples, each with an expert and a random agent, and their tables side by side."""

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
EXAMPLES = ("frozen_lake", "sqlite_analyst")


def run(name: str) -> Path:
    """Run one example with both policies; progress is shown, the summary is left in the run's directory."""
    print(f"\n=== {name}: reward-kit run examples/{name}/task.yaml --policy expert --policy random", flush=True)
    command = [sys.executable, "-m", "reward_kit.cli.main", "run", str(HERE / name / "task.yaml")]
    options = ["--policy", "expert", "--policy", "random", "--json"]
    finished = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=True)
    return Path(json.loads(finished.stdout)["run"])


def main() -> None:
    """Run the examples and show what came of them."""
    tables = []
    for name in EXAMPLES:
        path = run(name)
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        tables.append(summary_table(summary_from_json(summary), name))
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    console.print()
    console.print(Columns(tables, padding=(0, 4)))
    console.print("The runs are in runs/. Play yourself:")
    console.print("  .venv/bin/reward-kit run examples/frozen_lake/task.yaml --policy human --limit 1 -n 1")


if __name__ == "__main__":
    main()
