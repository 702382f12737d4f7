"""Makes `model/`: a small decoder that knows the lakes and is not sure what to do, for `reward-kit train train.yaml`.

It learns from an expert of whose actions half are replaced by random ones, which are learned too. So it knows where the
ways are, and walks them only now and then: what is left to reinforcement is to leave out what does not help.

    python warm_start.py [--seed N] [--folder model]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from reward_kit.agent.policies.expert_policy import ExpertPolicy
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.environments.base import ToolSpec
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.rl.model_kit import (
    DemonstratingPolicy,
    Demonstrations,
    SFTConfig,
    build_decoder,
    build_tokenizer,
    describe,
    fit,
    save_model,
)
from reward_kit.runs.tasks import load_task
from reward_kit.tokens import build_rows

HERE = Path(__file__).parent
ACTIONS = ("left", "down", "right", "up")
NOISE, ROUNDS, EPOCHS = 0.3, 6, 3


class NoisyExpert(AgentPolicy):
    """The expert, of whose actions a share is replaced by random ones."""

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
    samples: Sequence[Sample], policy: AgentPolicy, definition: TaskDefinitionModel, seed: int
) -> list[SingleAgentEpisode]:
    worker, episodes = RLRolloutWorker(definition, policy), []
    for sample in samples:
        for round_ in range(ROUNDS):
            async with worker.group(sample, seed) as start:
                episodes.append(await worker.collect_episode(start, round_))
    return episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=HERE / "model")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    began, task = time.process_time(), load_task(HERE / "task.yaml")
    boards = ["[S] F  F  F\n F [F] H [H] G [G] S"]
    tokenizer = build_tokenizer(
        boards, words=ACTIONS, units=[r"\[[SFHG]\]"], spaces="none", dropped=[r"\([A-Z][a-z]+\)"], context=512
    )
    writes = Demonstrations(tokenizer, action_format="bare", tools_in_prompt=False, constrain=True)
    policy = DemonstratingPolicy(NoisyExpert(), writes)
    episodes = asyncio.run(demonstrations(task.samples, policy, task.definition, asked.seed))
    rows = build_rows(episodes, pad_token_id=tokenizer.pad_token_id)
    model = build_decoder(tokenizer, layers=2, width=64, heads=4, context=512, seed=asked.seed)
    print(describe(model))
    print(f"{len(episodes)} episodes, {int(rows.lengths().sum()):,} tokens, {time.process_time() - began:.0f} s")
    options = SFTConfig(epochs=EPOCHS, lr=2e-3, max_tokens_per_batch=3_000, use_allowed_ids=True, seed=asked.seed)
    for report in fit(model, rows, options, progress=None):
        print(f"epoch {report.epoch}: loss {report.loss:.4f}, {report.seconds:.0f} s")
    save_model(asked.folder, model, tokenizer)


if __name__ == "__main__":
    main()
