"""`RLRolloutWorker`: drives a policy through one episode and records it.

The worker turns (task, policy, environment) into an episode and knows nothing of rewards. Each action of the policy
appends exactly one assistant message and is one step, however many tools it calls. Whatever fails is recorded on the
episode; an episode never takes its siblings with it.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from reward_kit.agent.budget import RunBudget, Used
from reward_kit.agent.chat_actions import assistant_message
from reward_kit.agent.clock import EpisodeClock
from reward_kit.agent.execution import Execution, Toolbox, answers_of
from reward_kit.agent.live_episode import LiveEpisode
from reward_kit.agent.models import History, StepData, StopReason, steps_of
from reward_kit.agent.plain_json import as_text
from reward_kit.agent.policy_interface import (
    Action,
    AgentPolicy,
    EpisodeContext,
    PolicyOutput,
    ToolAnswer,
    next_action,
    open_session,
)
from reward_kit.agent.samples import Prompt, Sample
from reward_kit.agent.simulated_user import WHO, SimulatedUser, UserSession, UserTurn
from reward_kit.agent.starts import GroupStart
from reward_kit.agent.world_calls import CLOSE_SECONDS, close_quietly, environment_call
from reward_kit.environments.base import ForkableResource, ToolSpec
from reward_kit.environments.tools import ToolRegistry
from reward_kit.episodes.json_codec import to_json_value
from reward_kit.episodes.record import facts_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, Failure, LimitError, PolicyError, RewardKitError, boundary
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.providers.request_queue import WHILE_WAITING

logger = logging.getLogger("reward_kit.agent")


class RLRolloutWorker:
    """Collects episodes of one task with one policy. Its methods may run concurrently.

    Args:
        task_definition: the task.
        agent_policy: who acts. The worker opens a session for each episode and closes it, not the policy.
        max_episode_steps: overrides the task's.
        environment: a resource that is set up already; episodes run in forks of it. By default the task's
            `resource_type` is built.
        tools: the task's own tools; `runs.tasks` loads those of `tools_module_path`.
        user: who answers the agent's texts; `runs.users` makes the one of the task's `user`.
        budget: what all episodes of a run may use together; by default there is no bound.
        policy_label: names the policy in ids and records; by default its class.

    Raises:
        ConfigError: the task names tools, a user or a server, and nobody has loaded them.
    """

    def __init__(
        self,
        task_definition: TaskDefinitionModel,
        agent_policy: AgentPolicy,
        max_episode_steps: int | None = None,
        environment: ForkableResource | None = None,
        *,
        tools: ToolRegistry | None = None,
        user: SimulatedUser | None = None,
        budget: RunBudget | None = None,
        policy_label: str | None = None,
    ) -> None:
        _refuse_what_is_not_loaded(task_definition, tools, user)
        self.task_definition = task_definition
        self.agent_policy = agent_policy
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ConfigError(f"max_episode_steps is at least 1, got {max_episode_steps}")
        self.max_episode_steps = max_episode_steps or task_definition.max_episode_steps
        self.environment = environment
        self.tools = tools
        self.user = user
        self.budget = budget or RunBudget()
        self.policy_label = policy_label or type(agent_policy).__name__
        self._prompt = Prompt(task_definition)
        self._regex = re.compile(task_definition.termination_regex) if task_definition.termination_regex else None
        self._environment_lock = anyio.Lock()
        has_tools = bool(task_definition.resource_type or task_definition.terminate_tool)
        goes_on = has_tools or environment is not None or tools is not None or user is not None
        self._ends_on_text = (task_definition.on_text or ("continue" if goes_on else "end")) == "end"

    async def run_episode(self, seed: int | None = None) -> tuple[list[StepData], list[Message], Any]:
        """Collect one episode of the task itself.

        Args:
            seed: the run's seed, 0 by default.

        Returns:
            The steps, the whole conversation, and the task's ground truth. A failure is logged and stands in the last
            step's `step_info["failure"]`.
        """
        episode = await self.collect_episode(seed=seed)
        steps, facts = steps_of(episode), facts_of(episode)
        if failure := facts["failure"]:
            logger.warning("episode %s failed: %s", episode.id_, failure["message"])
            if steps:
                steps[-1].step_info["failure"] = failure
        if steps:
            steps[-1].step_info["stop_reason"] = facts["stop_reason"]
        return steps, list(episode.messages), facts["ground_truth"]

    async def collect_episode(
        self, group: GroupStart | None = None, rollout_index: int = 0, *, seed: int | None = None
    ) -> SingleAgentEpisode:
        """Collect one episode; it always comes back, whatever fails.

        Args:
            group: where the episode starts. By default a group of one on the task itself.
            rollout_index: the episode's position in its group.
            seed: the run's seed, where no group is given.

        Returns:
            The episode. Its `custom_data` holds the ids, seeds, stop reason and more: `EpisodeFacts`.
        """
        if group is not None:
            return await self._collect(group, rollout_index)
        async with self.group(Sample.of_task(self.task_definition), seed or 0) as own:
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
        start = group.identity(rollout_index)
        clock = EpisodeClock(self.task_definition.limits.wall_time_s)
        live = LiveEpisode(start, SingleAgentEpisode(start.rollout_id), clock=clock)
        WHILE_WAITING.set(clock.paused)
        try:
            with boundary(RewardKitError, f"episode {start.rollout_id}"):
                live.start = await group.episode(rollout_index)
                await self._drive(live)
        except RewardKitError as error:
            logger.info("episode %s failed", start.rollout_id, exc_info=error)
            live.stop(StopReason.ERROR, Failure.from_exception(error))
        finally:
            if live.start.world is not None:
                await close_quietly(live.start.world)
        live.record_facts(self.policy_label)
        return live.episode

    async def _drive(self, live: LiveEpisode) -> None:
        """Reset, step until the episode is over, take the final state."""
        tools = Toolbox(self.task_definition, live.start.world, self.tools)
        session: AgentPolicy | None = None
        user: UserSession | None = None
        try:
            with boundary(PolicyError, f"open of {self.policy_label}"), anyio.fail_after(self._policy_seconds(live)):
                user = await self.user.open(live.start) if self.user is not None else None
                session = await open_session(self.agent_policy, self._context(live, tools))
            await self._begin(live, user)
            while live.stop_reason is None:
                await self._step(live, session, tools, user)
            if live.failure is None:
                with boundary(PolicyError, self.policy_label), anyio.fail_after(CLOSE_SECONDS):
                    await session.see_end(History(live.episode.messages, len(live.episode.messages)))
        finally:
            await self._close_sessions(session, user)
        await self._take_final_state(live)

    def _context(self, live: LiveEpisode, tools: Toolbox) -> EpisodeContext:
        """What the policy's session may know, and how it calls tools in its own time."""
        start = live.start

        async def call_tool(name: str, arguments: Mapping[str, Any] | str) -> ToolAnswer:
            live.outside = done = live.outside or Execution()
            key = "arguments_text" if isinstance(arguments, str) else "arguments"
            call = {"type": "tool_call", "name": name, key: arguments}
            was_known, live.is_world_known = live.is_world_known, False  # and so it stays where the call is cut off
            await tools.execute(call, len(live.episode), live.clock.left_s, done)
            live.is_world_known = was_known and not done.is_interrupted
            live.record_own_call(name, arguments)
            return ToolAnswer(done.messages[-1].text, done.is_over)

        return EpisodeContext(
            start.rollout_id, start.seeds.policy, start.world, start.sample.id, start.rollout_index, call_tool
        )

    async def _close_sessions(self, session: AgentPolicy | None, user: UserSession | None) -> None:
        """Close sessions, also while their task is being cancelled. A failure is worth a line, not the episode."""
        for open_one in (user, session):
            if open_one is None or open_one is self.agent_policy:
                continue
            try:
                what = f"close of a session of {self.policy_label}"
                with boundary(PolicyError, what), anyio.fail_after(CLOSE_SECONDS, shield=True):
                    await open_one.close()
            except RewardKitError as error:
                logger.warning("%s", error)

    async def _begin(self, live: LiveEpisode, user: UserSession | None) -> None:
        shown = ""
        if live.start.world is not None:
            with self._look("get_observation", live.start.world):
                shown = as_text(await live.start.world.get_observation())
        messages, opening = self._prompt.render(live.start.sample, shown), None
        if user is not None and user.begins(messages, shown):
            opening = await self._ask_user(live, user, messages)
            messages += opening.messages()
        live.episode.add_messages(messages)
        infos = {"user": opening.facts} if opening is not None else None
        live.episode.add_env_reset(shown or "\n".join(message.text for message in messages), infos)
        if opening is not None and opening.is_over:
            live.stop(StopReason.USER_STOPPED)

    async def _step(self, live: LiveEpisode, session: AgentPolicy, tools: Toolbox, user: UserSession | None) -> None:
        """One action and what comes of it."""
        clock = time.perf_counter()
        with self._look("state_key and get_tools_spec", live.start.world):
            if live.start.world is not None:
                live.episode.get_infos(-1)["state_key"] = await live.start.world.state_key()
            specs = await tools.specs()
        asked = time.perf_counter()
        output = await self._ask_policy(live, session, specs)
        if output is None:
            return
        answered = time.perf_counter()
        action = output.action_structured
        with boundary(PolicyError, self.policy_label):
            to_json_value(action)  # what cannot be stored is refused before it is carried out
            message = assistant_message(action, len(live.episode))
        live.adopt_prompt(action)
        execution = await self._execute_action_in_environment(live, tools, action)
        self._count_usage(live, output)
        stop_reason = self._check_termination(live, output, execution)
        if stop_reason is None and action["type"] == "text" and "results" not in action:
            stop_reason = await self._answer_text(live, user, message, execution)
        live.add_step(output, message, execution, stop_reason)
        if stop_reason is not None:
            live.stop(stop_reason, execution.failure)
        live.policy_s += answered - asked
        live.environment_s += (asked - clock) + (time.perf_counter() - answered)
        logger.debug("%s step %d: %s -> %s", live.episode.id_, len(live.episode) - 1, output[0], execution.info)

    async def _ask_user(self, live: LiveEpisode, user: UserSession, messages: Sequence[Message]) -> UserTurn:
        """The simulated user's next message."""
        with boundary(PolicyError, WHO):
            with live.clock.deadline(self._policy_seconds(live)) as scope:
                turn = await user.reply(messages)
            if scope.cancelled_caught:
                raise self._late()
        used = live.count_usage(turn.facts, live.user_usage)
        self.budget.spend(used)
        self._refuse_unknown_cost(used, WHO, is_free=self.user is None or self.user.is_free)
        return turn

    async def _ask_policy(
        self, live: LiveEpisode, session: AgentPolicy, specs: list[ToolSpec] | None
    ) -> PolicyOutput | None:
        """The policy's next action; None where the episode's time ran out, or its model's context, instead."""
        limit, left = self.task_definition.limits.policy_time_s, live.clock.left_s
        conversation = History(live.episode.messages, len(live.episode.messages))
        try:
            with live.clock.deadline(self._policy_seconds(live)), boundary(PolicyError, self.policy_label):
                return await next_action(session, conversation, specs)
        except LimitError as error:
            logger.info("episode %s: %s", live.episode.id_, error)
            live.stop(StopReason.CONTEXT_LIMIT)
            return None
        if left is not None and (limit is None or left < limit):
            live.stop(StopReason.WALL_TIME_LIMIT)
            return None
        with boundary(PolicyError, self.policy_label):
            raise self._late()

    def _late(self) -> TimeoutError:
        return TimeoutError(f"no answer within {self.task_definition.limits.policy_time_s} s (limits.policy_time_s)")

    async def _execute_action_in_environment(self, live: LiveEpisode, tools: Toolbox, action: Action) -> Execution:
        """Carry out the action's tool calls, where it makes any and did not make them itself."""
        if "results" in action:
            execution = live.take_outside()
            execution.messages = answers_of(action)
            execution.info.setdefault("is_action_valid", True)
            return execution
        if action["type"] not in ("tool_call", "tool_calls"):
            return Execution(info={"is_action_valid": True})
        execution = await tools.execute(action, len(live.episode), live.clock.left_s)
        live.is_world_known = not execution.is_interrupted
        return execution

    async def _answer_text(
        self, live: LiveEpisode, user: UserSession | None, said: Message, execution: Execution
    ) -> StopReason | None:
        """What the agent hears after a text: the user's answer, or a nudge. Why that ends the episode, if it does."""
        if user is None:
            execution.messages.append(Message(role="user", content=self.task_definition.nudge))
            return None
        try:
            turn = await self._ask_user(live, user, [*live.episode.messages, said])
        except RewardKitError as error:
            if live.clock.left_s == 0:
                return StopReason.WALL_TIME_LIMIT
            logger.info("the user of episode %s failed", live.episode.id_, exc_info=error)
            execution.failure = Failure.from_exception(error)
            return StopReason.ERROR
        execution.messages += turn.messages()
        execution.info["user"] = turn.facts
        return StopReason.USER_STOPPED if turn.is_over else None

    def _check_termination(self, live: LiveEpisode, output: PolicyOutput, execution: Execution) -> StopReason | None:
        """Why the episode is over after this step; None where it goes on."""
        action, task = output.action_structured, self.task_definition
        text = output.raw_policy_output or action.get("content") or ""
        limits, seconds_left = task.limits, live.clock.left_s
        is_cut = (output.log_probs or {}).get("finish_reason") == "length"
        checks = (
            (StopReason.ERROR, execution.failure is not None),
            (StopReason.ENVIRONMENT_TERMINATED, execution.terminated),
            (StopReason.ENVIRONMENT_TRUNCATED, execution.truncated),
            (StopReason.TERMINATE_ACTION, action["type"] == "terminate" or execution.wants_end),
            (StopReason.STOP_PHRASE, any(phrase in text for phrase in task.stop_phrases)),
            (StopReason.TERMINATION_REGEX, self._regex is not None and self._regex.search(text) is not None),
            (StopReason.OUTPUT_LIMIT, self._is_answer(action) and is_cut),
            (StopReason.ANSWERED, self._is_answer(action)),
            (StopReason.COST_LIMIT, limits.cost is not None and live.cost >= limits.cost),
            (StopReason.TOKEN_LIMIT, limits.total_tokens is not None and live.tokens_used >= limits.total_tokens),
            (StopReason.WALL_TIME_LIMIT, seconds_left is not None and seconds_left <= 0),
            (StopReason.MAX_STEPS, len(live.episode) + 1 >= self.max_episode_steps),
            (StopReason.RUN_LIMIT, self.budget.exhausted() is not None),
        )
        return next((reason for reason, holds in checks if holds), None)

    def _is_answer(self, action: Action) -> bool:
        """The policy is done: it says so, or it gave a text that nobody answers."""
        # A policy that runs a loop of its own may go on after a text.
        is_last_text = action["type"] == "text" and "results" not in action and self._ends_on_text
        return bool(action.get("is_final")) or is_last_text

    def _count_usage(self, live: LiveEpisode, output: PolicyOutput) -> None:
        """Add what an action used to the episode's account and the run's."""
        used = live.count_usage(output.log_probs)
        self.budget.spend(used, steps=1)
        self._refuse_unknown_cost(used, self.policy_label, is_free=self.agent_policy.is_free)

    def _refuse_unknown_cost(self, used: Used, who: str, *, is_free: bool) -> None:
        bounded = self.task_definition.limits.cost is not None or self.budget.limits.cost is not None
        if bounded and used.cost is None and not is_free:
            raise PolicyError(f"{who} did not say what this action cost, so the limit on cost cannot be kept")

    def _look(self, what: str, world: ForkableResource | None) -> environment_call:
        return environment_call(what, self.task_definition.limits.environment_time_s, world)

    def _policy_seconds(self, live: LiveEpisode) -> float | None:
        """How long the policy may take now."""
        limits = (self.task_definition.limits.policy_time_s, live.clock.left_s)
        return min((seconds for seconds in limits if seconds is not None), default=None)

    async def _take_final_state(self, live: LiveEpisode) -> None:
        if live.start.world is not None and live.failure is None and live.is_world_known:
            with self._look("final_state", live.start.world):
                snapshot = await live.start.world.final_state()
            if snapshot is not None:
                facts_of(live.episode)["final_state"] = {"kind": snapshot.kind, "payload": snapshot.payload}


def _refuse_what_is_not_loaded(
    task: TaskDefinitionModel, tools: ToolRegistry | None, user: SimulatedUser | None
) -> None:
    """A definition is only words: what it names has to be given besides, or the episodes would lack it in silence."""
    missing = {
        "tools_module_path": task.tools_module_path is not None and tools is None,
        "user": task.user is not None and user is None,
        "resource_server": task.resource_server is not None and not _knows_server(task.base_resource_config),
    }
    if left_out := next((key for key, is_missing in missing.items() if is_missing), None):
        raise ConfigError(
            f"task {task.name!r}: {left_out} is named, and what it names is not here: pass what "
            "runs.tasks.load_task and runs.users.make_user make of the task file, or take the key out"
        )


def _knows_server(config: Mapping[str, Any]) -> bool:
    parts = config.get("resources") or ()
    return "resource_server" in config or any("resource_server" in (part.get("config") or {}) for part in parts)
