"""`RLRolloutWorker`, which runs a policy through an episode and records the episode.

An episode consists of the start (`starts.py`), a reset, the steps, the final state, and closing. In each step, the
worker requests an action from the policy, executes its tool calls with `tool_execution.py`, lets a simulated user
reply, checks whether the episode is over, and records the results. The worker does not compute rewards. Each action
adds exactly one assistant message and counts as one step, regardless of how many tools it calls. If an episode fails,
the failure is recorded in that episode and does not affect the others.
"""

from __future__ import annotations

import copy
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import anyio

from reward_kit.agent.actions import as_text, assistant_message, to_plain_data
from reward_kit.agent.branches import Branch, check_started
from reward_kit.agent.limits import ActionUsage, EpisodeClock, RunBudget
from reward_kit.agent.live_episode import LiveEpisode
from reward_kit.agent.models import LOG_PROBS_KEYS, History, StepData, StopReason, episode_steps
from reward_kit.agent.policy_interface import (
    AgentPolicy,
    EpisodeContext,
    PolicyOutput,
    ToolAnswer,
    next_action,
    open_session,
)
from reward_kit.agent.samples import Prompt, Sample
from reward_kit.agent.starts import CLOSE_SECONDS, GroupStart, Past, SharedEnvironment, environment_call
from reward_kit.agent.tool_execution import Execution, Toolbox
from reward_kit.environments.base import ForkableResource, StateSnapshot, ToolSpec, hash_key
from reward_kit.environments.elicitation import CURRENT_USER, UserAnswer, without_deadline
from reward_kit.environments.state_changes import state_changes
from reward_kit.environments.tools import ToolRegistry
from reward_kit.episodes.json_codec import to_json_value
from reward_kit.episodes.record import episode_to_record, get_facts
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
from reward_kit.providers.model_calls import MODEL_CALLS, calls_of
from reward_kit.providers.request_queue import WHILE_WAITING
from reward_kit.telemetry.current import CURRENT_TELEMETRY
from reward_kit.validation import check_positive

if TYPE_CHECKING:
    from reward_kit.agent.simulated_user import SimulatedUser, UserSession, UserTurn

logger = logging.getLogger("reward_kit.agent")
A = TypeVar("A")
R = TypeVar("R")


