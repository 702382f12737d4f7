"""Training time with overlapped slow rewards, for each pipeline schedule: a scaled-down published experiment.

    .venv/bin/python benchmarks/pipeline.py [--steps N] [--seed N] [--json FILE]

The published experiment (verl pull request 2854; `docs/concepts/overlap.md`) trained on GSM8K with 1,024 questions of 5
answers per step, mini-batches of 256, and rewards that slept 1 to 40 s on 256 threads. Here a decoder of 0.2M
parameters answers generated questions in GSM8K's format: 32 questions of 5 answers per step, mini-batches of 8, and
rewards that sleep on 8 slots, so that a slot also has 20 calls per step. Sleeps last 1 to 40 units. The unit is chosen
so that the work of a step (rollout and updates) takes 158 units, as it took 158 s there.

Every arm is compared with the synchronous schedule ("off"). Printed for each arm are the time, the reduction (measured
and simulated), the efficiency (the lower bound for its sleeps and stage times, `lower_bound`, divided by the time), the
share of scoring that overlaps with other work, the greatest lag in versions, and the last and best accuracy on
held-out questions. The last line is the lower bound for stage times measured without concurrent work.
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
from reward_kit.rl.overlap import PipelineSettings, lower_bound, simulate_overlap
from reward_kit.rl.overlap_published import FITTED
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.schedule import Schedule
from reward_kit.rl.training.pipelines import Pipeline, PipelineOptions
from reward_kit.rl.training.rollouts import Collector, HeldOutEvaluation, SampleStream
from reward_kit.rl.training.trainer import Trainer
from reward_kit.rl_processing import CreditAssigner
from reward_kit.tokens import build_rows
from reward_kit.typed_interface import reward_function, reward_spec

QUESTIONS, ANSWERS, MINIBATCH, SLOTS = 32, 5, 8, 8
THEIR_WORK_S = FITTED.rollout_s + FITTED.train_s
THEIR_DELAYS = (1.0, 40.0)
NAMES, THINGS = ["Ann", "Ben", "Cleo", "Dan"], ["apples", "coins", "books", "shells"]
LARGEST = 5
TASK = TaskDefinitionModel(
    name="word-problems", messages=[{"role": "user", "content": "{{ question }}"}], max_episode_steps=1
)


def problems(count: int, seed: int) -> list[Sample]:
    """Return questions with answers in GSM8K's format: the steps, then #### and the number."""
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
    """A policy that gives the sample's answer."""

    def __init__(self, answers: dict[str, str]) -> None:
        self._answers = answers

    async def get_action(self, observation, available_tools_specs=None) -> PolicyOutput:
        return PolicyOutput({"type": "text", "content": self._answers[observation[-1].text]})


def reward_delays(rollout_ids: Sequence[str], unit_s: float, seed: int) -> np.ndarray:
    """Return the seconds that each reward sleeps, equal in all arms."""
    low, high = THEIR_DELAYS
    shares = [derive_seed("delay", seed, rollout_id) / 2**63 for rollout_id in rollout_ids]
    return unit_s * (low + (high - low) * np.array(shares))


def slow_reward(unit_s: float, seed: int):
    @reward_function
    async def is_right(messages, ground_truth: str, rollout_id: str):
        if unit_s:
            await asyncio.sleep(float(reward_delays([rollout_id], unit_s, seed)[0]))
        return {"score": float(messages[-1].text.rpartition("####")[2].strip() == ground_truth)}

    return reward_spec(is_right)


async def warm_start(seed: int, demonstrations: int):
    """Return a decoder trained on demonstrations, and its tokenizer."""
    demonstrated = problems(demonstrations, seed + 1)
    texts = [text for sample in demonstrated for text in (sample.row["question"], sample.row["answer"])]
    tokenizer = build_tokenizer(texts, words=[str(number) for number in range(2 * LARGEST + 1)], context=128)
    model = build_decoder(tokenizer, layers=2, width=96, heads=4, context=128, seed=seed)
    worker = RLRolloutWorker(TASK, Teacher({sample.row["question"]: sample.row["answer"] for sample in demonstrated}))
    groups = await Collector(1, 64).collect(worker, [(sample, seed) for sample in demonstrated])
    rows = build_rows(Demonstrations(tokenizer)([group[0] for group in groups]), pad_token_id=tokenizer.pad_token_id)
    fit(model, rows, SFTConfig(epochs=2, lr=3e-3, max_tokens_per_batch=1024, seed=seed))
    return model, tokenizer


