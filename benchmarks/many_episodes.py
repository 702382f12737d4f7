"""Wall-clock time and memory of `reward-kit run` with 1,000 concurrent episodes against a server that takes 2 s.

    .venv/bin/python benchmarks/many_episodes.py [--concurrency 1000] [--waves 4] [--turns 3] [--delay 2]

The run collects `concurrency` x `waves` tool episodes of `turns` turns, `concurrency` at a time, and writes and scores
them. Its time is compared with the ideal, waves x turns x delay; the target is a ratio of at most 1.3. Memory is the
resident set size of the run, sampled whenever another quarter of a wave has been written; it should not grow after the
first wave.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from instant_server import running_server  # noqa: E402
from rollouts import REWARD, TOOLS  # noqa: E402

TARGET = 1.3


def allow_connections(count: int) -> None:
    """Raise the limit on open files, which the server and the run inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * count + 200
    if needed > hard != resource.RLIM_INFINITY:
        sys.exit(f"{count} connections need {needed} open files, but `ulimit -Hn` is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))


def write_task(folder: Path, episodes: int) -> None:
    """Write a task with one tool and one sample per episode."""
    (folder / "tools.py").write_text(TOOLS)
    (folder / "reward.py").write_text(REWARD)
    rows = "".join(json.dumps({"id": number, "question": "How much is 2 + 2?"}) + "\n" for number in range(episodes))
    (folder / "rows.jsonl").write_text(rows)
    task = "name: many\ndataset_path: rows.jsonl\ninitial_user_prompt: '{{ question }}'\ntools_module_path: tools.py\n"
    (folder / "task.yaml").write_text(task + "on_text: end\nreward_function_path: reward.py:is_four\n")


def watch(run: subprocess.Popen[str], folder: Path, step: int) -> dict[int, float]:
    """Return the memory of the run in MB by the number of episodes written."""
    sizes: dict[int, float] = {}
    while run.poll() is None:
        time.sleep(0.1)
        files = list(folder.glob("runs/*/episodes.jsonl"))
        written = files[0].read_bytes().count(b"\n") if files else 0
        if written // step * step not in sizes and written >= step:
            sizes[written // step * step] = resident_mb(run.pid)
    return sizes


def resident_mb(pid: int) -> float:
    """Return the resident set size of a process in MB; 0 if it has exited."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, IndexError):
        return 0.0


def benchmark(concurrency: int, waves: int, turns: int, delay_s: float) -> None:
    """Run, sample memory and print the figures."""
    episodes, ideal_s = concurrency * waves, waves * turns * delay_s
    with tempfile.TemporaryDirectory() as name, running_server(turns, delay_s) as url:
        folder = Path(name)
        write_task(folder, episodes)
        command = [sys.executable, "-m", "reward_kit.cli.main", "run", "task.yaml", "--model", "openai/bench"]
        options = ["--base-url", url, "--max-concurrency", str(concurrency), "--display", "none", "--json"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "REWARD_KIT_TRUST": "1"}
        with subprocess.Popen(
            [*command, *options], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        ) as run:
            sizes = watch(run, folder, max(concurrency // 4, 1))
            assert run.stdout is not None
            document = json.loads(run.stdout.read().splitlines()[-1])
        policy = document["policies"][0]
        assert policy["scored"] == episodes and policy["score"]["mean"] == 1.0, policy
        took_s = float(json.loads((folder / document["run"] / "run.json").read_text())["timing"]["worked_s"])
    verdict = "met" if took_s <= TARGET * ideal_s else "MISSED"
    print(f"{episodes} episodes of {turns} turns, concurrency {concurrency}, {delay_s:g} s per response")
    print(f"  {took_s:.2f} s, ideal {ideal_s:g} s, ratio {took_s / ideal_s:.3f} (target {TARGET}: {verdict})")
    print("  resident MB by episodes written: " + ", ".join(f"{n}: {size:.0f}" for n, size in sizes.items() if size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=1_000)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--delay", type=float, default=2.0)
    options = parser.parse_args()
    allow_connections(options.concurrency)
    benchmark(options.concurrency, options.waves, options.turns, options.delay)


if __name__ == "__main__":
    main()
