"""`RLRolloutWorker`: drives a policy through one episode and records it.

The worker turns (task, policy, environment) into an episode and knows nothing of rewards. Each action of the policy
appends exactly one assistant message and is one step, however many tools it calls. Whatever fails is recorded on the
episode; an episode never takes its siblings with it.
"""

from __future__ import annotations

import datetime
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import anyio

from reward_kit.agent.execution import Execution, Toolbox, as_text, assistant_message
from reward_kit.agent.models import History, StepData, StopReason, steps_of
from reward_kit.agent.policy_interface import Action, AgentPolicy, EpisodeContext, PolicyOutput, check_output
from reward_kit.agent.samples import Prompt, Sample
from reward_kit.agent.starts import CLOSE_SECONDS, EpisodeStart, GroupStart, close_quietly, environment_call
from reward_kit.environments.base import ForkableResource, ToolSpec
from reward_kit.environments.tools import ToolRegistry
from reward_kit.episodes.json_codec import to_json_value
from reward_kit.episodes.segments import REWRITTEN, UNKNOWN_VERSION, Turn
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, Failure, PolicyError, RewardKitError, boundary
from reward_kit.models import Message, TaskDefinitionModel

logger = logging.getLogger("reward_kit.agent")


@dataclass(slots=True)
class _Live:
    """One episode while it runs."""

    start: EpisodeStart
    episode: SingleAgentEpisode
    began: float
    tokens_used: int = 0
    policy_s: float = 0.0
    environment_s: float = 0.0
    usage: dict[str, float] = field(default_factory=dict)
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    is_world_known: bool = True


