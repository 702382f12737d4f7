"""What it costs to write a run down, to sum it up and to make its page; and how long the page of a large run takes.

    .venv/bin/python benchmarks/report.py [--rounds 3]

1. 1,000 episodes of 10 steps with `reward-kit run`, by a script and scored by a function. Of the processor time of the
   run, its workers included, how much goes into its files, its summary and its page? The script is once a server's,
   which answers each request at once with a call of a tool, as a model would; once the policy's, on a frozen lake
   (Gymnasium); and once the policy's on a dictionary, which does next to nothing: no run has a larger share.
2. The page of 10,000 episodes of 10 steps, with scores and credit: the lines of the last run ten times over.

Times are of the processor, the least of the rounds, since this machine is shared. The first round also loads what the
page is made with; its share is told besides, since the one run of a process has that too.
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
os.environ["REWARD_KIT_TRUST"] = "1"  # the task is this benchmark's own
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from instant_server import running_server  # noqa: E402
from rollouts import TOOLS  # noqa: E402

import reward_kit.runs.runner  # noqa: E402
from reward_kit.cli.main import program  # noqa: E402
from reward_kit.report.run_page import write_report  # noqa: E402
from reward_kit.runs.run_folder import RunFolder  # noqa: E402
from reward_kit.runs.summary import EpisodeRow  # noqa: E402

SAMPLES, ROLLOUTS, STEPS = 250, 4, 10
TIMES_OVER = 10
MOST_SHARE, MOST_S = 0.05, 5.0
REWARD = """
from reward_kit import EvaluateResult, Message, reward_function


@reward_function
def even(messages: list[Message], sample: dict) -> EvaluateResult:
    return EvaluateResult(score=float(sample["number"] % 2), reason="whether the number is odd")
"""
TASK = {
    "dataset_path": "rows.jsonl",
    "reward_function_path": "reward.py:even",
    "max_episode_steps": STEPS,
    "num_rollouts_per_sample": ROLLOUTS,
}
WALKS = ["left", "up"]  # from the first cell of a lake, where both lead nowhere
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "a server": {
        "name": "server",
        "tools_module_path": "tools.py",
        "on_text": "end",
        "initial_user_prompt": "How much is 2 + 2?",
    },
    "a frozen lake": {
        "name": "lake",
        "resource_type": "gymnasium",
        "base_resource_config": {"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}},
        "initial_user_prompt": "{{ observation }}",
        "policy": {
            "type": "scripted",
            "actions": [
                {"type": "tool_call", "name": "act", "arguments": {"action": WALKS[number % 2]}}
                for number in range(STEPS)
            ],
        },
    },
    "a dictionary": {
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


def write_task(folder: Path, environment: dict[str, Any]) -> None:
    """A task on this environment."""
    rows = "".join(json.dumps({"id": f"row-{number:04d}", "number": number}) + "\n" for number in range(SAMPLES))
    (folder / "rows.jsonl").write_text(rows)
    (folder / "reward.py").write_text(REWARD)
    (folder / "tools.py").write_text(TOOLS)
    (folder / "task.yaml").write_text(json.dumps(TASK | environment))


def processor_s() -> float:
    """Of this process and of those that it waited for."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


