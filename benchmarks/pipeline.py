"""What the pipelines gain where rewards take their time: an experiment with GSM8K and slow rewards, in miniature.

The published experiment (verl pull request 2854; `docs/concepts/overlap.md`) trained on GSM8K: a step had 1,024
questions of 5 answers, mini-batches of 256, and rewards that slept 1 to 40 s on 256 threads. Here a decoder of 0.2M
parameters answers generated questions in GSM8K's format: a step has 32 questions of 5 answers, mini-batches of 8, and
rewards that sleep on 8 slots, so that a slot has 20 calls a step as there. The sleeps are 1 to 40 units long, and a
unit is what makes the machine's own work of a step as long, in units, as theirs was in seconds: 156.

    python benchmarks/pipeline.py [--steps N] [--seed N] [--json FILE]

Printed: the time of each arm and its cut, what the simulator says of it, how near it comes to the best that is possible
with the same sleeps and the stage times of that arm (`lower_bound`; rollouts beside updates), and the accuracy on
held-out questions, last and best. The best possible cut is for stage times where nothing else goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from reward_kit.agent import AgentPolicy, HFAgentPolicy, PolicyOutput, RLRolloutWorker, Sample, derive_seed
from reward_kit.models import TaskDefinitionModel
from reward_kit.reward_agent import AsyncRewardAgent
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.model_kit.models import build_decoder, build_tokenizer, parameter_count
from reward_kit.rl.model_kit.sft import Demonstrations, SFTConfig, fit
from reward_kit.rl.overlap import PipelineSettings, Schedule, lower_bound, simulate_overlap
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.trainer import Trainer
from reward_kit.rl.training.pipelines import Pipeline, PipelineOptions
from reward_kit.rl.training.rollouts import Collector, HeldOutEvaluation, SampleStream
from reward_kit.rl_processing import CreditAssigner
from reward_kit.tokens import build_rows
from reward_kit.typed_interface import reward_function, reward_spec

QUESTIONS, ANSWERS, MINIBATCH, SLOTS = 32, 5, 8, 8
THEIR_WORK_S = 64 + 30 + 4 * 15.4  # rollout, log-probabilities and four updates: docs/concepts/overlap.md
THEIR_DELAYS = (1.0, 40.0)
NAMES, THINGS = ["Ann", "Ben", "Cleo", "Dan"], ["apples", "coins", "books", "shells"]
LARGEST = 5
TASK = TaskDefinitionModel(
    name="word-problems", messages=[{"role": "user", "content": "{{ question }}"}], max_episode_steps=1
)


def problems(count: int, seed: int) -> list[Sample]:
    """Questions and answers as GSM8K writes them: the steps, then #### and the number."""
    draw = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        first, more = (int(value) for value in draw.integers(0, LARGEST + 1, 2))
        less = int(draw.integers(0, first + more + 1))
        name, thing = NAMES[draw.integers(4)], THINGS[draw.integers(4)]
        question = f"{name} has {first} {thing}, finds {more} more and loses {less}. How many {thing} are left?"
        left = first + more - less
        answer = f"{first} + {more} = {first + more}\n{first + more} - {less} = {left}\n#### {left}"
        samples.append(Sample(f"{seed}-{number}", {"question": question, "answer": answer}, str(left)))
    return samples


class Teacher(AgentPolicy):
    """Answers as the sample says."""

    def __init__(self, answers: dict[str, str]) -> None:
        self._answers = answers

    async def get_action(self, observation, available_tools_specs=None) -> PolicyOutput:
        return PolicyOutput({"type": "text", "content": self._answers[observation[-1].text]})


def delays_of(rollout_ids: Sequence[str], unit_s: float, seed: int) -> np.ndarray:
    """Seconds that each reward sleeps: the same for the same answer of every arm."""
    low, high = THEIR_DELAYS
    shares = [derive_seed("delay", seed, rollout_id) / 2**63 for rollout_id in rollout_ids]
    return unit_s * (low + (high - low) * np.array(shares))


def slow_reward(unit_s: float, seed: int):
    @reward_function
    async def right(messages, ground_truth: str, rollout_id: str):
        if unit_s:
            await asyncio.sleep(float(delays_of([rollout_id], unit_s, seed)[0]))
        return {"score": float(messages[-1].text.rpartition("####")[2].strip() == ground_truth)}

    return reward_spec(right)


