"""Training throughput of `PPOLearner.update` in tokens/s, compared with TRL's `GRPOTrainer`.

    .venv/bin/python benchmarks/train_step.py [--rounds 5] [--sizes toy large] [--threads 1 2] [--profile]

Both train the same model on the same episodes in the same process, with the Python and torch of
`.integrations/learners`, which `make .integrations/.learners` installs. Episodes have about ten turns; a quarter of
their tokens are trained on, the rest are the prompt and observations. Measured are:

  step    one optimizer step over all episodes, with the sampler's log-probabilities given
  update  four mini-batches of one optimizer step each. We use the sampler's log-probabilities that the policy recorded;
          TRL recomputes them before such an update, even if its rollout function returned them

Both process the same rows in the same micro-batches of about eight rows, TRL's default: forward, loss and backward
pass, clipping of the gradient norm to 1, and an AdamW step. All prompts have the same length, so TRL's layout, with
prompts padded on the left and completions on the right, has no more padding than ours.

TRL is timed without data loading, generation, rewards and logs, on prepared tensors: `training_step` for each
micro-batch, clipping, the optimizer's step and `zero_grad`. Ours is timed from NumPy rows to diagnostics. The two
alternate, after a check that their losses and gradient norms are equal. With one thread, times are medians of CPU time,
which other load on the machine affects little; with more threads, they are minima of wall-clock time. The exit status
is 1 if the ratio of an update is below its target (2 for `toy`, 1 for `large`).
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import os
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / ".integrations/learners/bin/python"
if importlib.util.find_spec("trl") is None:
    if not PEER.exists():
        raise SystemExit("TRL is not installed; run `make .integrations/.learners` first")
    os.execv(PEER, [str(PEER), *sys.argv])
sys.path[:0] = [str(ROOT), str(ROOT / "tests/integrations/learners")]

import numpy as np  # noqa: E402 - after the restart with another Python
import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402
from trl_training import make_trainer, optimizer_step, own_logprobs, save_tokenizer  # noqa: E402

from reward_kit.agent import episode_steps  # noqa: E402
from reward_kit.episodes import SingleAgentEpisode  # noqa: E402
from reward_kit.rl.learner.config import PPOConfig  # noqa: E402
from reward_kit.rl.learner.sharding import Processes  # noqa: E402
from reward_kit.rl.learner.training_rows import TrainingRows  # noqa: E402
from reward_kit.rl.ppo import DeviceContext, PPOLearner  # noqa: E402
from reward_kit.tokens import TokenBatch, build_rows  # noqa: E402

PROMPT, OBSERVATION, ACTION = 20, 16, 6
LONGEST = 400


class Size(NamedTuple):
    """Dimensions of a model and a batch, and the target ratio of an update."""

    width: int
    layers: int
    vocabulary: int
    episodes: int
    budget: int
    target: float


SIZES = {
    "toy": Size(width=128, layers=2, vocabulary=512, episodes=64, budget=2048, target=2.0),
    "large": Size(width=512, layers=8, vocabulary=2048, episodes=8, budget=2048, target=1.0),
}
MINIBATCHES = {"step": 1, "update": 4}


def play(number, vocabulary):
    """Return an episode of about ten turns with tokens, as a policy records them."""
    draw = random.Random(number)
    episode = SingleAgentEpisode(f"r{number}")
    episode.add_env_reset("a room")
    episode.custom_data = {"group_id": f"g{number // 8}", "sample": {}, "ground_truth": None}
    turns, context = draw.randint(8, 12), []
    for turn in range(turns):
        seen = PROMPT if turn == 0 else draw.randint(OBSERVATION // 2, OBSERVATION * 3 // 2)
        context += draw.choices(range(2, vocabulary), k=seen)
        sampled = draw.choices(range(2, vocabulary), k=draw.randint(ACTION // 2, ACTION * 3 // 2))
        episode.tokens.add_turn(turn, context, sampled, [-1.0] * len(sampled), policy_version=0)
        context += sampled
        episode.add_env_step("a room", {"type": "text", "content": "go"}, 0.0, terminated=turn == turns - 1)
    return episode


def make_rows(size, model):
    """Return rows with random credit and the log-probabilities of the model."""
    episodes, draw = [play(number, size.vocabulary) for number in range(size.episodes)], random.Random(0)
    steps = [
        [step.model_copy(update={"advantage": draw.gauss(0, 1)}) for step in episode_steps(episode)]
        for episode in episodes
    ]
    rows = build_rows(episodes, steps, pad_token_id=0, padding="outer")
    rows.batch["logprobs"][:] = PPOLearner(model, PPOConfig()).logprobs(rows)
    return rows


def trl_inputs(rows, chosen, loss_tokens):
    """Return rows as `GRPOTrainer` has them after its rollouts, trimmed to their longest row.

    `loss_tokens` is the number of tokens in the loss of their optimizer step.
    """
    part = rows[chosen].trim()
    tensors = {key: torch.from_numpy(values) for key, values in part.batch.items()}
    mask = tensors["completion_mask"][:, PROMPT:].long()
    return {
        "prompt_ids": tensors["prompt_ids"].long(),
        "prompt_mask": torch.ones_like(tensors["prompt_ids"]).long(),
        "completion_ids": tensors["completion_ids"].long(),
        "completion_mask": mask,
        "tool_mask": torch.where(mask == 0, 1, tensors["action_mask"][:, PROMPT:].long()),
        "advantages": tensors["advantages"][:, PROMPT:].float(),
        "old_per_token_logps": tensors["logprobs"][:, PROMPT:].float(),
        "num_items_in_batch": torch.tensor(loss_tokens),
    }


class Work(NamedTuple):
    """A model, its rows, and their micro-batches."""

    size: Size
    folder: str
    model: LlamaForCausalLM
    rows: TokenBatch
    flat: TrainingRows

    @classmethod
    def of(cls, size, folder):
        """Both sides begin with the weights in this folder."""
        config = LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=size.width * 8 // 3,
            num_hidden_layers=size.layers,
            num_attention_heads=max(size.width // 64, 4),
            num_key_value_heads=max(size.width // 64, 4),
            max_position_embeddings=1024,
        )
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
        save_tokenizer(folder, size.vocabulary)
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = make_rows(size, model)
        return cls(size, folder, model, rows, TrainingRows.of(rows))

    def parts(self, order, minibatches):
        """Return the micro-batches of each mini-batch, as the learner splits them."""
        context = DeviceContext(torch.device("cpu"), torch.float32, self.size.budget, Processes())
        return [context.split(self.flat, part) for part in np.array_split(order, minibatches)]

    @property
    def tokens(self):
        return int(self.flat.lengths_B.sum())

    def __str__(self):
        weights, (parts,) = (
            sum(weight.numel() for weight in self.model.parameters()),
            self.parts(np.arange(len(self.rows)), 1),
        )
        padded = sum(int(self.flat.lengths_B[part].max()) * len(part) for part in parts)
        return (
            f"{weights / 1e6:.1f}M parameters, {len(self.rows)} episodes, {self.tokens} tokens "
            f"({self.flat.count / self.tokens:.0%} in the loss), {len(parts)} micro-batches, "
            f"{1 - self.tokens / padded:.0%} padding"
        )


def our_update(work, minibatches):
    """Return a function that runs one of our updates, and one that returns its row order."""
    config = PPOConfig(clip_high=0.28, lr=1e-8, max_tokens_per_micro_batch=work.size.budget, minibatches=minibatches)
    learner, orders = PPOLearner(copy.deepcopy(work.model), config, seed=1), torch.Generator().manual_seed(1)

    def update():
        figures = learner.update(work.rows, version=0)
        return figures["loss"], figures["grad_norm"]

    return update, lambda: torch.randperm(len(work.rows), generator=orders).numpy()


def trl_update(work, minibatches):
    """Return a function that runs one of TRL's updates on the micro-batches of each optimizer step."""
    count = sum(map(len, work.parts(np.arange(len(work.rows)), minibatches)))
    trainer = make_trainer(
        work.folder,
        max_completion_length=LONGEST,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        learning_rate=1e-8,
        max_grad_norm=1.0,
        gradient_accumulation_steps=count // minibatches,
        steps_per_generation=count,
    )

    def update(steps):
        if minibatches > 1:
            for inputs in (part for parts in steps for part in parts):
                inputs["old_per_token_logps"] = own_logprobs(trainer, inputs)
        results = []
        for parts in steps:
            # The trainer divides the loss by this count, which it assumes to be equal in all optimizer steps.
            trainer.args.steps_per_generation = len(parts)
            results.append(optimizer_step(trainer, parts))
        return tuple(np.mean(results, axis=0))

    return update


