"""Make `warm_start/`: a small decoder with a weak policy for the lakes, the start of `reward-kit train train.yaml`.

It is trained on demonstrations of an expert with more than half of the moves replaced by random ones, which are trained
on as well. So it knows the paths but rarely follows them; reinforcement learning removes the random moves.

    python make_warm_start.py [--seed N] [--folder warm_start]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from reward_kit import (
    AgentPolicy,
    EpisodeContext,
    Message,
    PolicyOutput,
    RLRolloutWorker,
    Sample,
    SingleAgentEpisode,
    TaskDefinitionModel,
)
from reward_kit.agent import ExpertPolicy
from reward_kit.environments import ToolSpec
from reward_kit.rl import (
    DemonstratingPolicy,
    Demonstrations,
    SFTConfig,
    build_decoder,
    build_tokenizer,
    describe,
    fit,
    save_model,
)
from reward_kit.runs import load_task
from reward_kit.tokens import build_rows

HERE = Path(__file__).parent
ACTIONS = ("left", "down", "right", "up")
NOISE, CONTEXT = 0.55, 128
LEGEND = r"S start,[\s\S]*"
LINE = r"[SFHG\[][SFHG \[\]]*[SFHG\]]"


class NoisyExpert(AgentPolicy):
    """The expert, with a share of its moves replaced by random ones."""

    def __init__(self, expert: AgentPolicy | None = None, seed: int = 0) -> None:
        self._expert, self._draw = expert, random.Random(seed)

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        return NoisyExpert(await ExpertPolicy().open(context), context.seed)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        assert self._expert is not None
        output = await self._expert.get_action(observation, available_tools_specs)
        if output.action_structured["type"] == "terminate" or self._draw.random() >= NOISE:
            return output
        action = self._draw.choice(ACTIONS)
        return PolicyOutput({"type": "tool_call", "name": "act", "arguments": {"action": action}})


async def demonstrations(
    samples: Sequence[Sample], policy: AgentPolicy, definition: TaskDefinitionModel, walks: int, seed: int
) -> list[SingleAgentEpisode]:
    """Collect `walks` episodes on each lake."""
    worker, episodes = RLRolloutWorker(definition, policy), []
    for sample in samples:
        async with worker.group(sample, seed) as start:
            episodes += [await worker.collect_episode(start, walk) for walk in range(walks)]
    return episodes


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per row of the board, which keeps adjacent cells together."""
    return build_tokenizer(lines(), words=ACTIONS, units=[LINE], spaces="none", dropped=[LEGEND], context=CONTEXT)


def lines() -> list[str]:
    """Return all possible rows of a 4 by 4 board, with and without the agent."""
    kinds = [
        "".join(cells) for cells in (*product("SF", *["FH"] * 3), *product(*["FH"] * 3, "FG"), *product(*["FH"] * 4))
    ]
    return [_format_row(cells, column) for cells in dict.fromkeys(kinds) for column in (None, *range(4))]


def _format_row(cells: str, agent: int | None) -> str:
    return "".join(f"[{cell}]" if column == agent else f" {cell} " for column, cell in enumerate(cells)).strip()


def make(folder: Path, *, seed: int = 0, walks: int = 4, epochs: int = 6) -> None:
    """Train the model and save it.

    Args:
        folder: where to save it, for `policy.model`.
        seed: of episodes, weights and the order of training.
        walks: episodes per lake.
        epochs: of supervised training.
    """
    began, task = time.process_time(), load_task(HERE / "task.yaml")
    tokenizer = make_tokenizer()
    writer = Demonstrations(tokenizer, action_format="bare", tools_in_prompt=False, constrain=True)
    policy = DemonstratingPolicy(NoisyExpert(), writer)
    episodes = asyncio.run(demonstrations(task.samples, policy, task.definition, walks, seed))
    rows = build_rows(episodes, pad_token_id=tokenizer.pad_token_id)
    model = build_decoder(tokenizer, layers=2, width=64, heads=4, context=CONTEXT, seed=seed)
    print(describe(model))
    print(f"{len(episodes)} episodes, {int(rows.lengths().sum()):,} tokens: {time.process_time() - began:.0f} s")
    options = SFTConfig(epochs=epochs, lr=2e-3, max_tokens_per_batch=2_048, use_allowed_ids=True, seed=seed)
    reports = fit(model, rows, options)
    losses = " ".join(f"{report.loss:.3f}" for report in reports)
    print(f"loss in {len(reports)} epochs: {losses}; total CPU time {time.process_time() - began:.0f} s")
    save_model(folder, model, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=HERE / "warm_start")
    options = parser.parse_args()
    torch.set_num_threads(1)
    make(options.folder, seed=options.seed)


if __name__ == "__main__":
    main()