@dataclass(frozen=True)
class Arm:
    """A training configuration.

    Attributes:
        label: name in the table.
        schedule: of the pipeline.
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


class RecordingTrainer(Trainer):
    """A trainer that keeps the weights of every third version."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.weights = {}

    async def publish(self) -> None:
        await super().publish()
        if self.version % 3 == 0:
            self.weights[self.version] = copy.deepcopy(self.policy.module.state_dict())


@dataclass
class ArmResult:
    """The measurements of an arm.

    Attributes:
        seconds: total time of all steps.
        stages_s: mean seconds per step of each stage.
        hidden: share of scoring time that overlapped with other work.
        accuracies: on held-out questions, by version.
        lag: greatest lag of a token, in versions.
    """

    seconds: float
    stages_s: dict[str, float]
    hidden: float
    accuracies: dict[int, float]
    lag: float


async def train(
    arm: Arm, model, tokenizer, steps: int, unit_s: float, seed: int, *, evaluate: bool = True
) -> ArmResult:
    policy = HFAgentPolicy(copy.deepcopy(model), tokenizer, max_new_tokens=24, max_sessions=QUESTIONS * ANSWERS)
    learner = PPOLearner(policy.module, arm.config(), seed=seed)
    options = PipelineOptions(
        schedule=arm.schedule, samples_per_update=QUESTIONS, samples_per_minibatch=MINIBATCH, dynamic_sampling=None
    )
    worker = RLRolloutWorker(TASK, policy)
    lines = []
    async with AsyncRewardAgent(slow_reward(unit_s, seed), max_concurrency=SLOTS) as agent:
        trainer = RecordingTrainer(worker, agent, CreditAssigner("grpo"), learner, group_size=ANSWERS, run_seed=seed)
        async with Pipeline(trainer, SampleStream(problems(4096, seed + 2), seed), options) as pipeline:
            began = time.perf_counter()
            for step in range(steps):
                lines.append(await pipeline.step(more=step + 1 < steps) | trainer.meter.take())
            seconds = time.perf_counter() - began
    trainer.weights[steps] = copy.deepcopy(policy.module.state_dict())
    accuracies = await evaluate_versions(policy, trainer.weights, seed) if evaluate else {}
    await policy.close()
    stages = {name: float(np.mean([line[f"time/{name}_s"] for line in lines])) for name in ("update", "publish")}
    # With one-step-off schedules, the rollouts of a batch are collected in the step before.
    stages["collect"] = sum(line.get("time/collect_s", 0.0) for line in lines) / steps
    hidden = float(np.mean([line["overlap/hidden_share"] for line in lines]))
    return ArmResult(seconds, stages, hidden, accuracies, max(line["lag_max"] for line in lines))


async def evaluate_versions(policy: HFAgentPolicy, weights: dict, seed: int) -> dict[int, float]:
    """Return the accuracy on held-out questions, by version."""
    held_out = problems(256, seed + 3)
    accuracies = {}
    async with AsyncRewardAgent(slow_reward(0.0, seed), max_concurrency=64) as agent:
        evaluation = HeldOutEvaluation(RLRolloutWorker(TASK, policy), agent, held_out, 1, seed, Collector(1))
        for version, state in weights.items():
            await policy.publish(version, state)
            accuracies[version] = (await evaluation.measure())["held_out/score"]
    return accuracies


def simulator_settings(result: ArmResult, steps: int) -> PipelineSettings:
    """Return the simulator's settings for the stage times of a result."""
    return PipelineSettings(
        rollout_s=result.stages_s["collect"],
        update_s=result.stages_s["update"] * MINIBATCH / QUESTIONS,
        publish_s=result.stages_s["publish"],
        batch_size=QUESTIONS,
        group_size=ANSWERS,
        minibatch_size=MINIBATCH,
        max_concurrency=SLOTS,
        steps=steps,
        separate_rollouts=True,
    )


