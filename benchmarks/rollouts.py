"""Framework overhead: CPU time per step, memory per episode, startup time, and episodes/s compared with two peers.

    .venv/bin/python benchmarks/rollouts.py [--peers] [--rounds 3]

Episodes run over HTTP against a local server that responds immediately, with concurrency 32: with a single turn, and
with tool calls over five turns; those of reward-kit also in each model API. `--peers` installs inspect-ai and verifiers
in `.peers/` and runs them against the same server, alternately with reward-kit. Figures are the best of the rounds. On
a shared machine compare ratios, and CPU times rather than rates.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from instant_server import running_server  # noqa: E402

from reward_kit import RLRolloutWorker, TaskDefinitionModel  # noqa: E402
from reward_kit.agent import ScriptedPolicy  # noqa: E402

KINDS = (("tools", 200, "5-turn tool episodes"), ("single", 1000, "single-turn episodes"))
API_MODELS = {"chat": "openai/bench", "responses": "responses/bench", "messages": "anthropic/bench"}
PEERS = ROOT / ".peers"
PEER_PACKAGES = {
    "inspect-ai": ("inspect", ["inspect-ai==0.3.285", "openai==3.52.0"]),
    "verifiers": ("verifiers", ["verifiers==0.1.14"]),
}


def scripted_worker(steps: int, text: str = "") -> RLRolloutWorker:
    """Return a worker whose policy sets a value of `python_state` in every step."""
    task = TaskDefinitionModel(
        name="scripted",
        resource_type="python_state",
        base_resource_config={"initial_state": {"x": 0}},
        initial_user_prompt="Count.",
        max_episode_steps=steps,
    )
    call = {"type": "tool_call", "name": "set_value"}
    actions = [{**call, "arguments": {"path": "x", "value": number}} for number in range(steps)]
    if text:
        actions = [{"type": "tool_call", "name": "get_state", "arguments": {}}] * steps
        task = task.model_copy(update={"base_resource_config": {"initial_state": {"text": text}}})
    return RLRolloutWorker(task, ScriptedPolicy(actions))


def cpu_per_step(rounds: int, steps: int = 50, episodes: int = 40) -> float:
    """Return CPU microseconds per step, including setup and closing of the episode."""

    async def collect() -> None:
        worker = scripted_worker(steps)
        for seed in range(episodes):
            await worker.collect_episode(seed=seed)

    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        asyncio.run(collect())
        best = min(best, time.process_time() - began)
    return best / (episodes * steps) * 1e6


def episode_memory(steps: int) -> int:
    """Return the bytes held by a finished episode of `steps` steps with 1 kB observations."""

    async def collect() -> int:
        worker = scripted_worker(steps, text="x" * 1_000)
        await worker.collect_episode(seed=0)
        gc.collect()
        tracemalloc.start()
        episode = await worker.collect_episode(seed=1)
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(episode) == steps
        return size

    return asyncio.run(collect())


TOOLS = '''
from reward_kit import ToolRegistry

registry = ToolRegistry("adder")


@registry.tool
async def add(x: int, y: int) -> int:
    """Sum of two numbers.

    Args:
        x: one number.
        y: another number.
    """
    return x + y
'''
REWARD = """
from reward_kit import EvaluateResult, Message, reward_function


@reward_function
async def is_four(messages: list[Message]) -> EvaluateResult:
    return EvaluateResult(score=float(messages[-1].text == "4"), reason="compared")