class Watch:
    """Adds up the processor time within functions.

    Attributes:
        spent: seconds, by what they went into.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._replaced: list[tuple[Any, str, Callable[..., Any]]] = []

    def over(self, owner: Any, name: str, label: str) -> None:
        """Watch one function of a class or a module."""
        function = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return function(*given, **named)
            finally:
                self.spent[label] += time.process_time() - began

        self._replaced.append((owner, name, function))
        setattr(owner, name, timed)

    def end(self) -> None:
        """Put back what was there."""
        for owner, name, function in self._replaced:
            setattr(owner, name, function)


def share_of_a_run(folder: Path, options: list[str]) -> tuple[float, dict[str, float]]:
    """The processor time of a run in seconds, and what of it went into its results; the run stays in `runs/`."""
    watch = Watch()
    for name, label in (("append_episode", "episodes"), ("append_score", "scores"), ("write_summary", "summary")):
        watch.over(RunFolder, name, label)
    watch.over(RunFolder, "write_header", "header")
    watch.over(reward_kit.runs.runner, "score_record", "scores")
    watch.over(EpisodeRow, "of_episode", "summary")
    watch.over(reward_kit.runs.runner, "summarize", "summary")
    watch.over(reward_kit.runs.runner, "write_page", "page")
    shutil.rmtree(folder / "runs", ignore_errors=True)
    began = processor_s()
    try:
        task, runs = str(folder / "task.yaml"), str(folder / "runs")
        result = CliRunner().invoke(program, ["run", task, "--log-dir", runs, "--display", "none", *options])
    finally:
        watch.end()
    assert result.exit_code == 0, result.output
    return processor_s() - began, dict(watch.spent)


def many_times(run: Path, target: Path) -> None:
    """A run whose files hold those of another one several times, under other names."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("*.jsonl", "report*", "states"))
    for name in ("episodes.jsonl", "scores.jsonl", "credit.jsonl"):
        lines = (run / name).read_bytes()
        copies = (lines.replace(b"row-", b"row-%d" % number) for number in range(TIMES_OVER))
        (target / name).write_bytes(b"".join(copies))
    header = json.loads((run / "run.json").read_text())
    (target / "run.json").write_text(json.dumps(header | {"total": header["total"] * TIMES_OVER}))


def time_of_a_page(run: Path) -> tuple[float, int]:
    """Processor seconds of writing the page of a run, and the bytes beside it."""
    began = time.process_time()
    page = write_report(run)
    took_s = time.process_time() - began
    return took_s, page.stat().st_size + sum(file.stat().st_size for file in run.glob("report_data/*/*.js"))


def tell(what: str, value: str, is_met: bool) -> None:
    print(f"{what}: {value} ({'met' if is_met else 'MISSED'})")


def tell_of_runs(folder: Path, title: str, rounds: int) -> None:
    """Run on one environment, and say what its results took."""
    write_task(folder, ENVIRONMENTS[title])
    with ExitStack() as opened:
        options = []
        if title == "a server":
            url = opened.enter_context(running_server(STEPS, 0.0))
            options = ["--model", "openai/bench", "--base-url", url]
        runs = [share_of_a_run(folder, options) for _ in range(rounds)]
    whole_s, spent = min(runs, key=lambda run: sum(run[1].values()) / run[0])
    share = sum(spent.values()) / whole_s
    print(f"{SAMPLES * ROLLOUTS} scripted episodes of {STEPS} steps on {title}: {whole_s:.2f} s of processor time")
    for label, seconds in spent.items():
        print(f"  {label:<9}{seconds:7.3f} s  {seconds / whole_s:6.2%}")
    tell("  writing and summarising", f"{share:.2%} of the run, at most {MOST_SHARE:.0%}", share <= MOST_SHARE)
    print(f"  in the first round {sum(runs[0][1].values()) / runs[0][0]:.2%}")


def tell_of_a_large_page(folder: Path, rounds: int) -> None:
    """Credit the run in `runs/`, make ten of it, and say what their page took."""
    (run,) = (folder / "runs").iterdir()
    result = CliRunner().invoke(program, ["credit", str(run)])
    assert result.exit_code == 0, result.output
    many_times(run, folder / "many")
    took_s, size = min(time_of_a_page(folder / "many") for _ in range(rounds))
    told = f"{took_s:.2f} s, at most {MOST_S:g} s; {size / 1e6:.0f} MB"
    tell(f"the page of {SAMPLES * ROLLOUTS * TIMES_OVER} episodes", told, took_s < MOST_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = max(1, parser.parse_args().rounds)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title in ENVIRONMENTS:
            tell_of_runs(folder, title, rounds)
        tell_of_a_large_page(folder, rounds)


if __name__ == "__main__":
    main()