def prepare(work, order, minibatches):
    """Return the rows in this order as TRL has them before an update."""
    steps = []
    for parts in work.parts(order, minibatches):
        loss_tokens = int(work.flat.counts_B[np.concatenate(parts)].sum())
        steps.append([trl_inputs(work.rows, part, loss_tokens) for part in parts])
        padded = sum(one["prompt_ids"].numel() + one["completion_ids"].numel() for one in steps[-1])
        assert padded == sum(int(work.flat.lengths_B[part].max()) * len(part) for part in parts), "padding differs"
    return steps


def seconds(step, clock):
    began = clock()
    step()
    return clock() - began


def measure(work, minibatches, threads, rounds):
    """Return our and TRL's tokens/s, and the ratio of the two."""
    torch.set_num_threads(threads)
    clock, best = (time.process_time, median) if threads == 1 else (time.perf_counter, min)
    (ours, next_order), theirs = our_update(work, minibatches), trl_update(work, minibatches)
    steps = prepare(work, next_order(), minibatches)
    check_same(ours(), theirs(steps))
    pairs = []
    for _ in range(rounds):
        steps = prepare(work, next_order(), minibatches)
        pairs.append((seconds(ours, clock), seconds(lambda steps=steps: theirs(steps), clock)))
    our_s, their_s = (best(times) for times in zip(*pairs, strict=True))
    return work.tokens / our_s, work.tokens / their_s, their_s / our_s