"""


def ours(kind: str, count: int, url: str, model: str = "openai/bench") -> float:
    """Return episodes/s of `reward-kit run` from `run.json`, including scoring and writing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tools.py").write_text(TOOLS)
        (folder / "reward.py").write_text(REWARD)
        rows = "".join(json.dumps({"id": number, "question": "How much is 2 + 2?"}) + "\n" for number in range(count))
        (folder / "rows.jsonl").write_text(rows)
        tools = "tools_module_path: tools.py\n" if kind == "tools" else ""
        task = f"name: bench\ndataset_path: rows.jsonl\ninitial_user_prompt: '{{{{ question }}}}'\n{tools}"
        (folder / "task.yaml").write_text(task + "on_text: end\nreward_function_path: reward.py:is_four\n")
        command = [sys.executable, "-m", "reward_kit.cli.main", "run", "task.yaml", "--model", model]
        options = ["--base-url", url, "--max-concurrency", "32", "--display", "none", "--json"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "REWARD_KIT_TRUST": "1"}
        finished = subprocess.run(
            [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        document = json.loads(finished.stdout.splitlines()[-1])
        assert document["policies"][0]["score"]["mean"] == 1.0 and document["policies"][0]["scored"] == count
        header = json.loads((folder / document["run"] / "run.json").read_text())
        return count / float(header["timing"]["worked_s"])


def inspect_ai(kind: str, count: int, url: str) -> float:
    """Return episodes/s of inspect-ai, timed around its `eval`."""
    environment = {**os.environ, "BENCH_BASE_URL": url, "BENCH_API_KEY": "x"}
    with tempfile.TemporaryDirectory() as logs:
        script = str(ROOT / "benchmarks" / "peers" / "inspect_run.py")
        command = [str(PEERS / "inspect" / "bin" / "python"), script, kind, str(count), logs]
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["mean"] == 1.0
    return count / float(result["seconds"])


def verifiers(kind: str, count: int, url: str) -> float:
    """Return episodes/s of verifiers, from its output."""
    folder = ROOT / "benchmarks" / "peers" / "environments"
    environment = {**os.environ, "BENCH_API_KEY": "x", "PYTHONPATH": str(folder)}
    with tempfile.TemporaryDirectory() as out:
        target = ["-m", "bench", "-b", url, "-k", "BENCH_API_KEY", "--api-client-type", "openai_chat_completions"]
        load = ["-n", str(count), "-r", "1", "-c", "32", "-a", json.dumps({"n": count})]
        command = [str(PEERS / "verifiers" / "bin" / "vf-eval"), kind, *target, *load]
        finished = subprocess.run(
            [*command, "--disable-env-server", "-d", "-A", "-s", "-o", out],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
    seconds = float(re.findall(r"Evaluation completed in ([\d.]+) seconds", finished.stdout)[-1])
    assert re.search(r"reward: avg - 1\.0", finished.stdout), finished.stdout[-2000:]
    return count / seconds


def install_peers() -> None:
    """Create missing virtual environments of the peers."""
    for name, packages in PEER_PACKAGES.values():
        if not (PEERS / name / "bin" / "python").exists():
            print(f"installing {packages[0]} in {PEERS / name}", flush=True)
            subprocess.run([sys.executable, "-m", "venv", str(PEERS / name)], check=True)
            pip = [str(PEERS / name / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
            try:
                subprocess.run(pip, check=True)
            except subprocess.CalledProcessError:
                shutil.rmtree(PEERS / name)
                raise


def over_http(with_peers: bool, rounds: int) -> None:
    """Measure episodes over HTTP, alternating between reward-kit and the peers."""
    tools: dict[str, Callable[[str, int, str], float]] = {"reward-kit": ours}
    if with_peers:
        install_peers()
        tools |= {"inspect-ai": inspect_ai, "verifiers": verifiers}
    with running_server() as url:
        for kind, count, title in KINDS:
            best = dict.fromkeys(tools, 0.0)
            for _ in range(rounds):
                for name, measure in tools.items():
                    best[name] = max(best[name], measure(kind, count, url))
            report_rates(title, count, best)


def report_rates(title: str, count: int, best: dict[str, float]) -> None:
    """Print a row per tool, with the ratio to the faster peer."""
    print(f"\n{title} over HTTP ({count}, concurrency 32), episodes/s")
    peers = [rate for name, rate in best.items() if name != "reward-kit"]
    for name, rate in best.items():
        ratio = f"   ratio to the faster peer {rate / max(peers):.1f}" if peers and name == "reward-kit" else ""
        print(f"  {name:<12}{rate:8.1f}{ratio}")


def over_apis(rounds: int) -> None:
    """Compare the model APIs, which alternate. CPU time includes that of startup."""
    with running_server() as url:
        for kind, count, title in KINDS:
            costs, rates = dict.fromkeys(API_MODELS, float("inf")), dict.fromkeys(API_MODELS, 0.0)
            for _ in range(rounds):
                for api, model in API_MODELS.items():
                    before = _children_cpu_s()
                    rates[api] = max(rates[api], ours(kind, count, url, model))
                    costs[api] = min(costs[api], (_children_cpu_s() - before) / count * 1000)
            print(
                f"\n{title} in each API ({count}, concurrency 32), CPU ms/episode and episodes/s, with ratios to chat"
            )
            for api, cost in costs.items():
                ratios = f"{cost / costs['chat']:.2f}", f"{rates[api] / rates['chat']:.2f}"
                print(f"  {api:<12}{cost:8.2f} ({ratios[0]}) {rates[api]:8.1f} ({ratios[1]})")


def start_up(rounds: int) -> None:
    """Print the startup times of imports and of `--help`."""
    print("\nstartup, CPU seconds (best of rounds)")
    for statement in (
        "pass",
        "import reward_kit",
        "from reward_kit import reward_function, RLRolloutWorker",
    ):
        print(f"  python -c {statement!r:<62}{child_cpu([sys.executable, '-c', statement], rounds):.3f}")
    help_command = [sys.executable, "-m", "reward_kit.cli.main", "--help"]
    print(f"  {'reward-kit --help':<72}{child_cpu(help_command, rounds):.3f}")


def child_cpu(command: list[str], rounds: int) -> float:
    """Return the minimum CPU seconds, user and system, of a command."""
    best = float("inf")
    for _ in range(max(rounds, 3)):
        before = _children_cpu_s()
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        best = min(best, _children_cpu_s() - before)
    return best


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="also install and measure inspect-ai and verifiers")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"CPU time per step, scripted policy and python_state: {cpu_per_step(options.rounds):.1f} µs")
    sizes = {steps: episode_memory(steps) for steps in (100, 200, 400)}
    shown = ", ".join(f"{steps} steps {size / 1e3:.0f} kB" for steps, size in sizes.items())
    print(f"memory per episode with 1 kB observations: {shown}")
    start_up(options.rounds)
    over_apis(options.rounds)
    over_http(options.peers, options.rounds)


if __name__ == "__main__":
    main()
