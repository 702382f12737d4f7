"""Share of a run's CPU time spent on files, summary and report, and CPU time of the report of a large run.

    .venv/bin/python benchmarks/report.py [--rounds 3]

1. `reward-kit run` of 1,000 episodes with 10 steps and a function reward. Printed is the share of its CPU time,
   including its workers, spent on writing files, the summary and the report, with three resources: tools called by a
   model server that responds immediately; a scripted policy on FrozenLake (Gymnasium); and a scripted policy on
   `python_state`, which does almost nothing and so gives the largest share. The target is at most 5%.
2. The report of 10,000 episodes with 10 steps, scores and credit: the files of the last run repeated ten times. The
   target is less than 5 s.

Times are CPU time, minimum over the rounds. The first round also imports the report's modules, as the single run of a
process does; its share is printed separately.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
os.environ["REWARD_KIT_TRUST"] = "1"  # the benchmark's own task
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from instant_server import running_server  # noqa: E402
from rollouts import TOOLS  # noqa: E402

import reward_kit.report.run_page  # noqa: E402
import reward_kit.runs.runner  # noqa: E402
import reward_kit.runs.scoring_units  # noqa: E402
from reward_kit.cli.main import program  # noqa: E402
from reward_kit.report.run_page import write_report  # noqa: E402
from reward_kit.runs.run_folder import RunFolder  # noqa: E402
from reward_kit.runs.summary import EpisodeRow  # noqa: E402

SAMPLES, ROLLOUTS, STEPS = 250, 4, 10
REPEATS = 10
MAX_SHARE, MAX_S = 0.05, 5.0
REWARD = """
from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def even(messages: list[Message], sample: dict) -> EvaluateResult:
    return EvaluateResult(score=float(sample["number"] % 2), reason="1 for odd numbers")
"""
TASK = {
    "dataset_path": "rows.jsonl",
    "reward_function_path": "reward.py:even",
    "max_episode_steps": STEPS,
    "num_rollouts_per_sample": ROLLOUTS,
}
MOVES = ["left", "up"]  # from the first cell, where both are blocked
RESOURCES: dict[str, dict[str, Any]] = {
    "model server": {
        "name": "server",
        "tools_module_path": "tools.py",
        "on_text": "end",
        "initial_user_prompt": "How much is 2 + 2?",
    },
    "FrozenLake": {
        "name": "lake",
        "resource_type": "gymnasium",
        "base_resource_config": {"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}},
        "initial_user_prompt": "{{ observation }}",
        "policy": {
            "type": "scripted",
            "actions": [
                {"type": "tool_call", "name": "act", "arguments": {"action": MOVES[number % 2]}}
                for number in range(STEPS)
            ],
        },
    },
    "python_state": {
        "name": "dictionary",
        "resource_type": "python_state",
        "base_resource_config": {"initial_state": {"x": 0}},
        "initial_user_prompt": "Count from zero to nine, one number at a time, with the tool that sets a value.",
        "policy": {
            "type": "scripted",
            "actions": [
                {"type": "tool_call", "name": "set_value", "arguments": {"path": "x", "value": number}}
                for number in range(STEPS)
            ],
        },
    },
}


def write_task(folder: Path, resource_config: dict[str, Any]) -> None:
    """Write a task with one of the resources."""
    rows = "".join(json.dumps({"id": f"row-{number:04d}", "number": number}) + "\n" for number in range(SAMPLES))
    (folder / "rows.jsonl").write_text(rows)
    (folder / "reward.py").write_text(REWARD)
    (folder / "tools.py").write_text(TOOLS)
    (folder / "task.yaml").write_text(json.dumps(TASK | resource_config))


def total_cpu_s() -> float:
    """Return the CPU seconds of this process and its finished children."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


class CPUTimer:
    """Patches functions to accumulate the CPU time spent in them.

    Attributes:
        spent: seconds by label.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._patched: list[tuple[Any, str, Callable[..., Any]]] = []

    def patch(self, owner: Any, name: str, label: str) -> None:
        """Time a function of a class or module."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[label] += time.process_time() - began

        self._patched.append((owner, name, function))
        setattr(owner, name, timed)

    def restore(self) -> None:
        """Undo all patches."""
        for owner, name, function in self._patched:
            setattr(owner, name, function)