class TaskLike(Protocol):
    """A task and the objects named in its file, such as a `reward_kit.Task`."""

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
        messages: the first messages. If the simulated user speaks first, the user's message is not included, because a
            model may have to generate it.
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
        episodes: the records of the G episodes, which `build_rows` accepts.
        messages: the G conversations.
        failures: for each of the G episodes, the reason why it failed, or None if it did not fail. An episode that
            failed before its first step has no steps. Its score should be None rather than 0.
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
    """A worker that collects episodes of one task with one policy. Its methods may be called concurrently.

    Args:
        task_definition: the task. Pass a `Task`, which includes its samples, tools and user, a `TaskDefinitionModel`,
            or the class of a resource.
        agent_policy: the agent. The worker opens and closes a session for each episode, but does not close the policy.
        max_episode_steps: the maximum number of steps. It overrides the task's limit.
        environment: a resource that you have set up and will close. Episodes run in forks of its current state. If the
            resource cannot be forked, the episodes run one at a time, and the resource is reset before each episode
            except the first. By default, the worker creates a resource of the task's `resource_type`.
        tools: the tools that the task defines. The default is the tools of the `Task`.
        user: the simulated user, who replies when the agent writes text. The default is the user of the `Task`.
        budget: a budget that all episodes of a run share. By default, no limit applies.
        policy_label: the name of the policy in ids and records. The default is the name of its class.

    Raises:
        ConfigError: If the task names tools, a user or a server, but the corresponding object was not passed.
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
        samples: Sequence[Sample] = ()
        if isinstance(task_definition, type) and issubclass(task_definition, ForkableResource):
            kind, task_definition = task_definition, TaskDefinitionModel(name=task_definition.__name__)
        elif not isinstance(task_definition, TaskDefinitionModel):
            task = task_definition
            if not (hasattr(task, "definition") and hasattr(task, "samples")):
                raise ConfigError(
                    "task_definition must be a Task, a TaskDefinitionModel or a subclass of "
                    f"ForkableResource, got {type_name(task)}; use Task.from_file to load a task file"
                )
            task_definition, sample, samples = task.definition, task.samples[0], task.samples
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
        self._samples = samples or (self.sample,)
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
        self._next_rollout: Counter[str] = Counter()  # keyed by group id
        self._first_keys: dict[str, str] = {}
        has_resource = bool(kind or task_definition.resource_type or environment is not None)
        has_tools = (has_resource or tools is not None) and task_definition.tools != []
        continues = has_tools or bool(task_definition.terminate_tool) or user is not None
        self._ends_on_text = (task_definition.on_text or ("continue" if continues else "end")) == "end"

    async def run_episode(
        self, seed: int | None = None, *, sample: Sample | None = None
    ) -> tuple[list[StepData], list[Message], Any]:
        """Collect the next episode of a sample. Repeated and concurrent calls collect the rollouts of one group.

        The n-th call with a given seed and sample collects rollout n of their group. All rollouts of the group have the
        same start and group id but different policy seeds. A new worker starts counting from 0.

        Args:
            seed: the seed of the run, which determines the start. The default is 0.
            sample: the initial condition. The default is the first sample of the task.

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
        """Collect the next `size` episodes of a sample concurrently. All of them have the same start.

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
                    self._shared.was_used = was_used  # the state was not changed, so an episode need not reset it
                await group.finish(start)

    def _own_group(self, seed: int | None, sample: Sample | None) -> GroupStart:
        return self._group_start(sample or self.sample, seed or 0, self._first_keys)

    async def _next_episode(self, group: GroupStart) -> tuple[list[StepData], SingleAgentEpisode, Failure | None]:
        """Collect the next rollout of a group, and return the steps, the record and the failure."""
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
        """Collect one episode. If it fails, record the failure in the episode instead of raising an error.

        Args:
            group: the start of the episode. By default, a new group is created for the task itself.
            rollout_index: the position of the episode in its group.
            seed: the seed of the run. It is used only if `group` is omitted.

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

    async def continue_from(
        self,
        episode: SingleAgentEpisode,
        step: int,
        n: int = 1,
        *,
        policy: AgentPolicy | None = None,
        seed: int = 0,
        sample: Sample | None = None,
    ) -> list[SingleAgentEpisode]:
        """Collect `n` episodes that begin with the first `step` steps of a recorded episode and continue from there.

        The recorded actions are repeated in a new resource, and the results must equal the recorded results. Each
        continuation runs in a fork of this resource, with separate seeds. If the policy recorded the exact tokens of
        these steps, the continuation begins with them. The step limit includes the repeated steps.

        Args:
            episode: the recorded episode.
            step: the first step that is taken again, from 0 to the number of steps minus 1.
            n: the number of continuations.
            policy: the policy that continues the episode. The default is the worker's policy. The caller must close the
                policy.
            seed: the random seed for the continuations. Calls that differ only in the seed are independent.
            sample: the sample of the episode. The default is the task's sample with the recorded sample id.

        Returns:
            A list of `n` episodes, which include the repeated steps. The episodes form a group.

        Raises:
            ConfigError: If the episode has no such step or was not collected by a worker.
            RewardKitError: If a continuation cannot start, for example because a repeated action has a different
                result.
        """
        check_positive("n", n, is_integer=True)
        if policy is not None and not hasattr(policy, "get_action"):
            raise ConfigError(f"policy must be an AgentPolicy, got {type_name(policy)}")
        worker = self if policy is None else self._with_policy(policy)
        barrier: Any = worker.agent_policy if hasattr(worker.agent_policy, "give_up") else None

        async def collect(index: int) -> SingleAgentEpisode:
            continued = await worker.collect_episode(branch, index)
            if barrier is not None and not continued.messages:
                barrier.give_up()
            return continued

        async with worker.branch(episode, step, seed=seed, sample=sample) as branch:
            if barrier is not None:  # a LockstepBarrier
                barrier.expect(n)
            episodes = await gather(collect, range(n))
        for continued in episodes:
            check_started(continued)
        return episodes

    def branch(
        self,
        episode: SingleAgentEpisode,
        step: int,
        *,
        seed: int = 0,
        sample: Sample | None = None,
        before: Branch | None = None,
    ) -> Branch:
        """Return a step of a recorded episode as a `group` for `collect_episode`.

        Use this method instead of `continue_from` to collect the continuations one by one. Pass each of them to
        `check_started`.

        Args:
            episode: the recorded episode.
            step: the first step that is taken again.
            seed: the random seed for the continuations.
            sample: the sample of the episode. The default is the task's sample with the recorded sample id.
            before: an open branch at an earlier step of the same episode. Its resource is forked, so the steps before
                it need not be repeated.

        Raises:
            ConfigError: If the episode has no such step, was not collected by a worker, or has an unknown sample.
        """
        return Branch(
            self.task_definition,
            sample or self._sample_of(episode),
            episode,
            step,
            tools=self.tools,
            policy_label=self.policy_label,
            seed=seed,
            environment=self._shared,
            kind=self._kind,
            before=before,
        )

    def _sample_of(self, episode: SingleAgentEpisode) -> Sample:
        sample_id = get_facts(episode).get("sample_id")
        sample = next((sample for sample in self._samples if sample.id == sample_id), None)
        if sample is None:
            raise ConfigError(
                f"episode {episode.id_} belongs to sample {sample_id!r}, which task {self.task_definition.name!r} does "
                "not contain; pass sample="
            )
        return sample

    def _with_policy(self, policy: AgentPolicy) -> RLRolloutWorker:
        worker = copy.copy(self)
        worker.agent_policy, worker.policy_label = policy, type(policy).__name__
        return worker

    def group(self, sample: Sample, run_seed: int = 0) -> GroupStart:
        """Return the start shared by all episodes of a sample."""
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
            if live.start.past is None:
                await self._reset(live, user)
            else:
                await self._resume(live, live.start.past, session, user)
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
            with self._environment_call("state_key and final_state", resource):
                if live.episode.is_reset:
                    await live.record_state(resource)
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
        """Return the context for the policy's session. Its function `call_tool` calls tools while the policy acts."""
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

    async def _resume(self, live: LiveEpisode, past: Past, session: AgentPolicy, user: UserSession | None) -> None:
        """Continue after the steps of a recorded episode."""
        with boundary(PolicyError, f"resume of {self.policy_label}"), anyio.fail_after(self._policy_limit(live)[0]):
            if session is not self.agent_policy:
                await session.resume(past.turns)
            if user is not None:
                await user.resume(past)
        live.resume(past)

    async def _observe(self, resource: ForkableResource | None) -> str:
        """Return the first observation of the environment, or "" if the task hides it."""
        if resource is None or not self.task_definition.observation:
            return ""
        with self._environment_call("get_observation", resource):
            return as_text(await resource.get_observation())

    async def _step(self, live: LiveEpisode, session: AgentPolicy, tools: Toolbox, user: UserSession | None) -> None:
        """Request one action, execute it, and record the action and its results."""
        episode, resource = live.episode, live.start.resource
        began = time.perf_counter()
        times = [began]
        live.step_times.append(times)
        with self._environment_call("state_key and get_tools_spec", resource):
            if resource is not None:
                await live.record_state(resource)
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
            to_json_value(action)  # reject an action that cannot be stored, before it is executed
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
        """Warn once about each key of `log_probs` that is dropped."""
        self._reported_keys |= unknown
        known = f"known: {', '.join(sorted(LOG_PROBS_KEYS))}"
        for key in sorted(map(str, unknown)):
            near = did_you_mean(key, LOG_PROBS_KEYS)
            hint = near if near.endswith("?") else ""
            logger.warning("%s: log_probs: unknown key %r is dropped%s (%s)", self.policy_label, key, hint, known)

    def _report_missing_tools(self, missing: Mapping[str, str]) -> None:
        """Warn once about each name in the task's `tools` that does not exist at the start."""
        for name, message in missing.items():
            if name not in self._reported_tools:
                self._reported_tools.add(name)
                logger.warning("task %r: tools: %s", self.task_definition.name, message)

    async def _ask_user(
        self, live: LiveEpisode, user: UserSession, messages: Sequence[Message], form: str | None = None
    ) -> UserTurn | None:
        """Return the user's reply, or None if the episode's time limit was reached."""
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
        """Let the user answer a question that the environment asks during a tool call."""
        if live.user is None or live.tools is None:
            return UserAnswer(None, "the episode has not started yet")
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
        """Let the user reply to the agent's text. If the reply ends the episode, return the stop reason."""
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
        """Return the reason why the episode ends after this step, or None if it continues."""
        action, task = output.action_structured, self.task_definition
        texts = [text for text in (output.raw_policy_output, action.get("content")) if text]
        has_phrase = bool(task.stop_phrases) and any(phrase in text for phrase in task.stop_phrases for text in texts)
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
            (StopReason.STOP_PHRASE, has_phrase),
            (StopReason.TERMINATION_REGEX, self._regex is not None and any(map(self._regex.search, texts))),
            (StopReason.OUTPUT_LIMIT, is_answer and is_cut),
            (StopReason.ANSWERED, is_answer),
            (StopReason.COST_LIMIT, limits.cost is not None and live.cost >= limits.cost),
            (StopReason.TOKEN_LIMIT, limits.total_tokens is not None and live.tokens_used >= limits.total_tokens),
            (StopReason.WALL_TIME_LIMIT, seconds_left is not None and seconds_left <= 0),
            (StopReason.MAX_STEPS, len(live.episode) + 1 >= self.max_episode_steps),
            (StopReason.RUN_LIMIT, self.budget.exhausted() is not None),
        )
        for reason, holds in checks:
            if holds:
                return reason
        return None

    def _check_cost_known(self, used: ActionUsage, who: str, *, is_free: bool) -> None:
        bounded = self.task_definition.limits.cost is not None or self.budget.limits.cost is not None
        if bounded and used.cost is None and not is_free:
            raise PolicyError(f"{who} did not report the cost of this action, so the cost limit cannot be enforced")

    def _environment_call(self, what: str, resource: ForkableResource | None) -> environment_call:
        return environment_call(what, self.task_definition.limits.environment_time_s, resource)

    def _policy_limit(self, live: LiveEpisode) -> tuple[float | None, bool]:
        """Return the time limit of the next policy call, and whether it is determined by the episode's time limit.

        The time limit is in seconds, or None if no limit applies.
        """
        limit, left = self.task_definition.limits.policy_time_s, live.clock.left_s
        is_wall_time = left is not None and (limit is None or left < limit)
        return (left if is_wall_time else limit), is_wall_time

    def _policy_timeout(self) -> TimeoutError:
        return TimeoutError(f"no response within {self.task_definition.limits.policy_time_s} s (limits.policy_time_s)")


