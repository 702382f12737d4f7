"""`RLRolloutWorker`, which runs a policy through an episode and records it.

An episode consists of the start (`starts.py`), a reset, steps, the final state and the close. In each step, the worker
requests an action from the policy, executes its tool calls with `tool_execution.py`, lets a simulated user answer,
checks whether the episode is over, and records the results. The worker does not compute rewards. Each action adds
exactly one assistant message and is one step, however many tools it calls. A failure is recorded in its episode and
does not affect the others.
"""

from __future__ import annotations

import datetime
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import anyio

from reward_kit.agent.actions import as_text, assistant_message, to_plain_data
from reward_kit.agent.limits import ActionUsage, EpisodeClock, RunBudget
from reward_kit.agent.models import (
    LOG_PROBS_KEYS,
    History,
    SeenResults,
    StepData,
    StopReason,
    episode_steps,
    write_log_probs,
)
from reward_kit.agent.policy_interface import (
    OWN_ACCOUNT,
    AgentPolicy,
    EpisodeContext,
    PolicyOutput,
    ToolAnswer,
    next_action,
    open_session,
)
from reward_kit.agent.samples import Prompt, Sample
from reward_kit.agent.starts import CLOSE_SECONDS, EpisodeStart, GroupStart, SharedEnvironment, environment_call
from reward_kit.agent.tool_execution import Execution, Toolbox
from reward_kit.environments.base import ForkableResource, StateSnapshot, ToolSpec, hash_key
from reward_kit.environments.elicitation import CURRENT_USER, UserAnswer, without_deadline
from reward_kit.environments.state_changes import state_changes
from reward_kit.environments.tools import ToolRegistry
from reward_kit.episodes.json_codec import to_json_value
from reward_kit.episodes.record import EpisodeFacts, episode_to_record, get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import (
    ConfigError,
    EnvironmentFailure,
    Failure,
    LimitError,
    PolicyError,
    RewardKitError,
    boundary,
    did_you_mean,
    type_name,
)
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.providers.model_calls import MODEL_CALLS, ModelCall, calls_of
from reward_kit.providers.request_queue import WHILE_WAITING
from reward_kit.telemetry.current import CURRENT_TELEMETRY, EpisodeSpans

if TYPE_CHECKING:
    from reward_kit.agent.simulated_user import SimulatedUser, UserSession, UserTurn

logger = logging.getLogger("reward_kit.agent")
A = TypeVar("A")
R = TypeVar("R")


class TaskLike(Protocol):
    """A task together with the objects that its file names, such as a `reward_kit.Task`."""

    @property
    def definition(self) -> TaskDefinitionModel: ...
    @property
    def samples(self) -> Sequence[Sample]: ...
    @property
    def tools(self) -> ToolRegistry | None: ...
    @property
    def user(self) -> SimulatedUser | None: ...


class FirstRequest(NamedTuple):
    """The input for the first action of a policy.

    Attributes:
        messages: the first messages. If the simulated user speaks first, its message is not included, because a model
            may have to write it.
        tools: the tools that the policy can call.
        user_opens: True if the simulated user speaks first.
    """

    messages: list[Message]
    tools: list[ToolSpec]
    user_opens: bool = False


class EpisodeGroup(list[list[StepData]]):
    """The steps of the episodes in a group, in rollout order.

    `system_apply_gigpo_to_batch_steps` accepts this list.

    Attributes:
        episodes: (G,) the records of the episodes, for `build_rows`.
        messages: (G,) the conversations.
        failures: (G,) the reason why each episode failed, or None. An episode that failed before its first step has no
            steps. Its score should be None rather than 0.
        ground_truth: the ground truth of the sample.
    """

    def __init__(
        self,
        steps: Iterable[list[StepData]],
        episodes: Iterable[SingleAgentEpisode],
        failures: Iterable[Failure | None],
    ) -> None:
        super().__init__(steps)
        self.episodes, self.failures = list(episodes), list(failures)
        self.messages = [list(episode.messages) for episode in self.episodes]
        self.ground_truth = get_facts(self.episodes[0])["ground_truth"]


