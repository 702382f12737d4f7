"""Compare this working tree with an earlier commit on the same machine. Deleted after the rebuild.

Same inputs, same bytes:

    python tests/golden.py 9295953            # record both sides, print every difference
    python tests/golden.py 9295953 --quick    # without the training run
    python tests/golden.py --record FOLDER    # record this tree only

Records: episodes, scores, credit, states and summaries of seeded runs of every example that needs no model server, a
seeded FrozenLake training to its last checkpoint, values of every estimator and loss, and `--help` of the commands.
Times, run names and paths are left out.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
PAIR = ["--policy", "expert", "--policy", "random"]
RUNS: dict[str, list[str]] = {
    "alfworld_household": ["examples/alfworld_household/task.yaml", *PAIR, "-n", "2", "--limit", "10"],
    "file_clerk": ["examples/file_clerk/task.yaml", "--policy", "clerk.py:Clerk", "--policy", "random"],
    "file_clerk_report": ["examples/file_clerk/report.yaml", "--policy", "clerk.py:Bookkeeper", "--policy", "random"],
    "frozen_lake": ["examples/frozen_lake/task.yaml", *PAIR, "-n", "3"],
    "frozen_lake_agent": ["examples/frozen_lake_training/agent.yaml", "--limit", "24", "-n", "2"],
    "mcp_filesystem": ["examples/mcp_filesystem/task.yaml", *PAIR, "-n", "2"],
    "sokoban": ["examples/sokoban/task.yaml", *PAIR, "-n", "2"],
    "sqlite_analyst": ["examples/sqlite_analyst/task.yaml", *PAIR, "-n", "2"],
    "support_dialogue": ["examples/support_dialogue/task.yaml", *PAIR, "-n", "2"],
    "webshop": ["examples/webshop/task.yaml", *PAIR, "-n", "2", "--limit", "10"],
}
TRAINING = ["examples/frozen_lake_training/train.yaml"]
COMMANDS = ["", "init", "run", "score", "export", "view", "compare", "credit", "train", "calibrate", "check", "serve"]
COMMANDS += ["doctor", "runs", "schema", "completion"]
TIMED = re.compile(
    r"^(timing|.*_at|.*_s|.*_seconds|duration.*|.*per_second.*|lag.*|run|run_id|task_path|log_dir|versions)$"
)
# Tables that are equal but for the order of lines, since episodes end in another order under another load.
UNORDERED = {"episodes.jsonl", "scores.jsonl"}


def without_times(value: object, root: str) -> object:
    """Drop timings, run names and paths of the machine."""
    if isinstance(value, dict):
        return {key: without_times(item, root) for key, item in value.items() if not TIMED.match(key)}
    if isinstance(value, list):
        return [without_times(item, root) for item in value]
    return value.replace(root, "ROOT") if isinstance(value, str) else value


def normal_line(line: str, root: str) -> str:
    return json.dumps(without_times(json.loads(line), root), ensure_ascii=False)


def keep(source: Path, target: Path, root: str) -> None:
    """Copy one file of a run folder in the form that is compared."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".jsonl":
        lines = [normal_line(line, root) for line in source.read_text(encoding="utf-8").splitlines()]
        target.write_text("\n".join(sorted(lines) if source.name in UNORDERED else lines) + "\n", encoding="utf-8")
    elif source.suffix == ".json":
        value = without_times(json.loads(source.read_text(encoding="utf-8")), root)
        target.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    elif source.suffix in {".safetensors", ".pt", ".bin"}:
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        target.with_name(target.name + ".sha256").write_text(digest + "\n", encoding="utf-8")