def sleeps(steps: int, unit_s: float, seed: int) -> np.ndarray:
    """Return the (S,C) sleeps of each call of each step, in call order."""
    stream = SampleStream(problems(4096, seed + 2), seed)

    class Ids(Trainer):
        def __init__(self) -> None:
            self.collected, self.run_seed = 0, seed

    requests = Ids().requests(stream.take(steps * QUESTIONS))
    label = HFAgentPolicy.__name__
    task, rollout_ids = RLRolloutWorker(TASK, Teacher({}), policy_label=label), []
    for sample, group_seed in requests:
        group = task.group(sample, group_seed)
        rollout_ids += [group.identity(index).rollout_id for index in range(ANSWERS)]
    return reward_delays(rollout_ids, unit_s, seed).reshape(steps, QUESTIONS * ANSWERS)


@asynccontextmanager
async def quiet():
    """Suppress warnings about off-policy data, which the arms differ in on purpose."""
    logging.getLogger("reward_kit").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


async def benchmark(steps: int, seed: int, demonstrations: int) -> dict:
    model, tokenizer = await warm_start(seed, demonstrations)
    policy = HFAgentPolicy(copy.deepcopy(model), tokenizer, max_new_tokens=24, max_sessions=256)
    before = (await evaluate_versions(policy, {0: model.state_dict()}, seed))[0]
    await policy.close()
    # Without sleeps, to measure the stage times. The first run warms up.
    await train(ARMS[0], model, tokenizer, 2, 0.0, seed, evaluate=False)
    alone = await train(ARMS[0], model, tokenizer, 4, 0.0, seed, evaluate=False)
    work_s = sum(alone.stages_s.values())
    unit_s = work_s / THEIR_WORK_S
    settings, drawn = simulator_settings(alone, steps), sleeps(steps, unit_s, seed)
    best_s, simulated = lower_bound(settings, drawn), simulate_overlap(settings, drawn)
    print(
        f"{parameter_count(model):,} parameters, accuracy {before:.3f} before training; per step: work {work_s:.2f} s "
        f"(rollout {alone.stages_s['collect']:.2f}, update {alone.stages_s['update']:.2f}), {QUESTIONS * ANSWERS} "
        f"rewards {drawn.sum() / SLOTS / steps:.2f} s on {SLOTS} slots; unit {1000 * unit_s:.1f} ms; {steps} steps"
    )
    rows, off_s = [], 0.0
    for arm in ARMS:
        result = await train(arm, model, tokenizer, steps, unit_s, seed)
        off_s = off_s or result.seconds
        rows.append(
            {
                "arm": arm.label,
                "seconds": result.seconds,
                "cut": 1 - result.seconds / off_s,
                "simulated_cut": simulated.cut(arm.schedule),
                "of_best": lower_bound(simulator_settings(result, steps), drawn) / result.seconds,
                "hidden": result.hidden,
                "lag": result.lag,
                "last": result.accuracies[steps],
                "best": max(result.accuracies.values()),
                "stages_s": result.stages_s,
            }
        )
        show(rows[-1])
    print(f"lower bound: {best_s:.1f} s, reduction {1 - best_s / off_s:.1%}")
    return {
        "before": before,
        "best_possible_s": best_s,
        "best_possible_cut": 1 - best_s / off_s,
        "settings": {key: getattr(settings, key) for key in ("rollout_s", "update_s", "publish_s", "steps")},
        "arms": rows,
    }


def show(row: dict) -> None:
    print(
        f"{row['arm']:<22}{row['seconds']:7.1f} s  reduction {row['cut']:6.1%} (simulated {row['simulated_cut']:6.1%}) "
        f" efficiency {row['of_best']:6.1%}  overlapped {row['hidden']:4.0%}  lag {row['lag']:.0f}  "
        f"accuracy last {row['last']:.3f} best {row['best']:.3f}",
        flush=True,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="training steps per arm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=1600)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    async with quiet():
        results = await benchmark(options.steps, options.seed, options.demonstrations)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
