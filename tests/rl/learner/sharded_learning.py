"""Results of a learner on a few episodes, in the test's process or as a script in several processes.

    python -m tests.rl.learner.sharded_learning FOLDER [--processes 2]

Without `torchrun` it forks into so many processes, which import nothing twice. The first writes `FOLDER/outcome.pt`.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import socket
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from reward_kit.agent.models import episode_steps
from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.learner.sharding import process_group, whole
from reward_kit.rl.ppo import PPOLearner
from reward_kit.tokens import TokenBatch, build_rows
from reward_kit.tokens.batch import Padding
from tests.devices import DEVICE, WIDEST

VOCABULARY = 61
ROWS = 7
OPTIONS: dict[str, Any] = {
    "epochs": 2,
    "minibatches": 3,
    "max_tokens_per_micro_batch": 80,
    "clip_high": 0.28,
    "kl_coefficient": 0.1,
    "entropy_coefficient": 0.01,
    "lr": 1e-3,
    "lr_by_name": {"*norm*": 5e-3},
}


def model(seed: int = 0, layers: int = 2) -> LlamaForCausalLM:
    """Return a tiny Llama in float64, so that rounding explains no difference."""
    torch.manual_seed(seed)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**size, **heads, initializer_range=0.3)).to(DEVICE, WIDEST)


def episode(number: int, turns: int) -> SingleAgentEpisode:
    """Return an episode in which each turn observes a few new tokens and samples a few."""
    draw = random.Random(number)
    made = SingleAgentEpisode(f"r{number}")
    made.add_env_reset("a room")
    made.custom_data = {"group_id": f"g{number // 4}", "sample": {}, "ground_truth": None}
    context: list[int] = []
    for turn in range(turns):
        context += draw.choices(range(1, VOCABULARY), k=draw.randint(2, 6))
        sampled = draw.choices(range(1, VOCABULARY), k=draw.randint(1, 5))
        made.tokens.add_turn(turn, context, sampled, [-1.0] * len(sampled), policy_version=turn % 2)
        context += sampled
        made.add_env_step("a room", {"type": "text", "content": "go"}, 0.0, terminated=turn == turns - 1)
    return made


def rows(count: int = ROWS, padding: Padding = "right") -> TokenBatch:
    """Return rows of episodes of 1 to 4 turns, with random credit."""
    episodes = [episode(number, 1 + number % 4) for number in range(count)]
    draw, steps = random.Random(0), []
    for one in episodes:
        credit = [{"advantage": draw.gauss(0, 1), "return_to_go": draw.gauss(0, 1)} for _ in range(len(one))]
        steps.append([step.model_copy(update=update) for step, update in zip(episode_steps(one), credit, strict=True)])
    made = build_rows(episodes, steps, pad_token_id=0, padding=padding)
    # Sampled by a policy close to the model, so that some ratios are within the clip range and some beyond.
    noise = 0.2 * np.random.default_rng(0).standard_normal(made.batch["logprobs"].shape)
    likely = learner(with_values=False, kl_coefficient=0.0).logprobs(made) + noise.astype(np.float32)
    made.batch["logprobs"][:] = likely * made.batch["action_mask"]
    return made


def learner(*, with_values: bool = True, **options: Any) -> PPOLearner:
    """Return a learner with the same weights in every process and call."""
    policy, of_critic = model(), {"old_values": "recomputed"} if with_values else {}
    return PPOLearner(
        PolicyWithValue(policy) if with_values else policy,
        PPOConfig(**{**OPTIONS, **of_critic, **options}),
        reference=model(seed=1),
        seed=3,
    )


class Outcome(NamedTuple):
    """The compared results, complete whatever the number of processes."""

    gradient: dict[str, torch.Tensor]
    gradient_metrics: dict[str, float]
    metrics: list[dict[str, float]]
    state: dict[str, Any]
    resumed: dict[str, Any]
    logprobs: torch.Tensor
    lonely: dict[str, torch.Tensor]


def outcome(saved: dict[str, Any] | None = None) -> Outcome:
    """Return gradients, two updates and their state; an update from a saved state; an update on one row.

    Args:
        saved: the state to go on from; None: that of the updates here.
    """
    one, batch = learner(), rows()
    gradient_metrics = one.gradients(batch)
    gradient = {name: whole(parameter.grad) for name, parameter in one.module.named_parameters()}
    metrics = [one.update(batch, version=version) for version in (1, 2)]
    state = copy.deepcopy(one.state_dict())
    other = learner()
    other.load_state_dict(state if saved is None else saved)
    metrics.append(other.update(batch, version=3))
    lonely = learner(with_values=False, packed=True, gradient_checkpointing=True, max_logits=3 * VOCABULARY)
    lonely.update(batch[[2]], version=0)
    return Outcome(
        gradient,
        gradient_metrics,
        metrics,
        state,
        copy.deepcopy(other.state_dict()),
        torch.from_numpy(other.logprobs(batch)),
        whole(lonely.module.state_dict()),
    )


def become_several(processes: int) -> list[int]:
    """Fork and set each process's rank as `torchrun` does; return the other process ids in the first."""
    with socket.socket() as asked:
        asked.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(asked.getsockname()[1])}
    os.environ |= {**place, "WORLD_SIZE": str(processes), "RANK": "0"}
    others: list[int] = []
    for rank in range(1, processes):
        if not (pid := os.fork()):
            os.environ["RANK"] = str(rank)
            return []
        others.append(pid)
    return others


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    others = [] if "WORLD_SIZE" in os.environ else become_several(arguments.processes)
    with process_group() as processes:
        saved = torch.load(arguments.folder / "saved.pt", weights_only=True)
        found = outcome(saved)
        if processes.is_first:
            torch.save(found._asdict(), arguments.folder / "outcome.pt")
    if any(os.waitpid(pid, 0)[1] for pid in others):
        raise SystemExit("another process broke off")


if __name__ == "__main__":
    main()
