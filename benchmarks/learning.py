"""The household campaign: what a small language model learns by GiGPO, GRPO and PPO, in paired runs from one start.

    .venv/bin/python benchmarks/learning.py [--out runs/learning] [--seeds 5] [--steps 120000] [--report]

Every arm is `examples/alfworld_household/train.yaml` with what `ARMS` changes. Arms of one seed begin with the same
weights and meet the same problems in the same order; a run is over with the update in which it has had `--steps`
commands. Then its last weights play held-out problems, in rooms of which no training problem has any: sampled as they
learned and colder, in two draws each, and greedily.

A run that is finished is not made again, and one that was cut goes on from its checkpoint, so the command can be given
again at any time. Results are lines of `results.jsonl` in `--out`; `--report` prints the table from them and writes the
picture, and makes no run. `--tune` makes the trials in `TRIALS` instead, which look at development problems alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import time
from contextlib import asynccontextmanager
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
AT_ONCE = 128
DRAWS = {1.0: 2, 0.5: 2, 0.0: 1}
"""Temperature -> how often the problems are played at it."""

COLDER = {**DRAWS, 0.7: 2, 0.35: 2, 0.25: 2}
"""The same of the warm start: what a lower temperature gives for nothing."""

ARMS = {
    "gigpo": {},
    "grpo": {"credit": {"estimator": "grpo"}},
    "ppo": {
        "credit": {"estimator": "gae", "gamma": 0.95, "lam": 0.95, "step_rewards": "environment"},
        "policy.value_head": True,
        "ppo.value_lr": 3e-3,
    },
}
"""What an arm lays over the train file. PPO is the one with a critic and generalised advantages."""

TRIALS = {
    "as-it-is": {},
    "faster": {"ppo.lr": 3e-4},
    "slower-gains": {"ppo.lr_by_name": {"*norm*": 1e-2}},
}
"""What was tried with every arm on development problems."""


def train(arm, changes, seed, folder, steps):
    """Train until there were so many commands; the seconds of processor time, or None where a part was made before."""
    given = {**ARMS[arm], **changes, "seed": seed}
    plan = load_plan(EXAMPLE / "train.yaml", given)
    is_new = not (folder / "run.json").exists()
    if is_new:
        opened = RunFolder.create(folder, new_run_header(folder.name, plan), plan.redaction)
    else:
        opened = RunFolder(folder, plan.redaction)

    @asynccontextmanager
    async def stops(control, display):
        told = display.updated

        def updated(update, figures, progress):
            told(update, figures, progress)
            if figures.get("progress/env_steps", 0.0) >= steps:
                control.finish(f"{steps} commands")

        display.updated = updated
        yield

    began = time.process_time()
    with opened, TrainingDisplay("none", plan.config.updates) as display:
        asyncio.run(run_training(plan, opened, display, stops))
    return time.process_time() - began if is_new else None


def last_weights(folder):
    """The weights after the last update, in a folder of their own."""
    weights = latest_state(folder / "checkpoints").state["learner"]["module"]
    loaded = load_model(EXAMPLE / "warm_start")
    own = {name.removeprefix("policy."): one for name, one in weights.items() if not name.startswith("value_head.")}
    loaded.model.load_state_dict(own, strict=False)
    assert {name for name, _ in loaded.model.named_parameters()} <= own.keys()
    save_model(folder / "last", loaded.model, loaded.tokenizer)
    return folder / "last"


async def success(model, split, temperature, draw):
    """The share of a split's problems that a model solves."""
    options = load_plan(EXAMPLE / "train.yaml").config.policy.options()
    options |= {"model": str(model), "temperature": temperature, "max_sessions": AT_ONCE}
    policy = make_policy("hf", options, EXAMPLE)
    worker = RLRolloutWorker(load_task(EXAMPLE / "training.yaml").definition, policy)
    samples = [Sample(f"{split}-{n}", {"resource_config": {"split": split, "index": n}}) for n in range(PROBLEMS)]
    groups = await Collector(1, AT_ONCE).collect(worker, [(sample, draw) for sample in samples])
    await policy.close()
    return sum(episode.get_return() for (episode,) in groups) / PROBLEMS


def measured(model, split="held_out", draws=None):
    """Success by temperature, a figure for each draw."""
    return {
        str(temperature): [asyncio.run(success(model, split, temperature, draw)) for draw in range(times)]
        for temperature, times in sorted((draws or DRAWS).items(), reverse=True)
    }


def curves(folder):
    """By update: commands before it and success of its batch; and commands and success on development problems."""
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
    """Train, measure and write the line."""
    folder = out / f"{arm}-{seed}"
    cpu_s = train(arm, {}, seed, folder, steps)
    held_out = measured(last_weights(folder))
    result = {"arm": arm, "seed": seed, "asked_steps": steps, "cpu_s": cpu_s, "held_out": held_out, **curves(folder)}
    write(folder / "result.json", result)


def one_trial(arm, trial, out, steps):
    """Train with what the trial changes, and look at development problems."""
    folder = out / f"{arm}-{trial}"
    train(arm, TRIALS[trial], 100, folder, steps)
    seen = measured(last_weights(folder), "development", draws={1.0: 2})
    write(folder / "result.json", {"arm": arm, "trial": trial, "development_after": seen["1.0"], **curves(folder)})


def write(path, result):
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")


def run_all(commands, at_once):
    """Carry out commands, so many at a time; their names are told as they end."""
    waiting, running = list(commands), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            name, command = waiting.pop(0)
            running[name] = subprocess.Popen(command)
        time.sleep(0.2)
        for name, process in list(running.items()):
            if process.poll() is not None:
                print(f"{time.strftime('%H:%M:%S')} {name}: exit code {process.returncode}", flush=True)
                del running[name]


def all_results(out):
    """The results that are there, collected into `results.jsonl`."""
    before = out / "before.json"
    if not before.exists():
        write(before, {"arm": "warm start", "held_out": measured(EXAMPLE / "warm_start", draws=COLDER)})
    found = [json.loads(path.read_text(encoding="utf-8")) for path in [before, *sorted(out.glob("*/result.json"))]]
    (out / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found), encoding="utf-8")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120_000, help="environment steps of a run")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--picture", type=Path, help="where --report draws; default: curves.svg in --out")
    parser.add_argument("--tune", action="store_true", help="make the trials")
    parser.add_argument("--report", action="store_true", help="make no run")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asked.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if asked.one:
        arm, which = asked.one
        run = one_trial if asked.tune else one_run
        run(arm, which if asked.tune else int(which), asked.out, asked.steps)
        return
    whole = [sys.executable, __file__, "--out", str(asked.out), "--steps", str(asked.steps)]
    whole += ["--tune"] if asked.tune else []
    pairs = [(arm, str(which)) for which in (TRIALS if asked.tune else range(asked.seeds)) for arm in asked.arms]
    left = [one for one in pairs if not (asked.out / "-".join(one) / "result.json").exists()]
    if not asked.report:
        run_all([("-".join(one), [*whole, "--one", *one]) for one in left], asked.processes)
    if not asked.tune:
        report(all_results(asked.out), asked.picture or asked.out / "curves.svg")


if __name__ == "__main__":
    main()