async def warm_start(seed: int, demonstrations: int):
    """A decoder that has seen some questions answered, and its tokenizer."""
    shown = problems(demonstrations, seed + 1)
    texts = [text for one in shown for text in (one.row["question"], one.row["answer"])]
    tokenizer = build_tokenizer(texts, words=[str(number) for number in range(2 * LARGEST + 1)], context=128)
    model = build_decoder(tokenizer, layers=2, width=96, heads=4, context=128, seed=seed)
    worker = RLRolloutWorker(TASK, Teacher({one.row["question"]: one.row["answer"] for one in shown}))
    groups = await Collector(1, 64).collect(worker, [(one, seed) for one in shown])
    rows = build_rows(Demonstrations(tokenizer)([group[0] for group in groups]), pad_token_id=tokenizer.pad_token_id)
    fit(model, rows, SFTConfig(epochs=2, lr=3e-3, max_tokens_per_batch=1024, seed=seed))
    return model, tokenizer


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        label: as the table shows it.
        schedule: the pipeline.
        loss: of the learner.
    """

    label: str
    schedule: Schedule
    loss: str = "ppo"

    def config(self) -> PPOConfig:
        parts = 1 if self.schedule.updates_early else QUESTIONS // MINIBATCH
        return PPOConfig(loss=self.loss, lr=2e-4, clip_high=0.28, max_grad_norm=0.5, minibatches=parts)


ARMS = [
    Arm("off", Schedule.SYNC),
    Arm("minibatch", Schedule.MINIBATCH),
    Arm("one_step_off", Schedule.ONE_STEP_OFF),
    Arm("both", Schedule.BOTH),
    Arm("both, decoupled loss", Schedule.BOTH, "decoupled"),
]


class Keeps(Trainer):
    """Keeps the ids of its rollouts, batch by batch, and the weights of every third version."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.weights = {}

    async def publish(self) -> None:
        await super().publish()
        if self.version % 3 == 0:
            self.weights[self.version] = copy.deepcopy(self.policy.module.state_dict())


@dataclass
class Measured:
    """What an arm came to.

    Attributes:
        seconds: of all its steps.
        stages_s: means of a step's stages.
        hidden: the share of the scoring that was used for something else.
        accuracies: on held-out questions, by version.
        lag: of its tokens in versions, the greatest.
    """

    seconds: float
    stages_s: dict[str, float]
    hidden: float
    accuracies: dict[int, float]
    lag: float


async def train(arm: Arm, model, tokenizer, steps: int, unit_s: float, seed: int, *, evaluate: bool = True) -> Measured:
    policy = HFAgentPolicy(copy.deepcopy(model), tokenizer, max_new_tokens=24, max_sessions=QUESTIONS * ANSWERS)
    learner = PPOLearner(policy.module, arm.config(), seed=seed)
    options = PipelineOptions(
        schedule=arm.schedule, samples_per_update=QUESTIONS, samples_per_minibatch=MINIBATCH, dynamic_sampling=None
    )
    worker = RLRolloutWorker(TASK, policy)
    lines = []
    async with AsyncRewardAgent(slow_reward(unit_s, seed), max_concurrency=SLOTS) as agent:
        trainer = Keeps(worker, agent, CreditAssigner("grpo"), learner, group_size=ANSWERS, run_seed=seed)
        async with Pipeline(trainer, SampleStream(problems(4096, seed + 2), seed), options) as pipeline:
            began = time.perf_counter()
            for step in range(steps):
                lines.append(await pipeline.step(more=step + 1 < steps) | trainer.meter.take())
            seconds = time.perf_counter() - began
    trainer.weights[steps] = copy.deepcopy(policy.module.state_dict())
    accuracies = await accuracy_of(policy, trainer.weights, seed) if evaluate else {}
    await policy.close()
    stages = {name: float(np.mean([line[f"time/{name}_s"] for line in lines])) for name in ("update", "publish")}
    # Rollouts of a batch are collected in the step before it, where the pipeline rolls ahead.
    stages["collect"] = sum(line.get("time/collect_s", 0.0) for line in lines) / steps
    hidden = float(np.mean([line["overlap/hidden_share"] for line in lines]))
    return Measured(seconds, stages, hidden, accuracies, max(line["lag_max"] for line in lines))


async def accuracy_of(policy: HFAgentPolicy, weights: dict, seed: int) -> dict[int, float]:
    """The share of held-out questions that are answered rightly, by version."""
    held_out = problems(256, seed + 3)
    found = {}
    async with AsyncRewardAgent(slow_reward(0.0, seed), max_concurrency=64) as agent:
        evaluation = HeldOutEvaluation(RLRolloutWorker(TASK, policy), agent, held_out, 1, seed, Collector(1))
        for version, state in weights.items():
            await policy.publish(version, state)
            found[version] = (await evaluation.measure())["held_out/score"]
    return found


