"""Makes `warm_start/`: a small decoder that can read the lakes and walks them badly, for `reward-kit train train.yaml`.

It learns from an expert of whose moves more than half are replaced by random ones, which are learned too. So it knows
where the ways are and walks them only now and then; what is left to reinforcement is to leave out what does not help.

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
    """The expert, of whose moves a share is replaced by random ones."""

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
    """So many walks over each lake."""
    worker, episodes = RLRolloutWorker(definition, policy), []
    for sample in samples:
        async with worker.group(sample, seed) as start:
            episodes += [await worker.collect_episode(start, walk) for walk in range(walks)]
    return episodes


def make_tokenizer() -> PreTrainedTokenizerBase:
    """A line of the board is one token: then a board is four, and what lies side by side is no riddle."""
    return build_tokenizer(lines(), words=ACTIONS, units=[LINE], spaces="none", dropped=[LEGEND], context=CONTEXT)


def lines() -> list[str]:
    """Every line that a board of four by four cells can have, with the walker in it and without."""
    kinds = [
        "".join(cells) for cells in (*product("SF", *["FH"] * 3), *product(*["FH"] * 3, "FG"), *product(*["FH"] * 4))
    ]
    return [_shown(cells, place) for cells in dict.fromkeys(kinds) for place in (None, *range(4))]


def _shown(cells: str, walker: int | None) -> str:
    return "".join(f"[{cell}]" if place == walker else f" {cell} " for place, cell in enumerate(cells)).strip()


def make(folder: Path, *, seed: int = 0, walks: int = 4, epochs: int = 6) -> None:
    """Make the model, and write it to a folder.

    Args:
        folder: that `policy.model` can name.
        seed: of walks, weights and the order of training.
        walks: over each lake.
        epochs: of supervised training.
    """
    began, task = time.process_time(), load_task(HERE / "task.yaml")
    tokenizer = make_tokenizer()
    writes = Demonstrations(tokenizer, action_format="bare", tools_in_prompt=False, constrain=True)
    policy = DemonstratingPolicy(NoisyExpert(), writes)
    episodes = asyncio.run(demonstrations(task.samples, policy, task.definition, walks, seed))
    rows = build_rows(episodes, pad_token_id=tokenizer.pad_token_id)
    model = build_decoder(tokenizer, layers=2, width=64, heads=4, context=CONTEXT, seed=seed)
    print(describe(model))
    print(f"{len(episodes)} walks, {int(rows.lengths().sum()):,} tokens: {time.process_time() - began:.0f} s")
    options = SFTConfig(epochs=epochs, lr=2e-3, max_tokens_per_batch=2_048, use_allowed_ids=True, seed=seed)
    reports = fit(model, rows, options)
    losses = " ".join(f"{report.loss:.3f}" for report in reports)
    print(f"the loss in {len(reports)} epochs: {losses}; {time.process_time() - began:.0f} s in all")
    save_model(folder, model, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=HERE / "warm_start")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    make(asked.folder, seed=asked.seed)


if __name__ == "__main__":
    main()
