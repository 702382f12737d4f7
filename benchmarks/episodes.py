"""What episodes cost beside RLlib's: construction, steps, storage, reading, chunks, pickles, memory, several agents.

    .venv/bin/python benchmarks/episodes.py [--rounds 5] [--turns 2] [--without-peer]

One script, `peers/episode_costs.py`, measures either package. The two run in turn, because this machine is shared, and
every figure is the best of all rounds and turns; compare the ratios, not the absolute times.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COSTS = ROOT / "benchmarks" / "peers" / "episode_costs.py"
RLLIB = ROOT / ".peers" / "rllib"
# torch comes first, so that RLlib takes this build and not one with gigabytes of CUDA.
PEER_PACKAGES = [["torch==2.13.0"], ["ray[rllib]==2.60.0", "gymnasium"]]
# A process that has freed large blocks before, as importing torch does, gets them without page faults from then on.
# Both sides keep their memory from the start, so that this is not what is measured.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "100000000", "MALLOC_TRIM_THRESHOLD_": "200000000"}
# What is to cost a tenth of RLlib's, or the reason why it cannot.
TENFOLD = (
    "construct",
    "construct and reset",
    "to_numpy dict, 10000",
    "to_numpy ragged dict, 1000",
    "episode[100:110] list",
    "episode[100:110] numpy",
    "episode[100:110] numpy dict",
    "pickle bytes mixed text numpy, 1000",
    "bytes a step: dict numpy, 10000",
    "bytes a step: mixed text numpy, 1000",
    "bytes a step: ragged dict numpy, 1000",
)
_COLLECTOR = "the bare lists of dicts alone cost the same or differ as much, by when the garbage collector runs"
REASONS = {
    "construct and reset": "at the edge: 10.0x to 11.0x in quiet runs",
    "to_numpy dict, 10000": "9x: every key, type and text is looked at once, and with an order of keys that is kept",
    "pickle dumps dict list, 10000": _COLLECTOR,
    "pickle loads dict list, 10000": _COLLECTOR,
    "bytes a step: dict numpy, 10000": "the text alone is 231; RLlib has 4 bytes a character",
    "get_state vec4, 10k": "ours is JSON and shares nothing; RLlib hands out its own lists and arrays",
}


def costs_of(python: str, package: str, rounds: int) -> dict[str, float]:
    """What the classes of one package cost, in a process of its own."""
    command = [python, str(COSTS), package, str(rounds)]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), **ALLOCATOR}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    costs: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return costs


def install_rllib() -> None:
    """Make RLlib's virtual environment (about 1.7 GB) where it is missing."""
    if (RLLIB / "bin" / "python").exists():
        return
    print(f"installing ray[rllib] in {RLLIB}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(RLLIB)], check=True)
    pip = [str(RLLIB / "bin" / "python"), "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt"]
    try:
        for packages in PEER_PACKAGES:
            subprocess.run([*pip, *packages], cwd=ROOT, check=True)
    except subprocess.CalledProcessError:
        shutil.rmtree(RLLIB)
        raise


def lowest(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The best of each figure."""
    return {name: min(costs[name] for costs in rounds) for name in rounds[0]}


def show(ours: dict[str, float], theirs: dict[str, float]) -> None:
    """The table; where ours costs more, with the reason."""
    print(f"{'µs, or as named':48}{'ours':>12}{'RLlib':>12}{'ratio':>9}")
    for name, cost in ours.items():
        line = f"{name:48}{cost:12.4g}"
        if name in theirs:
            ratio = theirs[name] / cost
            verdict = "  slower: " if ratio < 0.95 else "  under 10x: " if name in TENFOLD and ratio < 10 else ""
            reason = REASONS.get(name, "NO REASON KNOWN") if verdict else ""
            line += f"{theirs[name]:12.4g}{ratio:8.1f}x{verdict}{reason}"
        print(line)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--without-peer", action="store_true", help="only ours")
    options = parser.parse_args()
    if not options.without_peer:
        install_rllib()
    ours, theirs = [], []
    for _ in range(options.turns):
        ours.append(costs_of(sys.executable, "reward_kit.episodes", options.rounds))
        if not options.without_peer:
            rllib = str(RLLIB / "bin" / "python")
            theirs.append(costs_of(rllib, "ray.rllib.env", options.rounds))
    show(lowest(ours), lowest(theirs) if theirs else {})


if __name__ == "__main__":
    main()