class RLRolloutWorker:
    """Collects episodes of one task with one policy. Its methods may run concurrently.

    Args:
        task_definition: the task.
        agent_policy: who acts. The worker opens a session for each episode and closes it, not the policy.
        max_episode_steps: overrides the task's.
        environment: a resource that is set up already; episodes run in forks of it. By default the task's
            `resource_type` is built.
        tools: the task's own tools. By default none; `runs.tasks` loads those of `tools_module_path`.
        policy_label: names the policy in ids and records; by default its class.
    """

    def __init__(
        self,
        task_definition: TaskDefinitionModel,
        agent_policy: AgentPolicy,
        max_episode_steps: int | None = None,
        environment: ForkableResource | None = None,
        *,
        tools: ToolRegistry | None = None,
        policy_label: str | None = None,
    ) -> None:
        self.task_definition = task_definition
        self.agent_policy = agent_policy
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ConfigError(f"max_episode_steps is at least 1, got {max_episode_steps}")
        self.max_episode_steps = max_episode_steps or task_definition.max_episode_steps
        self.environment = environment
        self.tools = tools
        self.policy_label = policy_label or type(agent_policy).__name__
        self._prompt = Prompt(task_definition)
        self._regex = re.compile(task_definition.termination_regex) if task_definition.termination_regex else None
        self._environment_lock = anyio.Lock()
        has_tools = bool(task_definition.resource_type or task_definition.terminate_tool)
        has_tools = has_tools or environment is not None or tools is not None
        self._ends_on_text = (task_definition.on_text or ("continue" if has_tools else "end")) == "end"

    async def run_episode(self, seed: int | None = None) -> tuple[list[StepData], list[Message], Any]:
        """Collect one episode of the task itself.

        Args:
            seed: the run's seed, 0 by default.

        Returns:
            The steps, the whole conversation, and the task's ground truth. A failure is logged and stands in the last
            step's `step_info["failure"]`.
        """
        episode = await self.collect_episode(seed=seed)
        steps = steps_of(episode)
        if failure := episode.custom_data["failure"]:
            logger.warning("episode %s failed: %s", episode.id_, failure["message"])
            if steps:
                steps[-1].step_info["failure"] = failure
        if steps:
            steps[-1].step_info["stop_reason"] = episode.custom_data["stop_reason"]
        return steps, list(episode.messages), episode.custom_data["ground_truth"]

    async def collect_episode(
        self, group: GroupStart | None = None, rollout_index: int = 0, *, seed: int | None = None
    ) -> SingleAgentEpisode:
        """Collect one episode; it always comes back, whatever fails.

        Args:
            group: where the episode starts. By default a group of one on the task itself.
            rollout_index: the episode's position in its group.
            seed: the run's seed, where no group is given.

        Returns:
            The episode. Its `custom_data` holds the ids, seeds, stop reason, failure, usage, timing and final state.
        """
        if group is not None:
            return await self._collect(group, rollout_index)
        sample = Sample(self.task_definition.name, ground_truth=self.task_definition.ground_truth)
        async with self.group(sample, seed or 0) as own:
            return await self._collect(own, rollout_index)

    def group(self, sample: Sample, run_seed: int = 0) -> GroupStart:
        """The start that the episodes of `sample` share."""
        return GroupStart(
            self.task_definition,
            sample,
            run_seed,
            policy_label=self.policy_label,
            environment=self.environment,
            environment_lock=self._environment_lock,
        )

    async def _collect(self, group: GroupStart, rollout_index: int) -> SingleAgentEpisode:
        began_at = datetime.datetime.now(datetime.UTC)
        start = group.identity(rollout_index)
        live = _Live(start, SingleAgentEpisode(start.rollout_id), time.perf_counter())
        try:
            with boundary(RewardKitError, f"episode {start.rollout_id}"):
                live.start = await group.episode(rollout_index)
                await self._drive(live)
        except RewardKitError as error:
            logger.info("episode %s failed", start.rollout_id, exc_info=error)
            self._stop(live, StopReason.ERROR, Failure.from_exception(error))
        finally:
            if live.start.world is not None:
                await close_quietly(live.start.world)
        self._record_facts(live, began_at)
        return live.episode

    async def _drive(self, live: _Live) -> None:
        """Reset, step until the episode is over, take the final state."""
        await self._begin(live)
        tools = Toolbox(self.task_definition, live.start.world, self.tools)
        context = EpisodeContext(live.start.rollout_id, live.start.seeds.policy, live.start.world)
        with boundary(PolicyError, f"open of {self.policy_label}"), anyio.fail_after(self._policy_seconds(live)):
            session = await self.agent_policy.open(context)
        try:
            while live.stop_reason is None:
                await self._step(live, session, tools)
        finally:
            await self._close_session(session)
        await self._take_final_state(live)

    async def _close_session(self, session: AgentPolicy) -> None:
        """Close a session, also while its task is being cancelled. A failure is worth a line, not the episode."""
        if session is self.agent_policy:
            return
        try:
            what = f"close of a session of {self.policy_label}"
            with boundary(PolicyError, what), anyio.fail_after(CLOSE_SECONDS, shield=True):
                await session.close()
        except RewardKitError as error:
            logger.warning("%s", error)

    async def _begin(self, live: _Live) -> None:
        shown = ""
        if live.start.world is not None:
            with self._look("get_observation"):
                shown = as_text(await live.start.world.get_observation())
        messages = self._prompt.render(live.start.sample, shown)
        live.episode.add_messages(messages)
        live.episode.add_env_reset(shown or "\n".join(message.text for message in messages))

    async def _step(self, live: _Live, session: AgentPolicy, tools: Toolbox) -> None:
        """One action and what comes of it."""
        clock = time.perf_counter()
        with self._look("state_key and get_tools_spec"):
            if live.start.world is not None:
                live.episode.get_infos(-1)["state_key"] = await live.start.world.state_key()
            specs = await tools.specs()
        observation = self._prepare_policy_observation(live.episode.messages)
        asked = time.perf_counter()
        output = await self._ask_policy(live, session, observation, specs)
        if output is None:
            return
        answered = time.perf_counter()
        with boundary(PolicyError, self.policy_label):
            to_json_value(output.action_structured)  # what cannot be stored is refused before it is carried out
            message = assistant_message(output.action_structured, len(live.episode))
        execution = await self._execute_action_in_environment(live, tools, output.action_structured)
        self._count_usage(live, output)
        stop_reason = self._check_termination(live, output, execution)
        if stop_reason is None and output.action_structured["type"] == "text":
            execution.messages.append(Message(role="user", content=self.task_definition.nudge))
        self._add_step(live, output, message, execution, stop_reason)
        if stop_reason is not None:
            self._stop(live, stop_reason, execution.failure)
        live.policy_s += answered - asked
        live.environment_s += (asked - clock) + (time.perf_counter() - answered)
        logger.debug("%s step %d: %s -> %s", live.episode.id_, len(live.episode) - 1, output[0], execution.info)

    def _prepare_policy_observation(self, current_messages_history: Sequence[Message]) -> Sequence[Message]:
        """What the policy sees: the conversation so far, read-only and not copied."""
        return History(current_messages_history, len(current_messages_history))

    async def _ask_policy(
        self, live: _Live, session: AgentPolicy, observation: Sequence[Message], specs: list[ToolSpec] | None
    ) -> PolicyOutput | None:
        """The policy's next action; None where the episode's time ran out instead."""
        limit, left = self.task_definition.limits.policy_time_s, self._seconds_left(live)
        if limit is None and left is None:
            with boundary(PolicyError, self.policy_label):
                return check_output(await session.get_action(observation, specs))
        with anyio.move_on_after(self._policy_seconds(live)) as scope, boundary(PolicyError, self.policy_label):
            return check_output(await session.get_action(observation, specs))
        if scope.cancelled_caught and left is not None and (limit is None or left < limit):
            self._stop(live, StopReason.WALL_TIME_LIMIT)
            return None
        with boundary(PolicyError, self.policy_label):
            raise TimeoutError(f"no action within {limit} s (limits.policy_time_s)")

    async def _execute_action_in_environment(self, live: _Live, tools: Toolbox, action: Action) -> Execution:
        """Carry out the action's tool calls, where it makes any."""
        if action["type"] not in ("tool_call", "tool_calls"):
            return Execution(info={"is_action_valid": True})
        execution = await tools.execute(action, len(live.episode), self._seconds_left(live))
        live.is_world_known = not execution.is_interrupted
        return execution

    def _check_termination(self, live: _Live, output: PolicyOutput, execution: Execution) -> StopReason | None:
        """Why the episode is over after this step; None where it goes on."""
        action, task = output.action_structured, self.task_definition
        text = output.raw_policy_output or action.get("content") or ""
        token_limit, seconds_left = task.limits.total_tokens, self._seconds_left(live)
        checks = (
            (StopReason.ERROR, execution.failure is not None),
            (StopReason.ENVIRONMENT_TERMINATED, execution.terminated),
            (StopReason.ENVIRONMENT_TRUNCATED, execution.truncated),
            (StopReason.TERMINATE_ACTION, action["type"] == "terminate" or execution.wants_end),
            (StopReason.STOP_PHRASE, any(phrase in text for phrase in task.stop_phrases)),
            (StopReason.TERMINATION_REGEX, self._regex is not None and self._regex.search(text) is not None),
            (StopReason.ANSWERED, action["type"] == "text" and self._ends_on_text),
            (StopReason.TOKEN_LIMIT, token_limit is not None and live.tokens_used >= token_limit),
            (StopReason.WALL_TIME_LIMIT, seconds_left is not None and seconds_left <= 0),
            (StopReason.MAX_STEPS, len(live.episode) + 1 >= self.max_episode_steps),
        )
        return next((reason for reason, holds in checks if holds), None)

    def _add_step(
        self, live: _Live, output: PolicyOutput, message: Message, execution: Execution, stop: StopReason | None
    ) -> None:
        """Write the step to the episode."""
        episode, logprobs, step = live.episode, output.log_probs or {}, len(live.episode)
        outputs = {"raw_policy_output": output.raw_policy_output, "value_estimate": output.value_estimate}
        tokens = {key: logprobs.get(key) for key in Turn._fields}
        if tokens["prompt_ids"] is not None and tokens["token_ids"] is not None:
            version = UNKNOWN_VERSION if tokens["policy_version"] is None else tokens["policy_version"]
            reason = logprobs.get("segment_reason") or REWRITTEN
            episode.tokens.add_turn(
                step, tokens["prompt_ids"], tokens["token_ids"], tokens["logprobs"], version, reason
            )
        else:
            outputs |= tokens
        episode.add_assistant_message(message)
        episode.add_messages(execution.messages)
        if execution.reward is None:
            execution.info["environment_reward"] = None
        execution.info |= {key: logprobs[key] for key in ("usage", "finish_reason") if logprobs.get(key)}
        episode.add_env_step(
            "\n".join(shown.text for shown in execution.messages),
            output.action_structured,
            execution.reward or 0.0,
            execution.info,
            terminated=stop is not None and stop.is_terminal,
            truncated=stop is not None and not stop.is_terminal,
            extra_model_outputs={key: value for key, value in outputs.items() if value is not None},
        )

    def _look(self, what: str) -> environment_call:
        return environment_call(what, self.task_definition.limits.environment_time_s)

    def _count_usage(self, live: _Live, output: PolicyOutput) -> None:
        facts = output.log_probs or {}
        usage = facts.get("usage") or {}
        for key, value in usage.items():
            if isinstance(value, int | float):
                live.usage[key] = live.usage.get(key, 0) + value
        reported = usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)
        # A local model reports no usage; its token ids say the same.
        live.tokens_used += int(reported) or len(facts.get("prompt_ids") or ()) + len(facts.get("token_ids") or ())

    def _policy_seconds(self, live: _Live) -> float | None:
        """How long the policy may take now."""
        limits = (self.task_definition.limits.policy_time_s, self._seconds_left(live))
        return min((seconds for seconds in limits if seconds is not None), default=None)

    def _seconds_left(self, live: _Live) -> float | None:
        limit = self.task_definition.limits.wall_time_s
        return None if limit is None else max(limit - (time.perf_counter() - live.began), 0.0)

    def _stop(self, live: _Live, reason: StopReason, failure: Failure | None = None) -> None:
        live.stop_reason, live.failure = reason, failure or live.failure
        live.episode.is_terminated, live.episode.is_truncated = reason.is_terminal, not reason.is_terminal

    async def _take_final_state(self, live: _Live) -> None:
        if live.start.world is not None and live.failure is None and live.is_world_known:
            with self._look("final_state"):
                snapshot = await live.start.world.final_state()
            if snapshot is not None:
                live.episode.custom_data["final_state"] = {"kind": snapshot.kind, "payload": snapshot.payload}

    def _record_facts(self, live: _Live, began_at: datetime.datetime) -> None:
        start, reason = live.start, live.stop_reason or StopReason.ERROR
        live.episode.custom_data.setdefault("final_state", None)
        live.episode.custom_data.update(
            sample_id=start.sample.id,
            group_id=start.group_id,
            rollout_index=start.rollout_index,
            policy=self.policy_label,
            stop_reason=reason.value,
            failure=live.failure.to_json() if live.failure else None,
            seeds=asdict(start.seeds),
            start={"fork": start.fork, "state_key": start.state_key, "verified": start.verified},
            sample=dict(start.sample.row),
            ground_truth=start.sample.ground_truth,
            usage=dict(live.usage),
            timing={
                "started_at": began_at.isoformat(timespec="milliseconds"),
                "duration_s": round(time.perf_counter() - live.began, 6),
                "policy_s": round(live.policy_s, 6),
                "environment_s": round(live.environment_s, 6),
            },
        )