def check_same(ours, theirs):
    """Check that losses and gradient norms agree."""
    for name, our, their in zip(("losses", "norms"), ours, theirs, strict=True):
        assert abs(our - their) < 1e-4 * max(abs(their), 0.1), f"{name} differ: {our} and {their}"


def profile(work, minibatches):
    """Print the profile of one of our updates and one of TRL's."""
    torch.set_num_threads(1)
    (ours, next_order), theirs = our_update(work, minibatches), trl_update(work, minibatches)
    for step in (ours, lambda: theirs(prepare(work, next_order(), minibatches))):
        step()
        with torch.profiler.profile() as profiler:
            step()
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=40))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--profile", action="store_true", help="only print profiles of a step")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_progress_bar()
    missed = []
    for name in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            work = Work.of(SIZES[name], folder)
            print(f"{name}: {work}")
            if options.profile:
                profile(work, 1)
                continue
            for threads, label in itertools.product(options.threads, MINIBATCHES):
                ours, theirs, ratio = measure(work, MINIBATCHES[label], threads, options.rounds)
                speeds = f"ours {ours:8,.0f} tokens/s, TRL {theirs:8,.0f}, ratio {ratio:.2f}"
                print(f"  {label:6} {threads} thread(s): {speeds}", flush=True)
                if label == "update" and ratio < SIZES[name].target:
                    missed.append(f"{name} with {threads} thread(s): {ratio:.2f} < {SIZES[name].target}")
    if missed:
        raise SystemExit("below the target: " + "; ".join(missed))


if __name__ == "__main__":
    main()
