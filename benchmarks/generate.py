"""Sampling throughput of multi-turn episodes: our engine compared with calling `model.generate` for every turn.

    .venv/bin/python benchmarks/generate.py [--size toy|wide|both] [--rounds 3] [--threads 1]

Episodes have 10 turns. Groups of 8 share a prompt of about 60 tokens. Each turn appends about 12 observation tokens and
samples exactly 6 at temperature 1, so all implementations sample the same number of tokens in contexts of the same
lengths. They alternate in every round:

- our engine, which also records log-probabilities;
- `generate` with all episodes in one left-padded batch;
- `generate` with one episode at a time (2 episodes).

Times are CPU time, which other load on the machine affects little. Ratios are of medians over the rounds. The exit
status is 1 if batched `generate` takes less than 3 times the engine's time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reward_kit.agent.policies.hf.engine import Engine
from reward_kit.agent.policies.hf.sampling import Sampling

TARGET = 3.0
TURNS, GROUP, PROMPT, OBSERVATION, SAMPLED = 10, 8, 60, 12, 6
ALONE = 2
"""Number of episodes for `generate` with one episode at a time."""


@dataclass(frozen=True)
class Size:
    """A model's dimensions and the number of episodes."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    episodes: int

    def model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=1024,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
        return LlamaForCausalLM(config).eval()


SIZES = {
    "toy": Size(width=128, layers=2, heads=4, vocabulary=512, episodes=64),
    "wide": Size(width=768, layers=8, heads=12, vocabulary=4096, episodes=16),
}


@dataclass(frozen=True)
class Script:
    """The prompt of an episode and its observation tokens per turn."""

    prompt: list[int]
    observations: list[list[int]]


def scripts(size: Size) -> list[Script]:
    rng = np.random.default_rng(0)

    def random_ids(mean: int) -> list[int]:
        return rng.integers(1, size.vocabulary, rng.integers(mean * 2 // 3, mean * 4 // 3 + 1)).tolist()

    prompts = [random_ids(PROMPT) for _ in range(-(-size.episodes // GROUP))]
    return [Script(prompts[i // GROUP], [random_ids(OBSERVATION) for _ in range(TURNS)]) for i in range(size.episodes)]


async def play(engine: Engine, number: int, script: Script) -> list[int]:
    slot, context = engine.open((number,), number), list(script.prompt)
    for observation in script.observations:
        context += observation
        turn = await engine.generate(slot, context, max_new_tokens=SAMPLED, sampling=Sampling())
        context += turn.token_ids
    await engine.close_slot(slot)
    return context


def ours(model: LlamaForCausalLM, played: list[Script]) -> list[list[int]]:
    async def run() -> list[list[int]]:
        engine = Engine(model, stop_ids=[], max_context=512, max_slots=len(played))
        contexts = await asyncio.gather(*(play(engine, number, script) for number, script in enumerate(played)))
        await engine.close()
        return list(contexts)

    return asyncio.run(run())


def generate(model: LlamaForCausalLM, played: list[Script]) -> list[list[int]]:
    """Sample all episodes in one padded batch."""
    contexts = [list(script.prompt) for script in played]
    for turn in range(TURNS):
        for context, script in zip(contexts, played, strict=True):
            context += script.observations[turn]
        width = max(map(len, contexts))
        ids_BT = torch.tensor([[0] * (width - len(context)) + context for context in contexts])
        mask_BT = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
        sampled = model.generate(
            ids_BT, attention_mask=mask_BT, do_sample=True, top_k=0, max_new_tokens=SAMPLED, pad_token_id=0
        )
        for context, row in zip(contexts, sampled[:, width:].tolist(), strict=True):
            context += row
    return contexts


def one_by_one(model: LlamaForCausalLM, played: list[Script]) -> list[list[int]]:
    return [generate(model, [script])[0] for script in played]


Sampler = Callable[[LlamaForCausalLM, list[Script]], list[list[int]]]


def measure(name: str, rounds: int) -> float:
    """Print the figures of one size and return the time of batched `generate` relative to ours."""
    size = SIZES[name]
    model, played = size.model(), scripts(size)
    samplers: dict[str, tuple[Sampler, list[Script]]] = {
        "engine": (ours, played),
        "generate, batched": (generate, played),
        "generate, one by one": (one_by_one, played[:ALONE]),
    }
    seconds: dict[str, list[float]] = {label: [] for label in samplers}
    lengths: dict[str, list[int]] = {}
    for call, share in samplers.values():
        call(model, share[:1])  # warm-up
    for _ in range(rounds):
        for label, (call, share) in samplers.items():
            start = time.process_time()
            contexts = call(model, share)
            seconds[label].append((time.process_time() - start) / len(share))
            lengths[label] = [len(context) for context in contexts]
    assert lengths["engine"] == lengths["generate, batched"], "engine and generate sampled different numbers of tokens"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {size.layers} x {size.width}, {parameters / 1e6:.1f}M parameters, {size.episodes} episodes")
    own = median(seconds["engine"])
    for label, times in seconds.items():
        rate = TURNS * SAMPLED / median(times)
        print(f"  {label:21s} {rate:8.0f} sampled tokens/s, ratio of CPU time to engine {median(times) / own:7.2f}")
    return median(seconds["generate, batched"]) / own


def main() -> None:
    """Run the benchmark; exit with 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.threads} thread(s)")
    ratios = {name: measure(name, options.rounds) for name in SIZES if options.size in (name, "both")}
    print(f"load average {os.getloadavg()[0]:.1f}")
    if min(ratios.values()) < TARGET:
        sys.exit(f"missed the target: {TARGET:g} times as fast as batched `generate`")


if __name__ == "__main__":
    main()