def record(tree: Path, out: Path, quick: bool) -> None:
    """Run everything in `tree` and write the comparable outputs to `out`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "REWARD_KIT_TRUST": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
    }
    command = [sys.executable, "-m", "reward_kit.cli.main"]

    def call(arguments: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(arguments, cwd=tree, env=environment, text=True, capture_output=True, **options)  # type: ignore[call-overload,no-any-return]

    for name, arguments in RUNS.items():
        with tempfile.TemporaryDirectory() as logs:
            done = call([*command, "run", *arguments, "--seed", "3", "--log-dir", logs, "--display", "none", "--json"])
            (out / "runs" / name).mkdir(parents=True)
            if done.returncode:
                (out / "runs" / name / "error.txt").write_text(done.stderr.replace(str(tree), "ROOT"), encoding="utf-8")
                print(f"{name}: exit {done.returncode}\n{done.stderr}", file=sys.stderr)
                continue
            (folder,) = [path for path in Path(logs).iterdir() if (path / "run.json").is_file()]
            credit = call([*command, "credit", str(folder), "--json"])
            (out / "runs" / name / "credit.txt").write_text(
                json.dumps(without_times(json.loads(credit.stdout), logs), indent=1)
                if credit.returncode == 0
                else credit.stderr,
                encoding="utf-8",
            )
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    keep(path, out / "runs" / name / path.relative_to(folder), str(tree))
    if not quick:
        with tempfile.TemporaryDirectory() as logs:
            done = call([*command, "train", *TRAINING, "--log-dir", logs, "--display", "none"])
            if done.returncode:
                print(f"training: exit {done.returncode}\n{done.stderr}", file=sys.stderr)
            for folder in Path(logs).iterdir():
                for path in sorted(folder.rglob("*")):
                    if path.is_file():
                        keep(path, out / "training" / path.relative_to(folder), str(tree))
    for name in COMMANDS:
        text = call([*command, *([name] if name else []), "--help"]).stdout
        (out / "help").mkdir(exist_ok=True)
        (out / "help" / f"{name or 'reward-kit'}.txt").write_text(text, encoding="utf-8")
    values = call([sys.executable, "-c", VECTORS])
    (out / "vectors.json").write_text(values.stdout, encoding="utf-8")
    if values.returncode:
        print(values.stderr, file=sys.stderr)


VECTORS = """
import inspect, json, math, random
import numpy as np
import torch
from reward_kit.rl_helpers import ESTIMATORS
from tests.credit.batches import step, with_tokens
from tests.rl import loss_cases

draw = random.Random(5)
batch, scores, groups = [], [], []
for number in range(24):
    batch.append([with_tokens(step(draw.choice("abcd"), draw.choice([0.0, 0.25, 1.0]), value=draw.random()), 3)
                  for _ in range(draw.randint(1, 6))])
    scores.append(None if number == 7 else draw.choice([0.0, 0.5, 1.0]))
    groups.append(number // 6)
GIVEN = {"omega": 0.5, "gamma": 0.9, "epsilon": 1e-6, "lam": 0.95, "k": 3}
out = {}
for name, function in sorted(ESTIMATORS.items()):
    parameters = inspect.signature(function).parameters
    options = {key: value for key, value in GIVEN.items() if key in parameters}
    for more in ({}, {"normalization": "mean"}, {"combination": "additive", "omega": None, "step_weight": 1.0}):
        if more.keys() <= parameters.keys():
            try:
                credit = function(batch, scores, group_ids=groups, **{**options, **more})
            except Exception as error:
                out[f"{name} {more}"] = f"{type(error).__name__}: {error}"
            else:
                out[f"{name} {more}"] = [np.asarray(column, dtype=float).tolist() for column in list(credit)[:4]]
def clean(value):
    if isinstance(value, torch.Tensor):
        return clean(value.detach().tolist())
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return repr(value)
for seed in range(4):
    case = loss_cases.random_case(seed)
    for name, aggregation in loss_cases.EVERY_LOSS_AND_AGGREGATION:
        whole = loss_cases.whole_of(name, case)
        out[f"{name} {aggregation} {seed}"] = clean(loss_cases.evaluated(name, [case], aggregation, whole))
print(json.dumps(clean(out), indent=1))
"""


def compare(before: Path, after: Path) -> int:
    """Print each difference; return how many files differ."""
    names = sorted(
        {str(path.relative_to(side)) for side in (before, after) for path in side.rglob("*") if path.is_file()}
    )
    different = 0
    for name in names:
        old, new = (side / name for side in (before, after))
        texts = [
            path.read_text(encoding="utf-8").splitlines() if path.exists() else ["(absent)"] for path in (old, new)
        ]
        if texts[0] != texts[1]:
            different += 1
            lines = list(difflib.unified_diff(*texts, f"before/{name}", f"after/{name}", lineterm="", n=0))
            print("\n".join(line[:400] for line in lines[:12]), f"... {len(lines)} lines" if len(lines) > 12 else "")
    print(f"{len(names) - different} of {len(names)} files are equal")
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    if arguments.record:
        record(HERE, arguments.record.resolve(), arguments.quick)
        return
    with tempfile.TemporaryDirectory() as temporary:
        tree, before, after = (Path(temporary) / name for name in ("tree", "before", "after"))
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(tree), arguments.commit], cwd=HERE, check=True)
        try:
            record(tree, before, arguments.quick)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=HERE, check=True)
            shutil.rmtree(tree, ignore_errors=True)
        record(HERE, after, arguments.quick)
        sys.exit(1 if compare(before, after) else 0)


if __name__ == "__main__":
    main()