def settings_of(found: Measured, steps: int) -> PipelineSettings:
    """What the simulator is told."""
    return PipelineSettings(
        rollout_s=found.stages_s["collect"],
        update_s=found.stages_s["update"] * MINIBATCH / QUESTIONS,
        publish_s=found.stages_s["publish"],
        batch_size=QUESTIONS,
        group_size=ANSWERS,
        minibatch_size=MINIBATCH,
        max_concurrency=SLOTS,
        steps=steps,
        separate_rollouts=True,
    )


def sleeps(steps: int, unit_s: float, seed: int) -> np.ndarray:
    """(S,C) seconds of each call of each step, in the order of the calls."""
    stream = SampleStream(problems(4096, seed + 2), seed)

    class Ids(Trainer):
        def __init__(self) -> None:
            self.collected, self.run_seed = 0, seed

    asked = Ids().requests(stream.take(steps * QUESTIONS))
    label = HFAgentPolicy.__name__
    task, starts = RLRolloutWorker(TASK, Teacher({}), policy_label=label), []
    for sample, group_seed in asked:
        group = task.group(sample, group_seed)
        starts += [group.identity(place).rollout_id for place in range(ANSWERS)]
    return delays_of(starts, unit_s, seed).reshape(steps, QUESTIONS * ANSWERS)


@asynccontextmanager
async def quiet():
    """Off-policy alarms are for logs, and the table says what it is about."""
    logging.getLogger("reward_kit").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


async def benchmark(steps: int, seed: int, demonstrations: int) -> dict:
    model, tokenizer = await warm_start(seed, demonstrations)
    policy = HFAgentPolicy(copy.deepcopy(model), tokenizer, max_new_tokens=24, max_sessions=256)
    before = (await accuracy_of(policy, {0: model.state_dict()}, seed))[0]
    await policy.close()
    # Once without sleeps: how long the machine's own work takes. The first steps warm up.
    await train(ARMS[0], model, tokenizer, 2, 0.0, seed, evaluate=False)
    alone = await train(ARMS[0], model, tokenizer, 4, 0.0, seed, evaluate=False)
    work_s = sum(alone.stages_s.values())
    unit_s = work_s / THEIR_WORK_S
    settings, drawn = settings_of(alone, steps), sleeps(steps, unit_s, seed)
    best_s, simulated = lower_bound(settings, drawn), simulate_overlap(settings, drawn)
    print(
        f"{parameter_count(model):,} parameters, accuracy {before:.3f} before; a step's work {work_s:.2f} s "
        f"(rollout {alone.stages_s['collect']:.2f}, update {alone.stages_s['update']:.2f}), its {QUESTIONS * ANSWERS} "
        f"calls {drawn.sum() / SLOTS / steps:.2f} s on {SLOTS} slots; unit {1000 * unit_s:.1f} ms; {steps} steps"
    )
    rows, off_s = [], 0.0
    for arm in ARMS:
        found = await train(arm, model, tokenizer, steps, unit_s, seed)
        off_s = off_s or found.seconds
        rows.append(
            {
                "arm": arm.label,
                "seconds": found.seconds,
                "cut": 1 - found.seconds / off_s,
                "simulated_cut": simulated.cut(arm.schedule),
                "of_best": lower_bound(settings_of(found, steps), drawn) / found.seconds,
                "hidden": found.hidden,
                "lag": found.lag,
                "last": found.accuracies[steps],
                "best": max(found.accuracies.values()),
                "stages_s": found.stages_s,
            }
        )
        show(rows[-1])
    print(f"best possible: {best_s:.1f} s, a cut of {1 - best_s / off_s:.1%}")
    return {
        "before": before,
        "best_possible_s": best_s,
        "best_possible_cut": 1 - best_s / off_s,
        "settings": {key: getattr(settings, key) for key in ("rollout_s", "update_s", "publish_s", "steps")},
        "arms": rows,
    }


def show(row: dict) -> None:
    print(
        f"{row['arm']:<22}{row['seconds']:7.1f} s  cut {row['cut']:6.1%} (simulated {row['simulated_cut']:6.1%})  "
        f"of the best {row['of_best']:6.1%}  hidden {row['hidden']:4.0%}  lag {row['lag']:.0f}  "
        f"accuracy last {row['last']:.3f} best {row['best']:.3f}",
        flush=True,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=1600)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    async with quiet():
        found = await benchmark(asked.steps, asked.seed, asked.demonstrations)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