class RolloutWorker(Protocol):
    """An object that collects episodes of one task with one policy, such as an `RLRolloutWorker`."""

    def group(self, sample: Sample, run_seed: int = 0) -> Any:
        """Return the start shared by all episodes of a sample. It is a context manager with a `close` method.

        The start is created when it is first used.
        """

    async def collect_episode(self, group: Any, rollout_index: int = 0) -> SingleAgentEpisode:
        """Collect one episode. If it fails, record the failure in the episode instead of raising an error."""


async def collect_group(
    worker: RolloutWorker,
    sample: Sample,
    size: int,
    *,
    run_seed: int = 0,
    collect: Callable[[Any, int], Awaitable[SingleAgentEpisode]] | None = None,
) -> list[SingleAgentEpisode]:
    """Collect `size` episodes of one sample concurrently. All of them have the same start.

    Args:
        worker: the worker that collects the episodes.
        sample: the initial condition of the episodes.
        size: the number of episodes, G.
        run_seed: the seed of the run.
        collect: a function that collects the episode with the given index in the open group. The default is
            `worker.collect_episode`.

    Returns:
        The G episodes in rollout order, including those that failed.
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
    """Raise a ConfigError if the task names tools, a user or a server, but the object was not passed."""
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
            f"task {task.name!r}: {key} is set, but the object that it refers to was not passed; pass "
            "reward_kit.Task.from_file(…) instead of the task definition, or remove the key"
        )
