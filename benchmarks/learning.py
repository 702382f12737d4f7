"""Training results of GiGPO, GRPO and PPO on the household example, in paired runs from the same initial weights.

    .venv/bin/python benchmarks/learning.py [--out runs/learning] [--seeds 5] [--steps 120000] [--report]

Every arm is `examples/alfworld_household/train.yaml` with the overrides in `ARMS`. Arms with the same seed start from
the same weights and see the same problems in the same order. A run ends with the update that reaches `--steps`
commands, and the learning rate follows the share of the commands. Its last weights are then evaluated on held-out
problems, in rooms that no training problem uses: at temperatures 1 and 0.5 with two draws each, and greedily. They are
compared with the initial weights ("warm start") at several temperatures, and with each other by paired confidence
intervals over seeds.

The command is resumable: it skips finished runs and continues interrupted ones from their checkpoints. Results are
written to `results.jsonl` in `--out`. `--report` only prints the tables and writes the picture. `--tune` runs the
trials in `TRIALS` instead, evaluated on development problems only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from learning_report import PROBLEMS, report  # noqa: E402

from reward_kit.agent import RLRolloutWorker, Sample, make_policy  # noqa: E402
from reward_kit.rl.model_kit.models import load_model, save_model  # noqa: E402
from reward_kit.rl.training.logs import TrainingDisplay  # noqa: E402
from reward_kit.rl.training.pipelines import latest_state  # noqa: E402
from reward_kit.rl.training.plan import load_plan  # noqa: E402
from reward_kit.rl.training.resume import new_run_header  # noqa: E402
from reward_kit.rl.training.rollouts import Collector  # noqa: E402
from reward_kit.rl.training.session import run_training  # noqa: E402
from reward_kit.runs.run_folder import RunFolder  # noqa: E402
from reward_kit.runs.tasks import load_task  # noqa: E402

EXAMPLE = ROOT / "examples" / "alfworld_household"
CONCURRENCY = 128
DRAWS = {1.0: 2, 0.5: 2, 0.0: 1}
"""Temperature -> draws per problem."""

WARM_START_DRAWS = {**DRAWS, 0.7: 2, 0.35: 2, 0.25: 2}
"""Draws of the warm start, which show the effect of temperature alone."""

ARMS = {
    "gigpo": {},
    "grpo": {"credit": {"estimator": "grpo"}},
    "ppo": {
        "credit": {"estimator": "gae", "gamma": 0.95, "lam": 0.95, "step_rewards": "environment"},
        "policy.value_head": True,
        "ppo.value_lr": 3e-3,
    },
}
"""Overrides of the train file for each arm. PPO uses a critic and generalized advantage estimation."""

TRIALS = {
    "as-it-is": {},
    "faster": {"ppo.lr": 3e-4},
    "slower-gains": {"ppo.lr_by_name": {"*norm*": 1e-2}},
}
"""Overrides that were tried with every arm on development problems."""


def train(arm, changes, seed, folder, steps):
    """Train for `steps` commands, and return the CPU seconds."""
    overrides = {**ARMS[arm], **changes, "seed": seed, "updates": None, "max_env_steps": steps}
    plan = load_plan(EXAMPLE / "train.yaml", overrides)
    if not (folder / "run.json").exists():
        run_folder = RunFolder.create(folder, new_run_header(folder.name, plan), plan.redaction)
    else:
        run_folder = RunFolder(folder, plan.redaction)

    with run_folder, TrainingDisplay("none", plan.config) as display:
        outcome = asyncio.run(run_training(plan, run_folder, display, lambda *_: nullcontext()))
    return outcome.summary["cpu_s"]


def save_last_weights(folder):
    """Save the weights after the last update and return their folder."""
    weights = latest_state(folder / "checkpoints").state["learner"]["module"]
    loaded = load_model(EXAMPLE / "warm_start")
    policy = {name.removeprefix("policy."): one for name, one in weights.items() if not name.startswith("value_head.")}
    loaded.model.load_state_dict(policy, strict=False)
    assert {name for name, _ in loaded.model.named_parameters()} <= policy.keys()
    save_model(folder / "last", loaded.model, loaded.tokenizer)
    return folder / "last"


async def success(model, split, temperature, draw):
    """Return the success rate of a model on the problems of a split."""
    options = load_plan(EXAMPLE / "train.yaml").config.policy.options()
    options |= {"model": str(model), "temperature": temperature, "max_sessions": CONCURRENCY}
    policy = make_policy("hf", options, EXAMPLE)
    worker = RLRolloutWorker(load_task(EXAMPLE / "training.yaml").definition, policy)
    samples = [Sample(f"{split}-{n}", resource_config={"split": split, "index": n}) for n in range(PROBLEMS)]
    groups = await Collector(1, CONCURRENCY).collect(worker, [(sample, draw) for sample in samples])
    await policy.close()
    return sum(episode.get_return() for (episode,) in groups) / PROBLEMS


def evaluate(model, split="held_out", draws=None):
    """Return success rates by temperature, one per draw."""
    return {
        str(temperature): [asyncio.run(success(model, split, temperature, draw)) for draw in range(times)]
        for temperature, times in sorted((draws or DRAWS).items(), reverse=True)
    }


def curves(folder):
    """Return (commands so far, success rate) of training batches and of evaluations on development problems."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    batches, development, steps = [], [], 0
    for line in lines:
        if "score/mean" in line:
            batches.append([steps, line["score/mean"]])
        steps = int(line.get("progress/env_steps", 0))
        if "held_out/score" in line:
            development.append([steps, line["held_out/score"]])
    return {"batches": batches, "development": development, "steps": steps, "updates": lines[-1]["update"]}


