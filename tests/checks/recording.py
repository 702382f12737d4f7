"""Real episodes for the tests of the checkers: a tiny model plays FrozenLake with three tokens per action."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import numpy as np
import torch

from reward_kit.agent.models import StepData
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker, collect_group
from reward_kit.agent.samples import Sample
from reward_kit.environments.base import ToolSpec
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.models import EvaluateResult, Message, TaskDefinitionModel
from reward_kit.reward_agent.scoring import Scored
from reward_kit.rl_processing import CreditAssigner, CreditBatch
from reward_kit.tokens import TokenBatch, build_rows
from tests.tiny_policy import ACTIONS, FIRST_ACTION, PAD, TinyPolicy, cell_of

TASK = TaskDefinitionModel(
    name="lake",
    resource_type="gymnasium",
    base_resource_config={"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}},
    max_episode_steps=6,
)
SYSTEM = [15, 14, 13, 12]
VERSION = 3
WORDS = 3


class WordyPolicy(TinyPolicy):
    """A policy with `WORDS` tokens per action, of which the last counts, after a system prompt of four tokens."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        # Far from the uniform start, so that a log-probability tells which token it is of.
        torch.nn.init.normal_(self.module.head.weight, std=0.5, generator=torch.Generator().manual_seed(seed))

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        return _Session(self, context.seed)

    @torch.no_grad()
    def token_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """Return (T,) the log-probability of each id given those before it; 0.0 for the first."""
        ids_BT = torch.tensor(ids)[None]
        logits_TV = self.acting(ids_BT, torch.ones_like(ids_BT))[0].log_softmax(dim=-1)
        taken = logits_TV[:-1].gather(1, ids_BT[0, 1:, None])[:, 0]
        return np.concatenate([[0.0], taken.double().numpy()])


class _Session(AgentPolicy):
    def __init__(self, policy: WordyPolicy, seed: int) -> None:
        self._policy, self._ids = policy, list(SYSTEM)
        self._generator = torch.Generator().manual_seed(seed)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        self._ids.append(cell_of(observation[-1].text))
        prompt_ids, said, logprobs = list(self._ids), [], []
        for _ in range(WORDS):
            logprobs_V = self._policy.next_logprobs(self._ids)
            said.append(int(torch.multinomial(logprobs_V.exp(), 1, generator=self._generator)))
            logprobs.append(float(logprobs_V[said[-1]]))
            self._ids.append(said[-1])
        name = ACTIONS[said[-1] - FIRST_ACTION]
        sampled = {"prompt_ids": prompt_ids, "token_ids": said, "logprobs": logprobs}
        sampled["policy_version"] = self._policy.version
        return PolicyOutput({"type": "tool_call", "name": "act", "arguments": {"action": name}}, name, sampled)


@dataclass
class Recording:
    """A group of four episodes with credited steps, into which tests plant faults."""

    episodes: list[SingleAgentEpisode]
    steps: list[list[StepData]]
    scored: list[bool]
    credit: CreditBatch

    @property
    def long(self) -> SingleAgentEpisode:
        """Return an episode of at least three steps."""
        return self.episodes[self.long_index]

    @property
    def long_index(self) -> int:
        """Return its index."""
        return next(n for n, episode in enumerate(self.episodes) if len(episode) >= 3)

    @property
    def long_steps(self) -> list[StepData]:
        """Return its steps."""
        return self.steps[self.long_index]

    def rows(self) -> TokenBatch:
        """Return the training rows."""
        return build_rows(self.episodes, self.steps, pad_token_id=PAD)


@functools.cache
def policy() -> WordyPolicy:
    """Return the acting policy, at version `VERSION`."""
    made = WordyPolicy()
    anyio.run(made.publish, VERSION)
    return made


@functools.cache
def _states() -> list[dict]:
    worker = RLRolloutWorker(TASK, policy())

    async def collect() -> list[SingleAgentEpisode]:
        return await collect_group(worker, Sample("lake"), 4, run_seed=1)

    return [episode.get_state() for episode in anyio.run(collect)]


def record() -> Recording:
    """Return fresh copies of the recorded group."""
    episodes = [SingleAgentEpisode.from_state(state) for state in _states()]
    scored = [Scored(e.id_, EvaluateResult(score=n / 4), None) for n, e in enumerate(episodes)]
    batch = CreditAssigner("gigpo", step_rewards="environment", omega=0.5, gamma=0.95).assign(episodes, scored)
    return Recording(episodes, batch.steps, [True] * len(episodes), batch)
