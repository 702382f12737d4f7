"""Run the examples with an expert and a random policy, and print their tables side by side. Run by `make demo`.

If PyTorch is installed, the household's table has a third row: a small language model trained with reward-kit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console

from reward_kit.runs import summary_from_json, summary_table

HERE = Path(__file__).parent
EXAMPLES = {"alfworld_household": ["-n", "1"], "frozen_lake": [], "mcp_filesystem": ["-n", "1"], "sqlite_analyst": []}
BOTH = ["--policy", "expert", "--policy", "random"]
TRAINED = "alfworld_household"
"""The example with a trained language model."""


def run(file: str, options: list[str]) -> dict[str, Any]:
    """Run a task file, show its progress and return its summary."""
    print(f"\n=== .venv/bin/reward-kit run examples/{file} {' '.join(options)}", flush=True)
    command = [sys.executable, "-m", "reward_kit.cli.main", "run", str(HERE / file)]
    environment = {**os.environ, "REWARD_KIT_TRUST": "1"}  # the examples in this folder are trusted
    finished = subprocess.run(
        [*command, *options, "--json"], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    path = Path(json.loads(finished.stdout)["run"])
    summary: dict[str, Any] = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    return summary


def has_torch() -> bool:
    """Return whether a language model can run in this environment."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def main() -> None:
    """Run the examples and print their tables."""
    tables = []
    for name, more in EXAMPLES.items():
        summary = run(f"{name}/task.yaml", [*BOTH, *more])
        if name == TRAINED and has_torch():
            (trained,) = run(f"{name}/agent.yaml", [])["policies"]
            summary["policies"].append({**trained, "policy": "language model, 0.5M"})
        tables.append(summary_table(summary_from_json(summary), name))
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False, soft_wrap=False)
    console.print()
    console.print(Columns(tables, padding=(0, 4)))
    if not has_torch():
        print("The household also has a small language model as policy. It requires PyTorch (300 MB):")
        print("  .venv/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu")
        print("  .venv/bin/pip install -e '.[train]'")
    print("The runs are in runs/. To play yourself:")
    print("  .venv/bin/reward-kit run examples/frozen_lake/task.yaml --policy human --limit 1 -n 1")
    print("To run the household on TextWorld's engine (400 MB):")
    print("  .venv/bin/pip install -e '.[text-games]'")
    print("  .venv/bin/reward-kit run examples/alfworld_household/task.yaml --policy expert --limit 3 -n 1 \\")
    print("      -T resource_type=alfworld_real")


if __name__ == "__main__":
    main()