class RLRolloutWorker:
    """A collector of episodes of one task with one policy. Its methods may run concurrently.

    Args:
        task_definition: the task: a `Task` with its samples, tools and user, a `TaskDefinitionModel`, or the class of a
            resource.
        agent_policy: the agent. The worker opens and closes a session for each episode, but does not close the policy.
        max_episode_steps: the maximum number of steps, which overrides the limit of the task.
        environment: a resource that you have set up and will close. Episodes run in forks of its current state. If it
            cannot be forked, they run one at a time, and each one except the first starts after a reset. By default,
            the worker creates the `resource_type` of the task.
        tools: the tools that the task defines. By default, those of a `Task`.
        user: the simulated user, which answers when the agent writes text. By default, that of a `Task`.
        budget: a budget that all episodes of a run share. By default, no limit applies.
        policy_label: the name of the policy in ids and records. By default, the name of its class.

    Raises:
        ConfigError: If the task names tools, a user or a server that were not passed.
    """

    def __init__(
        self,
        task_definition: TaskDefinitionModel | TaskLike | type[ForkableResource],
        agent_policy: AgentPolicy,
        max_episode_steps: int | None = None,
        environment: ForkableResource | None = None,
        *,
        tools: ToolRegistry | None = None,
        user: SimulatedUser | None = None,
        budget: RunBudget | None = None,
        policy_label: str | None = None,
    ) -> None:
        kind, sample = None, None
        if isinstance(task_definition, type) and issubclass(task_definition, ForkableResource):
            kind, task_definition = task_definition, TaskDefinitionModel(name=task_definition.__name__)
        elif not isinstance(task_definition, TaskDefinitionModel):
            task = task_definition
            if not (hasattr(task, "definition") and hasattr(task, "samples")):
                raise ConfigError(
                    "task_definition must be a Task, a TaskDefinitionModel or a subclass of "
                    f"ForkableResource, got {type_name(task)}; use Task.from_file to load a task file"
                )
            task_definition, sample = task.definition, task.samples[0]
            tools, user = tools or task.tools, user or task.user
        _check_loaded(task_definition, tools, user)
        for name, value in (("agent_policy", agent_policy), ("environment", environment)):
            if isinstance(value, type):
                raise ConfigError(f"{name} is the class {value.__name__}; pass an instance")
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ConfigError(f"max_episode_steps must be at least 1, got {max_episode_steps}")
        self.task_definition = task_definition
        self.agent_policy = agent_policy
        self.max_episode_steps = max_episode_steps or task_definition.max_episode_steps
        self.environment = environment
        self.sample = sample or Sample.from_task(task_definition)
        self.tools = tools
        self.user = user
        self.budget = budget or RunBudget()
        self.policy_label = policy_label or type(agent_policy).__name__
        self._reported_keys: set[str] = {*LOG_PROBS_KEYS}
        self._reported_tools: set[str] = set()
        self._prompt = Prompt(task_definition)
        self._regex = re.compile(task_definition.termination_regex) if task_definition.termination_regex else None
        self._shared = SharedEnvironment(environment) if environment is not None else None
        self._kind = kind
        self._next_rollout: Counter[str] = Counter()  # by group id
        self._first_keys: dict[str, str] = {}
        has_world = bool(kind or task_definition.resource_type or environment is not None)
        has_tools = (has_world or tools is not None) and task_definition.tools != []
        continues = has_tools or bool(task_definition.terminate_tool) or user is not None
        self._ends_on_text = (task_definition.on_text or ("continue" if continues else "end")) == "end"

    async def run_episode(
        self, seed: int | None = None, *, sample: Sample | None = None
    ) -> tuple[list[StepData], list[Message], Any]:
        """Collect the next episode of a sample. Repeated and concurrent calls collect the rollouts of one group.

        The n-th call with the same seed and sample collects rollout n of their group. All rollouts of the group have
        the same start and group id, but different policy seeds. A new worker starts counting from 0.

        Args:
            seed: the seed of the run, which determines the start. The default is 0.
            sample: the initial condition. By default, the first sample of the task.

        Returns:
            The steps, the whole conversation, and the ground truth. If the episode fails after the first step, the
            failure is logged and stored in `step_info["failure"]` of the last step.

        Raises:
            RewardKitError: If the episode failed before its first step. The error has the type of the original failure.
        """
        async with self._own_group(seed, sample) as group:
            steps, episode, failure = await self._next_episode(group)
        if failure is not None and not steps:
            raise failure.to_exception()
        return steps, list(episode.messages), get_facts(episode)["ground_truth"]

    async def run_group(self, size: int, seed: int | None = None, *, sample: Sample | None = None) -> EpisodeGroup:
        """Collect the next `size` episodes of a sample concurrently, all from the same start.

        Args:
            size: the number of episodes, G.
            seed: the seed of the run, as in `run_episode`.
            sample: the initial condition, as in `run_episode`.

        Raises:
            RewardKitError: If every episode failed before its first step. The error has the type of the first failure.
        """
        if size < 1:
            raise ConfigError(f"size must be at least 1, got {size}")
        async with self._own_group(seed, sample) as group:
            collected = await gather(self._next_episode, [group] * size)
        steps, episodes, failures = zip(*collected, strict=True)
        if not any(steps) and failures[0] is not None:
            raise failures[0].to_exception()
        return EpisodeGroup(steps, episodes, failures)

    async def first_request(self, seed: int | None = None, *, sample: Sample | None = None) -> FirstRequest:
        """Return the messages and tools for the first action of the policy, without calling the policy or the user.

        Args:
            seed: the seed of the run, as in `run_episode`.
            sample: the initial condition, as in `run_episode`.

        Raises:
            RewardKitError: If the environment cannot be started, or a template does not fit the sample.
        """
        was_used = self._shared is not None and self._shared.was_used
        async with self.group(sample or self.sample, seed or 0) as group:
            start = await group.episode(0)
            try:
                observation = await self._observe(start.resource)
                messages = self._prompt.render(start.sample, observation)
                with self._environment_call("get_tools_spec", start.resource):
                    specs = await Toolbox(self.task_definition, start.resource, self.tools).specs()
                opens = self.user is not None and self.user.speaks_first(messages, observation)
                return FirstRequest(messages, specs or [], opens)
            finally:
                if self._shared is not None:
                    self._shared.was_used = was_used  # no state was changed, so an episode need not reset it
                await group.finish(start)

    def _own_group(self, seed: int | None, sample: Sample | None) -> GroupStart:
        return self._group_start(sample or self.sample, seed or 0, self._first_keys)

    async def _next_episode(self, group: GroupStart) -> tuple[list[StepData], SingleAgentEpisode, Failure | None]:
        """Collect the next rollout of a group, and return its steps, its record and its failure."""
        index = self._next_rollout[group.group_id]
        self._next_rollout[group.group_id] += 1
        episode = await self.collect_episode(group, index)
        steps, facts = episode_steps(episode), get_facts(episode)
        failure = Failure.from_json(facts["failure"]) if facts["failure"] else None
        if failure is not None:
            logger.warning("episode %s failed: %s", episode.id_, failure.message)
        if steps:
            steps[-1].step_info["stop_reason"] = facts["stop_reason"]
            if failure is not None:
                steps[-1].step_info["failure"] = facts["failure"]
        return steps, episode, failure

    async def collect_episode(
        self, group: GroupStart | None = None, rollout_index: int = 0, *, seed: int | None = None
    ) -> SingleAgentEpisode:
        """Collect one episode. A failure is recorded in the episode, and no error is raised.

        Args:
            group: the start of the episode. By default, a new group for the task itself.
            rollout_index: the position of the episode in its group.
            seed: the seed of the run, which is used only without a `group`.

        Returns:
            The episode. Its `custom_data` contains the ids, the seeds, the stop reason and the other `EpisodeFacts`.
        """
        if group is None:
            async with self.group(self.sample, seed or 0) as group:
                return await self.collect_episode(group, rollout_index)
        start = group.identity(rollout_index)
        clock = EpisodeClock(self.task_definition.limits.wall_time_s)
        live = LiveEpisode(start, SingleAgentEpisode(start.rollout_id), clock=clock)
        if (telemetry := CURRENT_TELEMETRY.get()) is None:
            return await self._collect(group, rollout_index, live)
        with telemetry.episode(start.rollout_id, live.began_at) as live.spans:
            episode = await self._collect(group, rollout_index, live)
        telemetry.end_episode(episode_to_record(episode))
        return episode

    async def _collect(self, group: GroupStart, rollout_index: int, live: LiveEpisode) -> SingleAgentEpisode:
        start, clock = live.start, live.clock
        WHILE_WAITING.set(clock.paused)
        CURRENT_USER.set(partial(self._answer_form, live) if self.user is not None else None)
        calls_token = MODEL_CALLS.set(live.model_calls)
        try:
            with boundary(RewardKitError, f"episode {start.rollout_id}"):
                live.start = await group.episode(rollout_index)
                await self._run(live)
        except RewardKitError as error:
            logger.info("episode %s failed", start.rollout_id, exc_info=error)
            live.stop(StopReason.ERROR, Failure.from_exception(error))
        finally:
            MODEL_CALLS.reset(calls_token)
            await group.finish(live.start)
        live.record_facts(self.policy_label)
        return live.episode

    def group(self, sample: Sample, run_seed: int = 0) -> GroupStart:
        """Return the start that all episodes of a sample share."""
        return self._group_start(sample, run_seed)

    def _group_start(self, sample: Sample, run_seed: int, first_keys: dict[str, str] | None = None) -> GroupStart:
        return GroupStart(
            self.task_definition,
            sample,
            run_seed,
            policy_label=self.policy_label,
            environment=self._shared,
            kind=self._kind,
            first_keys=first_keys,
        )

    async def _run(self, live: LiveEpisode) -> None:
        """Run an episode: open the sessions, reset the environment, take the steps, and record the final state."""
        resource = live.start.resource
        tools = live.tools = Toolbox(self.task_definition, resource, self.tools, live.spans)
        session: AgentPolicy | None = None
        user: UserSession | None = None
        try:
            with boundary(PolicyError, f"open of {self.policy_label}"), anyio.fail_after(self._policy_limit(live)[0]):
                user = live.user = await self.user.open(live.start) if self.user is not None else None
                session = await open_session(self.agent_policy, self._context(live, tools))
            await self._reset(live, user)
            while live.stop_reason is None:
                with live.spans.step(len(live.episode)):
                    await self._step(live, session, tools, user)
            if live.failure is None:
                with boundary(PolicyError, self.policy_label), anyio.fail_after(CLOSE_SECONDS):
                    await session.on_episode_end(History(live.episode.messages, len(live.episode.messages)))
        finally:
            for opened in (user, session):
                if opened is None or opened is self.agent_policy:
                    continue
                try:
                    what = f"close of a session of {self.policy_label}"
                    with boundary(PolicyError, what), anyio.fail_after(CLOSE_SECONDS, shield=True):
                        await opened.close()
                except RewardKitError as error:
                    logger.warning("%s", error)
        if resource is not None and live.failure is None and live.is_state_known:
            with self._environment_call("final_state", resource):
                snapshot = await resource.final_state()
                if not isinstance(snapshot, StateSnapshot | None):
                    raise EnvironmentFailure(
                        f"final_state of {type(resource).__name__} must return a StateSnapshot, such as "
                        f"StateSnapshot.from_json(value), got {type_name(snapshot)}"
                    )
            if snapshot is not None:
                facts = get_facts(live.episode)
                facts["final_state"] = {"kind": snapshot.kind, "payload": snapshot.payload}
                if live.start.state is not None:
                    changes = await anyio.to_thread.run_sync(state_changes, live.start.state, snapshot)
                    if changes is not None:
                        facts["state_changes"] = changes

    def _context(self, live: LiveEpisode, tools: Toolbox) -> EpisodeContext:
        """Return the context for the session of the policy, with a function that calls tools while the policy acts."""
        start = live.start

        async def call_tool(name: str, arguments: Mapping[str, Any] | str) -> ToolAnswer:
            live.own_calls = done = live.own_calls or Execution()
            key = "arguments_text" if isinstance(arguments, str) else "arguments"
            was_known, live.is_state_known = live.is_state_known, False  # remains False if the call is cancelled
            await tools.execute(
                {"type": "tool_call", "name": name, key: arguments}, len(live.episode), live.clock.left_s, done
            )
            live.is_state_known = was_known and not done.is_interrupted
            answer = done.messages[-1].text
            stored = arguments if isinstance(arguments, str) else to_plain_data(dict(arguments))
            call = {"name": name, "arguments": stored, "answer": hash_key(answer)}  # for a replay
            done.info.setdefault("own_calls", []).append(call)
            return ToolAnswer(answer, done.is_over)

        return EpisodeContext(
            start.rollout_id, start.seeds.policy, start.resource, start.sample.id, start.rollout_index, call_tool
        )

    async def _reset(self, live: LiveEpisode, user: UserSession | None) -> None:
        """Record the first messages and observation."""
        observation = await self._observe(live.start.resource)
        messages, opening = self._prompt.render(live.start.sample, observation), None
        stop_reason: StopReason | None = None
        if user is not None and user.speaks_first(messages, observation):
            opening = await self._ask_user(live, user, messages)
            if opening is None:
                stop_reason = StopReason.WALL_TIME_LIMIT
            else:
                messages += opening.messages()
                stop_reason = StopReason.USER_STOPPED if opening.is_over else None
        live.episode.add_messages(messages)
        infos = {"user": opening.facts} if opening is not None else None
        live.episode.add_env_reset(observation or "\n".join(message.text for message in messages), infos)
        if stop_reason is not None:
            live.stop(stop_reason)

    async def _observe(self, resource: ForkableResource | None) -> str:
        """Return the first observation of the environment, or "" if none exists or the task hides it."""
        if resource is None or not self.task_definition.observation:
            return ""
        with self._environment_call("get_observation", resource):
            return as_text(await resource.get_observation())

    async def _step(self, live: LiveEpisode, session: AgentPolicy, tools: Toolbox, user: UserSession | None) -> None:
        """Request one action, execute it, and record both the action and its results."""
        episode, resource = live.episode, live.start.resource
        began = time.perf_counter()
        times = [began]
        live.step_times.append(times)
        with self._environment_call("state_key and get_tools_spec", resource):
            if resource is not None:
                before = episode.get_infos(-1)
                before["state_key"] = state_key = await resource.state_key()
                if not resource.state_key_covers_results:
                    before["state_and_results"] = live.seen.key_with(state_key)
            specs = await tools.specs()
        if not len(episode):
            self._report_missing_tools(tools.missing)
        requested = time.perf_counter()
        times.append(requested)
        seconds, is_wall_time = self._policy_limit(live)
        try:
            with live.clock.deadline(seconds) as scope, boundary(PolicyError, self.policy_label):
                conversation = History(episode.messages, len(episode.messages))
                output = await next_action(
                    session,
                    conversation,
                    specs,
                    label=self.policy_label,
                    has_acted=lambda: live.own_calls is not None,
                )
        except LimitError as error:
            logger.info("episode %s: %s", episode.id_, error)
            live.stop(StopReason.CONTEXT_LIMIT)
            return
        if scope is not None and scope.cancelled_caught:
            if is_wall_time:
                live.stop(StopReason.WALL_TIME_LIMIT)
                return
            with boundary(PolicyError, self.policy_label):
                raise self._policy_timeout()
        answered = time.perf_counter()
        times.append(answered)
        if output.log_probs and (unknown := output.log_probs.keys() - self._reported_keys):
            self._report_unknown_keys(unknown)
        action = output.action_structured
        with boundary(PolicyError, self.policy_label):
            to_json_value(action)  # reject an action that cannot be stored before executing it
            message = assistant_message(action, len(episode))
        if "prompt_messages" in action and not episode.assistant_turns:
            # The record begins with the prompt that the policy passed to its model.
            given = [original.to_chat() for original in episode.messages]
            episode.messages[:] = [Message.model_validate(prompt) for prompt in action["prompt_messages"]]
            episode.get_infos(-1)["given_messages"] = given
        execution, live.own_calls = live.own_calls or Execution(), None
        execution.messages = []
        if "results" in action:  # the policy executed its calls itself
            execution.messages = [Message.model_validate(result) for result in action["results"]]
        elif action["type"] in ("tool_call", "tool_calls"):
            await tools.execute(action, len(episode), live.clock.left_s, execution)
            live.is_state_known = live.is_state_known and not execution.is_interrupted
        execution.info.setdefault("is_action_valid", True)
        used = live.count_usage(output.log_probs, live.usage)
        self.budget.spend(used, steps=1)
        self._check_cost_known(used, self.policy_label, is_free=self.agent_policy.is_free)
        stop_reason = self._check_termination(live, output, execution)
        if stop_reason is None and action["type"] == "text" and "results" not in action:
            if user is None:
                execution.messages.append(Message(role="user", content=self.task_definition.nudge))
            else:
                stop_reason = await self._answer_text(live, user, message, execution)
        live.add_step(output, message, execution, stop_reason)
        if stop_reason is not None:
            live.stop(stop_reason, execution.failure)
        ended = time.perf_counter()
        times.append(ended)
        live.tool_spans.append(execution.spans)
        live.policy_s += answered - requested
        live.environment_s += (requested - began) + (ended - answered)
        logger.debug("%s step %d: %s -> %s", episode.id_, len(episode) - 1, action, execution.info)

    def _report_unknown_keys(self, unknown: AbstractSet[str]) -> None:
        """Warn about keys of `log_probs` that are dropped, once for each key."""
        self._reported_keys |= unknown
        known = f"known: {', '.join(sorted(LOG_PROBS_KEYS))}"
        for key in sorted(map(str, unknown)):
            near = did_you_mean(key, LOG_PROBS_KEYS)
            hint = near if near.endswith("?") else ""
            logger.warning("%s: log_probs: unknown key %r is dropped%s (%s)", self.policy_label, key, hint, known)

    def _report_missing_tools(self, missing: Mapping[str, str]) -> None:
        """Warn about names in the `tools` of the task that do not exist at the start, once for each name."""
        for name, message in missing.items():
            if name not in self._reported_tools:
                self._reported_tools.add(name)
                logger.warning("task %r: tools: %s", self.task_definition.name, message)

    async def _ask_user(
        self, live: LiveEpisode, user: UserSession, messages: Sequence[Message], form: str | None = None
    ) -> UserTurn | None:
        """Return the reply of the user, or None if the time limit of the episode was reached."""
        from reward_kit.agent.simulated_user import WHO

        with boundary(PolicyError, WHO):
            seconds, is_wall_time = self._policy_limit(live)
            with live.clock.deadline(seconds) as scope, calls_of("user", live.model_calls):
                turn = await user.reply(messages, form)
            if scope is not None and scope.cancelled_caught:
                if is_wall_time:
                    return None
                raise self._policy_timeout()
        used = live.count_usage(turn.facts, live.user_usage)
        self.budget.spend(used)
        self._check_cost_known(used, WHO, is_free=self.user is None or self.user.is_free)
        return turn

    async def _answer_form(self, live: LiveEpisode, form: str) -> UserAnswer:
        """Let the user answer a question of the environment during a tool call."""
        if live.user is None or live.tools is None:
            return UserAnswer(None, "the episode has not begun")
        with without_deadline(live.tools.scope):
            turn = await self._ask_user(live, live.user, live.episode.messages, form)
        if turn is None:
            return UserAnswer(None, "the time limit of the episode was reached")
        facts: dict[str, Any] = {key: turn.facts[key] for key in ("raw", "usage", "finish_reason") if key in turn.facts}
        if turn.is_over:
            return UserAnswer(turn.text or None, "the simulated user ended the conversation", facts)
        return UserAnswer(turn.text, facts=facts)

    async def _answer_text(
        self, live: LiveEpisode, user: UserSession, message: Message, execution: Execution
    ) -> StopReason | None:
        """Let the user answer the text of the agent. If that ends the episode, return the stop reason."""
        try:
            turn = await self._ask_user(live, user, [*live.episode.messages, message])
        except RewardKitError as error:
            logger.info("the user of episode %s failed", live.episode.id_, exc_info=error)
            execution.failure = Failure.from_exception(error)
            return StopReason.ERROR
        if turn is None:
            return StopReason.WALL_TIME_LIMIT
        execution.messages += turn.messages()
        execution.info["user"] = turn.facts
        return StopReason.USER_STOPPED if turn.is_over else None

    def _check_termination(self, live: LiveEpisode, output: PolicyOutput, execution: Execution) -> StopReason | None:
        """Return the reason why the episode is over after this step, or None if it continues."""
        action, task = output.action_structured, self.task_definition
        texts = [text for text in (output.raw_policy_output, action.get("content")) if text]
        limits, seconds_left = task.limits, live.clock.left_s
        is_cut = (output.log_probs or {}).get("finish_reason") == "length"
        # A policy that runs its own loop may continue after a text action.
        is_last_text = action["type"] == "text" and "results" not in action and self._ends_on_text
        is_answer = bool(action.get("is_final")) or is_last_text
        checks = (
            (StopReason.ERROR, execution.failure is not None),
            (StopReason.ENVIRONMENT_TERMINATED, execution.terminated),
            (StopReason.ENVIRONMENT_TRUNCATED, execution.truncated),
            (StopReason.TERMINATE_ACTION, action["type"] == "terminate" or execution.wants_end),
            (StopReason.STOP_PHRASE, any(phrase in text for phrase in task.stop_phrases for text in texts)),
            (StopReason.TERMINATION_REGEX, self._regex is not None and any(map(self._regex.search, texts))),
            (StopReason.OUTPUT_LIMIT, is_answer and is_cut),
            (StopReason.ANSWERED, is_answer),
            (StopReason.COST_LIMIT, limits.cost is not None and live.cost >= limits.cost),
            (StopReason.TOKEN_LIMIT, limits.total_tokens is not None and live.tokens_used >= limits.total_tokens),
            (StopReason.WALL_TIME_LIMIT, seconds_left is not None and seconds_left <= 0),
            (StopReason.MAX_STEPS, len(live.episode) + 1 >= self.max_episode_steps),
            (StopReason.RUN_LIMIT, self.budget.exhausted() is not None),
        )
        return next((reason for reason, holds in checks if holds), None)

    def _check_cost_known(self, used: ActionUsage, who: str, *, is_free: bool) -> None:
        bounded = self.task_definition.limits.cost is not None or self.budget.limits.cost is not None
        if bounded and used.cost is None and not is_free:
            raise PolicyError(f"{who} did not report the cost of this action, so the cost limit cannot be enforced")

    def _environment_call(self, what: str, resource: ForkableResource | None) -> environment_call:
        return environment_call(what, self.task_definition.limits.environment_time_s, resource)

    def _policy_limit(self, live: LiveEpisode) -> tuple[float | None, bool]:
        """Return the seconds in which the policy must answer, and whether the time limit of the episode sets them.

        If no limit applies, the first value is None.
        """
        limit, left = self.task_definition.limits.policy_time_s, live.clock.left_s
        is_wall_time = left is not None and (limit is None or left < limit)
        return (left if is_wall_time else limit), is_wall_time

    def _policy_timeout(self) -> TimeoutError:
        return TimeoutError(f"no answer within {self.task_definition.limits.policy_time_s} s (limits.policy_time_s)")