def one_run(arm, seed, out, steps):
    """Train and evaluate one run, and write its result."""
    folder = out / f"{arm}-{seed}"
    cpu_s = train(arm, {}, seed, folder, steps)
    held_out = evaluate(save_last_weights(folder))
    result = {"arm": arm, "seed": seed, "asked_steps": steps, "cpu_s": cpu_s, "held_out": held_out, **curves(folder)}
    write(folder / "result.json", result)


def one_trial(arm, trial, out, steps):
    """Train with the overrides of a trial, and evaluate on development problems."""
    folder = out / f"{arm}-{trial}"
    train(arm, TRIALS[trial], 100, folder, steps)
    results = evaluate(save_last_weights(folder), "development", draws={1.0: 2})
    write(folder / "result.json", {"arm": arm, "trial": trial, "development_after": results["1.0"], **curves(folder)})


def write(path, result):
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")


def run_all(commands, concurrency):
    """Run commands concurrently, and print the name and exit code of each."""
    waiting, running = list(commands), {}
    while waiting or running:
        while waiting and len(running) < concurrency:
            name, command = waiting.pop(0)
            running[name] = subprocess.Popen(command)
        time.sleep(0.2)
        for name, process in list(running.items()):
            if process.poll() is not None:
                print(f"{time.strftime('%H:%M:%S')} {name}: exit code {process.returncode}", flush=True)
                del running[name]


def all_results(out):
    """Collect all results into `results.jsonl` and return them."""
    before = out / "before.json"
    if not before.exists():
        write(before, {"arm": "warm start", "held_out": evaluate(EXAMPLE / "warm_start", draws=WARM_START_DRAWS)})
    results = [json.loads(path.read_text(encoding="utf-8")) for path in [before, *sorted(out.glob("*/result.json"))]]
    (out / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in results), encoding="utf-8")
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120_000, help="commands per run")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--processes", type=int, default=2, help="concurrent runs, one thread each")
    parser.add_argument("--picture", type=Path, help="the SVG to write; default: curves.svg in --out")
    parser.add_argument("--tune", action="store_true", help="run the trials")
    parser.add_argument("--report", action="store_true", help="only print the tables and write the picture")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if options.one:
        arm, which = options.one
        run = one_trial if options.tune else one_run
        run(arm, which if options.tune else int(which), options.out, options.steps)
        return
    base = [sys.executable, __file__, "--out", str(options.out), "--steps", str(options.steps)]
    base += ["--tune"] if options.tune else []
    pairs = [(arm, str(which)) for which in (TRIALS if options.tune else range(options.seeds)) for arm in options.arms]
    left = [one for one in pairs if not (options.out / "-".join(one) / "result.json").exists()]
    if not options.report:
        run_all([("-".join(one), [*base, "--one", *one]) for one in left], options.processes)
    if not options.tune:
        report(all_results(options.out), options.picture or options.out / "curves.svg")


if __name__ == "__main__":
    main()
