"""`Branch`, which uses a step of a recorded episode as the start of new episodes.

A branch repeats the recorded actions in a new resource and compares each state key, tool result and reward with the
recorded value. The resource is then forked for every continuation. If a value differs, no continuation starts, because
an episode that starts in a different state provides no information about the recorded step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reward_kit.agent.actions import as_text
from reward_kit.agent.models import History, read_log_probs
from reward_kit.agent.policy_interface import PastTurn, PolicyOutput, get_tool_calls
from reward_kit.agent.samples import Sample, Seeds, derive_seed, make_rollout_id
from reward_kit.agent.starts import EpisodeStart, GroupStart, Past, SharedEnvironment
from reward_kit.agent.tool_execution import Execution, Toolbox
from reward_kit.display_text import first_difference, pluralize
from reward_kit.environments.base import ForkableResource, ToolSpec, hash_key
from reward_kit.environments.tools import ToolRegistry
from reward_kit.episodes.record import continued_from, get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, EnvironmentFailure, Failure
from reward_kit.models import TaskDefinitionModel


class Branch(GroupStart):
    """The state before a step of a recorded episode. New episodes continue from this state.

    Use it as an async context manager. Pass it to `RLRolloutWorker.collect_episode` as `group`.

    Args:
        task: the task of the episode.
        sample: the sample of the episode.
        episode: the recorded episode.
        step: the first step that is not repeated, from 0 to the number of steps minus 1.
        tools: the tools that the task defines.
        policy_label: the name of the policy that continues the episode.
        seed: the random seed for the continuations. Together with the index of a continuation, it determines the policy
            seed of that continuation.
        environment: a resource to use instead of the task's `resource_type`.
        kind: the class of the resource. It overrides the task's `resource_type`.
        before: an open branch at an earlier step of the same episode. Its resource is forked, so the steps before it
            need not be repeated.

    Attributes:
        step: the argument with this name.

    Raises:
        ConfigError: If the episode has no such step or was not collected by a worker.
    """

    def __init__(
        self,
        task: TaskDefinitionModel,
        sample: Sample,
        episode: SingleAgentEpisode,
        step: int,
        *,
        tools: ToolRegistry | None = None,
        policy_label: str = "",
        seed: int = 0,
        environment: SharedEnvironment | None = None,
        kind: type[ForkableResource] | None = None,
        before: Branch | None = None,
    ) -> None:
        facts = get_facts(episode)
        seeds = facts.get("seeds")
        if not seeds or len(episode.assistant_turns) != len(episode):
            raise ConfigError(
                f"episode {episode.id_} cannot be continued, because its record lacks seeds or policy messages; "
                "only episodes that a worker has collected can be continued"
            )
        if not isinstance(step, int) or not 0 <= step < len(episode):
            raise ConfigError(
                f"step must be an integer between 0 and {len(episode) - 1} for episode {episode.id_}, which has "
                f"{pluralize(len(episode), 'step')}; got {step!r}"
            )
        super().__init__(task, sample, seeds["run"], policy_label=policy_label, environment=environment, kind=kind)
        self.step = step
        identity = (episode.id_, step, policy_label, seed)
        self.group_id = f"{episode.id_}-at-{step}-{derive_seed('branch', *identity) & 0xFFFFFFFF:08x}"
        self._recorded, self._recorded_seeds, self._identity, self._tools = episode, Seeds(**seeds), identity, tools
        # A continuation draws its noise from several seeds, one after another.
        noise_seeds = continued_from(episode).get("noise_seeds") or [(0, seeds["noise"])]
        self._noise_seeds = [(t, seed) for t, seed in noise_seeds if t <= step]
        self._before = before
        self._reached = 0  # the step in which a new base begins
        self._specs: list[list[ToolSpec] | None] = []  # by repeated step
        self._observation = ""
        self._past: Past | None = None
        self._failure: EnvironmentFailure | None = None  # why no continuation can start

    def identity(self, rollout_index: int) -> EpisodeStart:
        """Return the start of the continuation with this index, without a resource."""
        seeds = replace(
            self._recorded_seeds,
            policy=derive_seed("policy", *self._identity, rollout_index),
            noise=derive_seed("noise", *self._identity, rollout_index),
        )
        rollout_id = make_rollout_id(self.group_id, rollout_index)
        return EpisodeStart(rollout_id, self.group_id, rollout_index, self._sample, seeds)

    async def episode(self, rollout_index: int) -> EpisodeStart:
        """Return the start of the continuation with this index. The caller must pass it to `finish` at the end.

        Raises:
            EnvironmentFailure: If a repeated action has a different result, or a state key differs.
        """
        start = await super().episode(rollout_index)
        if self._past is None:  # the task has no resource
            specs = await Toolbox(self._task, None, self._tools).specs()
            self._past = self._make_past([specs] * self.step)
        noise_seeds = self._noise_seeds
        if self._task.noise == "independent":
            noise_seeds = [*noise_seeds, (self.step, start.seeds.noise)]
        return replace(start, past=replace(self._past, noise_seeds=tuple(noise_seeds)))

    async def _make_base(
        self, kind: type[ForkableResource], config: dict[str, object], seeds: Seeds
    ) -> ForkableResource:
        if self._failure is not None:
            raise self._failure
        before = self._before
        if before is not None and before._base is not None and before.step <= self.step:
            async with before._lock:
                with self._call(f"fork of {kind.__name__}"):
                    base = await before._base.fork()
            self._reached, self._specs = before.step, list(before._specs)
            self._observation, self._state = before._observation, before._state
            return base
        return await super()._make_base(kind, config, seeds)

    async def _advance(self, resource: ForkableResource, seeds: Seeds) -> None:
        try:
            await self._repeat_steps(resource)
        except EnvironmentFailure as error:
            self._failure = error
            raise

    async def _repeat_steps(self, resource: ForkableResource) -> None:
        recorded, toolbox = self._recorded, Toolbox(self._task, resource, self._tools)
        specs, first, observation = self._specs[: self._reached], self._reached, self._observation
        if first == 0 and self._task.observation:
            with self._call("get_observation"):
                observation = as_text(await resource.get_observation())
        noise_seeds = dict(self._noise_seeds)
        for t in range(first, self.step + 1):
            if t in noise_seeds:
                await super()._reseed(resource, noise_seeds[t])
            self._compare(t, "the state key", recorded.get_infos(t).get("state_key"), await self._state_key(resource))
            if t < self.step:
                specs.append(await toolbox.specs())
                await self._repeat(t, toolbox)
        if self._past is None:
            self._observation, self._specs = observation, specs
            self._past = self._make_past(specs)

    async def _reseed(self, resource: ForkableResource, seed: int) -> None:
        # With shared noise, all continuations draw the numbers that the recorded episode would have drawn.
        if self._task.noise == "independent":
            await super()._reseed(resource, seed)

    async def _repeat(self, t: int, toolbox: Toolbox) -> None:
        """Execute the calls of a recorded step and compare their results."""
        recorded, done = self._recorded, Execution()
        for call in recorded.get_infos(t + 1).get("own_calls") or ():
            key = "arguments_text" if isinstance(call["arguments"], str) else "arguments"
            await toolbox.execute({"type": "tool_call", "name": call["name"], key: call["arguments"]}, t, None, done)
            self._compare(t, f"the result of {call['name']}", call["answer"], hash_key(done.messages[-1].text))
        outputs = recorded.extra_model_outputs
        own = outputs["own_account"].get(t) if "own_account" in outputs else None
        action = recorded.get_actions(t)
        if "results" not in (own or ()) and get_tool_calls(action):
            count = len(done.messages)
            await toolbox.execute(action, t, None, done)
            results = [message.text for message in recorded.answers_to(t) if message.role == "tool"]
            self._compare(t, "the result", results, [message.text for message in done.messages[count:]])
        if done.failure is not None:
            raise EnvironmentFailure(f"{self._where(t)}: {done.failure.message}")
        if done.is_over:
            raise EnvironmentFailure(f"{self._where(t)}: the episode ends there, but the recorded episode continues")
        before, now = recorded.environment_rewards()[t], done.reward
        if before is None or now is None or not math.isclose(before, now, rel_tol=1e-9, abs_tol=1e-12):
            self._compare(t, "the reward", before, now)

    def _compare(self, t: int, what: str, before: Any, now: Any) -> None:
        if difference := first_difference(before, now):
            raise EnvironmentFailure(f"{self._where(t)}: {what} differs{difference}")

    def _where(self, t: int) -> str:
        return f"episode {self._recorded.id_} cannot be continued from step {self.step}: in the repeated step {t}"

    def _make_past(self, specs: Sequence[list[ToolSpec] | None]) -> Past:
        recorded = self._recorded
        episode = recorded.slice(slice(0, self.step))
        episode.custom_data = {}
        tokens, outputs = episode.tokens.turns(), episode.extra_model_outputs
        turns = []
        for t in range(self.step):
            known = {
                key: outputs[key].get(t) if key in outputs else None for key in ("raw_policy_output", "value_estimate")
            }
            output = PolicyOutput(recorded.get_actions(t), log_probs=read_log_probs(episode, t, tokens.get(t)), **known)
            turns.append(PastTurn(History(episode.messages, recorded.assistant_turns[t]), specs[t], output))
        return Past(episode, tuple(turns), recorded.id_, self._observation)


def new_part(episode: SingleAgentEpisode) -> SingleAgentEpisode:
    """Return an episode without the steps repeated from a recorded episode. These steps become context."""
    origin = continued_from(episode)
    return episode[origin["step"] :] if origin else episode


def check_started(episode: SingleAgentEpisode) -> None:
    """Raise the failure of a continuation that could not start.

    Such an episode provides no information about the step, so it must not count as unsuccessful.
    """
    failure = get_facts(episode)["failure"]
    if failure and not episode.is_reset:
        raise Failure.from_json(failure).to_exception()