@dataclass(slots=True)
class LiveEpisode:
    """The state of a running episode, with the methods that write its record."""

    start: EpisodeStart
    episode: SingleAgentEpisode
    tokens_used: int = 0
    policy_s: float = 0.0
    # By step: when it began, the policy was asked, the policy answered, and it ended. An aborted step has fewer times.
    step_times: list[list[float]] = field(default_factory=list)
    tool_spans: list[list[tuple[float, float]]] = field(default_factory=list)  # by step
    model_calls: list[ModelCall] = field(default_factory=list)
    environment_s: float = 0.0  # time outside of the policy
    usage: dict[str, float] = field(default_factory=dict)  # sums over the policy's reports
    user_usage: dict[str, float] = field(default_factory=dict)
    seen: SeenResults = field(default_factory=SeenResults)
    own_calls: Execution | None = None  # calls executed by the policy itself in the current turn
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    is_state_known: bool = True  # False once a call to the resource was cancelled
    clock: EpisodeClock = field(default_factory=EpisodeClock)
    tools: Toolbox | None = None
    user: UserSession | None = None
    spans: EpisodeSpans = field(default_factory=EpisodeSpans)
    _began: float = field(default_factory=time.perf_counter)
    began_at: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC))

    @property
    def cost(self) -> float:
        """The cost so far in US dollars, including that of the simulated user."""
        return self.usage.get("cost", 0.0) + self.user_usage.get("cost", 0.0)

    def stop(self, reason: StopReason, failure: Failure | None = None) -> None:
        self.stop_reason, self.failure = reason, failure or self.failure
        self.episode.is_terminated, self.episode.is_truncated = reason.is_terminal, not reason.is_terminal

    def count_usage(self, facts: Mapping[str, Any] | None, account: dict[str, float]) -> ActionUsage:
        """Add the usage of one action to `account`. If the endpoint reported no usage, count the token ids."""
        facts = facts or {}
        usage = facts.get("usage") or {}
        for key, value in usage.items():
            if isinstance(value, int | float):
                account[key] = account.get(key, 0) + value
        reported = usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)
        ids = (facts.get("prompt_ids"), facts.get("token_ids"))
        tokens = int(reported) or sum(len(token_ids) for token_ids in ids if token_ids is not None)
        self.tokens_used += tokens
        return ActionUsage(tokens, usage.get("cost"))

    def add_step(self, output: PolicyOutput, message: Message, execution: Execution, stop: StopReason | None) -> None:
        """Record one action and its results."""
        episode, action = self.episode, output.action_structured
        outputs: dict[str, Any] = {
            "raw_policy_output": output.raw_policy_output,
            "value_estimate": output.value_estimate,
            # The messages contain the values; a replay needs only the keys to repeat the action.
            "own_account": [key for key in ("results", "is_final") if action.get(key) not in (None, False)] or None,
        }
        if episode.assistant_turns:
            outputs["prompt_messages"] = action.get("prompt_messages")
        outputs |= write_log_probs(output.log_probs, episode, execution.info)
        if "state_and_results" in episode.get_infos(-1):
            self.seen.add(execution.messages, (call["answer"] for call in execution.info.get("own_calls", ())))
        episode.add_assistant_message(message)
        episode.add_messages(execution.messages)
        episode.add_env_step(
            "\n".join(result.text for result in execution.messages),
            {key: value for key, value in action.items() if key not in OWN_ACCOUNT},
            execution.reward,
            execution.info,
            terminated=stop is not None and stop.is_terminal,
            truncated=stop is not None and not stop.is_terminal,
            extra_model_outputs={key: value for key, value in outputs.items() if value is not None},
        )

    def record_facts(self, policy_label: str) -> None:
        """Record the identity, the start, the end and the timing of the episode."""
        start, reason = self.start, self.stop_reason or StopReason.ERROR
        zero = self._began
        steps = [[round(time_s - zero, 6) for time_s in times] for times in self.step_times]
        tools = [
            [[round(began - zero, 6), round(ended - zero, 6)] for began, ended in spans] for spans in self.tool_spans
        ]
        calls = [call.to_json(zero) for call in self.model_calls]
        facts = EpisodeFacts(
            final_state=get_facts(self.episode).get("final_state"),
            sample_id=start.sample.id,
            group_id=start.group_id,
            rollout_index=start.rollout_index,
            attempt=0,
            policy=policy_label,
            stop_reason=reason.value,
            failure=self.failure.to_json() if self.failure else None,
            seeds=asdict(start.seeds),
            start={"fork": start.fork, "state_key": start.state_key, "verified": start.verified},
            sample=dict(start.sample.row),
            ground_truth=start.sample.ground_truth,
            usage=dict(self.usage),
            timing={
                "started_at": self.began_at.isoformat(timespec="microseconds"),
                "duration_s": round(time.perf_counter() - self._began, 6),
                "policy_s": round(self.policy_s, 6),
                "steps_policy_s": [round(times[2] - times[1], 6) for times in self.step_times if len(times) == 4],
                "environment_s": round(self.environment_s, 6),
                **({"waited_s": round(self.clock.waited_s, 6)} if self.clock.waited_s else {}),
                "steps": steps,
                **({"tools": tools} if any(tools) else {}),
                **({"model_calls": calls} if calls else {}),
                **({"traceparent": self.spans.traceparent} if self.spans.traceparent else {}),
            },
        )
        if self.user_usage:
            facts["user_usage"] = dict(self.user_usage)
        self.episode.custom_data.update(facts)