def time_run(folder: Path, options: list[str]) -> tuple[float, dict[str, float]]:
    """Run the task into `runs/`; return its CPU seconds, and those spent on results by label."""
    timer = CPUTimer()
    for name, label in (("append_episode", "episodes"), ("append_score", "scores"), ("write_summary", "summary")):
        timer.patch(RunFolder, name, label)
    timer.patch(RunFolder, "write_header", "header")
    timer.patch(reward_kit.runs.scoring_units, "score_record", "scores")
    timer.patch(EpisodeRow, "from_episode", "summary")
    timer.patch(reward_kit.runs.runner, "summarize", "summary")
    timer.patch(reward_kit.report.run_page, "write_page", "page")
    shutil.rmtree(folder / "runs", ignore_errors=True)
    began = total_cpu_s()
    try:
        task, runs = str(folder / "task.yaml"), str(folder / "runs")
        result = CliRunner().invoke(program, ["run", task, "--log-dir", runs, "--display", "none", *options])
    finally:
        timer.restore()
    assert result.exit_code == 0, result.output
    return total_cpu_s() - began, dict(timer.spent)


def repeat_run(run: Path, target: Path) -> None:
    """Write a run that repeats the episodes of another one under new sample ids."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("*.jsonl", "report*", "states"))
    for name in ("episodes.jsonl", "scores.jsonl", "credit.jsonl"):
        lines = (run / name).read_bytes()
        copies = (lines.replace(b"row-", b"row-%d" % number) for number in range(REPEATS))
        (target / name).write_bytes(b"".join(copies))
    header = json.loads((run / "run.json").read_text())
    (target / "run.json").write_text(json.dumps(header | {"total": header["total"] * REPEATS}))


def time_report(run: Path) -> tuple[float, int]:
    """Write the report of a run; return the CPU seconds and its size in bytes."""
    began = time.process_time()
    page = write_report(run)
    took_s = time.process_time() - began
    return took_s, page.stat().st_size + sum(file.stat().st_size for file in run.glob("report_data/*/*.js"))


def print_result(label: str, value: str, is_met: bool) -> None:
    print(f"{label}: {value} ({'met' if is_met else 'MISSED'})")


def benchmark_run(folder: Path, title: str, rounds: int) -> None:
    """Run with one resource and print the share of its results."""
    write_task(folder, RESOURCES[title])
    with ExitStack() as stack:
        options = []
        if title == "model server":
            url = stack.enter_context(running_server(STEPS, 0.0))
            options = ["--model", "openai/bench", "--base-url", url]
        runs = [time_run(folder, options) for _ in range(rounds)]
    total_s, spent = min(runs, key=lambda run: sum(run[1].values()) / run[0])
    share = sum(spent.values()) / total_s
    print(f"{SAMPLES * ROLLOUTS} episodes of {STEPS} steps, {title}: {total_s:.2f} s of CPU time")
    for label, seconds in spent.items():
        print(f"  {label:<9}{seconds:7.3f} s  {seconds / total_s:6.2%}")
    print_result("  results in total", f"{share:.2%} of the run, target at most {MAX_SHARE:.0%}", share <= MAX_SHARE)
    print(f"  first round, with imports: {sum(runs[0][1].values()) / runs[0][0]:.2%}")


def benchmark_large_report(folder: Path, rounds: int) -> None:
    """Credit the run in `runs/`, repeat it ten times, and print the time of the report."""
    (run,) = (folder / "runs").iterdir()
    result = CliRunner().invoke(program, ["credit", str(run)])
    assert result.exit_code == 0, result.output
    repeat_run(run, folder / "many")
    took_s, size = min(time_report(folder / "many") for _ in range(rounds))
    value = f"{took_s:.2f} s of CPU time, target below {MAX_S:g} s; {size / 1e6:.0f} MB"
    print_result(f"report of {SAMPLES * ROLLOUTS * REPEATS} episodes", value, took_s < MAX_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = max(1, parser.parse_args().rounds)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title in RESOURCES:
            benchmark_run(folder, title, rounds)
        benchmark_large_report(folder, rounds)


if __name__ == "__main__":
    main()