class RolloutWorker(Protocol):
    """A collector of episodes of one task with one policy, such as an `RLRolloutWorker`."""

    def group(self, sample: Sample, run_seed: int = 0) -> Any:
        """Return the start that all episodes of a sample share, as a context manager that has a `close` method.

        The start is created when it is first used.
        """

    async def collect_episode(self, group: Any, rollout_index: int = 0) -> SingleAgentEpisode:
        """Collect one episode. A failure is recorded in the episode, and no error is raised."""


async def collect_group(
    worker: RolloutWorker,
    sample: Sample,
    size: int,
    *,
    run_seed: int = 0,
    collect: Callable[[Any, int], Awaitable[SingleAgentEpisode]] | None = None,
) -> list[SingleAgentEpisode]:
    """Collect `size` episodes of one sample concurrently, all from the same start.

    Args:
        worker: the worker that collects the episodes.
        sample: the initial condition of the episodes.
        size: the number of episodes, G.
        run_seed: the seed of the run.
        collect: a function that collects the episode with the given index in the open group. By default,
            `worker.collect_episode`.

    Returns:
        (G,) the episodes in rollout order, including those that failed.
    """
    collect = collect or worker.collect_episode
    async with worker.group(sample, run_seed) as group:
        return await gather(lambda index: collect(group, index), range(size))


async def gather(call: Callable[[A], Awaitable[R]], items: Sequence[A]) -> list[R]:
    """Call a function concurrently for each item, and return the results in the order of the items."""
    results: dict[int, R] = {}

    async def store(index: int) -> None:
        results[index] = await call(items[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(items)):
            tasks.start_soon(store, index)
    return [results[index] for index in range(len(items))]


def _check_loaded(task: TaskDefinitionModel, tools: ToolRegistry | None, user: SimulatedUser | None) -> None:
    """Raise a ConfigError if the task names tools, a user or a server that were not passed."""
    config = task.base_resource_config
    parts = config.get("resources") or ()
    has_server = "resource_server" in config or any("resource_server" in (part.get("config") or {}) for part in parts)
    missing = {
        "tools_module_path": task.tools_module_path is not None and tools is None,
        "user": task.user is not None and user is None,
        "resource_server": task.resource_server is not None and not has_server,
    }
    if key := next((key for key, is_missing in missing.items() if is_missing), None):
        raise ConfigError(
            f"task {task.name!r}: {key} is set, but its object was not passed; pass "
            "reward_kit.Task.from_file(…) instead of its definition, or remove the key"
        )
