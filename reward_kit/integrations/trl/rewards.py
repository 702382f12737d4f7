"""Reward functions with the signature that TRL expects.

The signature is `(prompts, completions, completion_ids, **columns) -> list[float | None]`. The reward agent calls a
reward concurrently, at the sandbox level that the command line would choose. An unscored completion gets None, never
0.0, and TRL excludes it from the baseline.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Self

import anyio.to_thread
import pydantic

from reward_kit.errors import ConfigError, Failure, did_you_mean, type_name
from reward_kit.integrations.trl.rows import ADVANTAGES
from reward_kit.models import Message
from reward_kit.reward_agent.agent import SyncRewardAgent
from reward_kit.reward_agent.loading import SandboxChoice, make_scorer, resolve_reward
from reward_kit.reward_agent.scoring import Reward, ScoringRequest
from reward_kit.reward_calls import BATCH_NAMES
from reward_kit.task_parts import SandboxLevel
from reward_kit.validation import describe_validation_error

_MESSAGES = pydantic.TypeAdapter(list[Message])
_TRAINER_ARGUMENTS = ("trainer_state", "log_extra", "log_metric", "environments")
"""The arguments that TRL passes in addition to the columns of the dataset."""
_POINTWISE_NAMES = {many: one for one, many in BATCH_NAMES.items()}
_ALWAYS = {"messages", "assistant_turns", "sample", "rollout_id"}
_OF_ENVIRONMENT = {"state", "environment_return"}
_OWN = {*_ALWAYS, *_OF_ENVIRONMENT, "ground_truth", "stop_reason", "step_data"}
_NO_COLUMN = {"state", "step_data", "assistant_turns", "sample"}
_LONG = {"messages", ADVANTAGES}
logger = logging.getLogger("reward_kit.integrations.trl")


class TrlConversation(NamedTuple):
    """The messages of a prompt and its completion, and the indices of the assistant messages in the completion."""

    messages: list[Message]
    assistant_turns: list[int]


def make_conversation(prompt: Any, completion: Any) -> TrlConversation:
    """Combine a prompt and its completion. Each of them is a string or a list of messages.

    A string becomes a message of the user or the assistant. TRL passes tool calls without ids, and their arguments are
    not strings. Therefore, ids are added and arguments are converted. The result of a tool belongs to the first
    unanswered call of this tool.

    Raises:
        ConfigError: If an argument is neither a string nor a list, or if a message is invalid.
    """
    parts: list[Any] = []
    for given, role, what in ((prompt, "user", "prompt"), (completion, "assistant", "completion")):
        if not isinstance(given, str | list):
            raise ConfigError(f"a TRL {what} must be a string or a list of messages, got {type_name(given)}")
        parts.append([{"role": role, "content": given}] if isinstance(given, str) else given)
    messages, first = _validated([*parts[0], *parts[1]]), len(parts[0])
    turns = [index for index, message in enumerate(messages) if message.role == "assistant" and index >= first]
    return TrlConversation(messages, turns)


def _validated(given: Sequence[Any]) -> list[Message]:
    """Validate messages from TRL or reward-kit, and add ids to tool calls and tool results."""
    unanswered: list[tuple[str, str]] = []  # names and ids of calls
    messages, count = [], 0
    for message in given:
        if isinstance(message, Mapping):
            # Datasets have every key in every row. Missing values are None.
            message = {key: value for key, value in message.items() if value is not None or key == "content"}
            if message.get("tool_calls"):
                calls = [_call(call, f"call_{count + i}") for i, call in enumerate(message["tool_calls"])]
                message["tool_calls"] = calls
                count += len(calls)
                unanswered += [(call["function"]["name"], call["id"]) for call in calls]
            elif message.get("role") == "tool":
                id_, name = message.get("tool_call_id"), message.get("name")
                if id_ is None:
                    named = (each for called, each in unanswered if called == name)
                    id_ = next(named, unanswered[0][1] if unanswered else None)
                    message |= {"tool_call_id": id_} if id_ is not None else {}
                unanswered = [call for call in unanswered if call[1] != id_]
        messages.append(message)
    try:
        return _MESSAGES.validate_python(messages)
    except pydantic.ValidationError as error:
        raise ConfigError(f"messages: {'; '.join(describe_validation_error(error, Message))}") from None


def _call(call: Any, default_id: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ConfigError(f"tool_calls: a call must have a function, got {call!r:.80}")
    function = {"name": "", **call["function"]}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    return {**call, "type": "function", "id": call.get("id") or default_id, "function": function}


def as_trl_reward(
    reward: Callable[..., Any] | str,
    *,
    columns: Mapping[str, str] | None = None,
    is_async: bool = False,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    sandbox: SandboxLevel | None = None,
    folder: Path | None = None,
    deadline_s: float | None = 600.0,
    max_concurrency: int = 16,
    group_size: int | None = None,
) -> TRLReward:
    """Return a reward function for the `reward_funcs` of `GRPOTrainer` and other TRL trainers.

    Args:
        reward: a `@reward_function`, a plain function with the same signature, or a `compute_score` as in verl. Each of
            these runs in this process. Alternatively, a reference such as `file.py:function`.
        columns: the parameter names for dataset columns, such as `{"answer": "ground_truth"}`. Other columns keep their
            names. The reward receives the columns that it names as parameters. `sample` contains all columns.
        is_async: whether to return a coroutine function, which TRL awaits together with its other asynchronous rewards.
            The calls of a batch run concurrently in both cases.
        name: the name in TRL's logs. The default is the id of the reward.
        options: keyword arguments that are always passed to the reward.
        sandbox: the sandbox level of a reference. The default is the level that the command line would choose.
        folder: the directory for relative file paths. The default is the working directory.
        deadline_s: the time limit of a call in seconds. If a call takes longer, its completion is unscored.
        max_concurrency: the maximum number of concurrent calls.
        group_size: the number of completions in a group for a batch reward. By default, consecutive completions with
            identical prompts form a group.

    Raises:
        ConfigError: If the reward cannot be loaded, or if an option would have no effect.
    """
    choice = SandboxChoice(level=sandbox, reward_time_s=deadline_s)
    loaded = resolve_reward(reward, folder, choice, options, choice_is="sandbox")
    if group_size is not None and (loaded.mode != "batch" or group_size < 1):
        raise ConfigError(
            f"group_size={group_size} must be at least 1, and applies only to batch "
            f"rewards; {loaded.id!r} is {loaded.mode}"
        )
    agent = SyncRewardAgent(make_scorer(loaded, deadline_s), max_concurrency=max_concurrency)
    kind = AsyncTRLReward if is_async else TRLReward
    return kind(loaded, agent, columns=columns, name=name, group_size=group_size)


class TRLReward:
    """A reward with the interface that TRL expects. `as_trl_reward` creates it.

    The first call opens the reward agent.

    Attributes:
        reward: the reward that was passed to `as_trl_reward`.
        unscored: the number of unscored completions so far, per failure class.
    """

    def __init__(
        self,
        reward: Reward,
        agent: SyncRewardAgent,
        *,
        columns: Mapping[str, str] | None,
        name: str | None,
        group_size: int | None,
    ) -> None:
        self.reward = reward
        self.unscored: Counter[str] = Counter()
        self.__name__ = name or reward.id
        # The parameters of a batch reward have plural names.
        self._columns = {column: _POINTWISE_NAMES.get(ours, ours) for column, ours in (columns or {}).items()}
        self._needed = {_POINTWISE_NAMES.get(one, one) for one in reward.required - reward.resources.keys()}
        self._agent, self._group_size, self._is_open = agent, group_size, False
        self._opening = threading.Lock()  # TRL awaits multiple batches at the same time.
        if twice := [one for one, count in Counter(self._columns.values()).items() if count > 1]:
            raise ConfigError(f"columns: two columns would be renamed to {twice[0]!r}")
        if "step_data" in self._needed:
            raise ConfigError(
                f"reward {reward.id!r} requires step_data, but only reward-kit's rollouts have step_data; pass the "
                "reward to as_rollout_func"
            )

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any = None, **columns: Any
    ) -> Any:
        """Return a score for each completion, or None if the completion is unscored.

        `columns` contains the dataset columns and additional arguments from TRL.

        Raises:
            ConfigError: If a column that is listed in `columns` or required by the reward is missing, or if a prompt or
                a completion is not a conversation.
        """
        return self.scores(prompts, completions, columns)

    def scores(
        self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
    ) -> list[float | None]:
        """Return the scores of a batch. `columns` contains all other arguments."""
        requests = self._requests(prompts, completions, columns)
        with self._opening:
            if not self._is_open:
                self._agent.__enter__()
                self._is_open = True
        size = 1 if self.reward.mode == "pointwise" else self._group_size
        if size is None:
            same = [list(run) for _, run in groupby(range(len(prompts)), key=lambda index: prompts[index])]
            batches = [([requests[index] for index in group], len(group)) for group in same]
        elif len(requests) % size:
            raise ConfigError(f"group_size: {len(requests)} completions cannot be divided into groups of {size}")
        else:
            batches = [(requests, size)]
        tickets = [self._agent.submit(batch, size) for batch, size in batches]
        scored = [one for ticket in tickets for one in self._agent.get(len(ticket.requests), ticket=ticket).extra_infos]
        failures = [one.failure for one in scored]
        self.unscored.update(failure.failure_class for failure in failures if failure is not None)
        _log_unscored(self.__name__, [None if failure is None else failure.to_line() for failure in failures], columns)
        return [one.score for one in scored]

    def close(self) -> None:
        """Stop the workers of the reward and its thread. A later call starts new ones."""
        if self._is_open:
            self._is_open = False
            self._agent.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(
        self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
    ) -> list[ScoringRequest]:
        named, wanted = self._named(columns), self.reward.parameters
        environments = columns.get("environments") or [None] * len(prompts)
        requests = []
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            row = {name: values[index] for name, values in named.items()}
            try:
                conversation = _conversation(prompt, completion, row)
            except ConfigError as error:
                raise ConfigError(f"completion {index}: {error}") from error
            failure, play = None, getattr(environments[index], "_play", None)
            if "rollout_id" in row and row.get("failure") is not None:  # Failed episodes of reward-kit are not scored.
                failure = Failure.from_line(row["failure"], "rollout")
            # This is read before the failure of the episode, because this call may set the failure.
            state = play.final_state() if play is not None and (wanted is None or "state" in wanted) else None
            requests.append(
                ScoringRequest(
                    rollout_id=str(row.get("rollout_id") or f"completion-{index}"),
                    messages=conversation.messages,
                    ground_truth=row.get("ground_truth"),
                    assistant_turns=conversation.assistant_turns,
                    sample={name: value for name, value in row.items() if name not in _LONG},
                    environment_return=row.get("environment_return") if play is None else play.environment_return,
                    stop_reason=row.get("stop_reason"),
                    final_state=state,
                    failure=failure if play is None else play.failure,
                    extra={
                        name: value
                        for name, value in row.items()
                        if name not in _OWN and name not in _LONG and (wanted is None or name in wanted)
                    },
                )
            )
        return requests

    def _named(self, columns: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
        """Rename the columns to the names that the reward function expects."""
        known = {name: values for name, values in columns.items() if name not in _TRAINER_ARGUMENTS}
        for column, ours in self._columns.items():
            if column not in known:
                raise ConfigError(f"columns: the dataset has no column {column!r}{did_you_mean(column, known)}")
            if ours != column and ours in known and ours not in self._columns:
                raise ConfigError(
                    f"columns: {column!r} would be renamed to {ours!r}, but the dataset "
                    "already has a column with that name"
                )
        named = {self._columns.get(column, column): values for column, values in known.items()}
        given = named.keys() | _ALWAYS | (_OF_ENVIRONMENT if columns.get("environments") else set())
        if missing := sorted(self._needed - given):
            raise ConfigError(
                f"reward {self.reward.id!r} requires {missing[0]!r}, but the dataset has no such column"
                f"{did_you_mean(missing[0], known)} (if a different column contains it, "
                f"pass columns={{'…': {missing[0]!r}}})"
            )
        of_rollouts = {"assistant_turns"} if "rollout_id" in named else set()
        if clash := sorted(named.keys() & (_NO_COLUMN - of_rollouts) & (self.reward.parameters or set())):
            raise ConfigError(
                f"the parameter {clash[0]!r} of the reward is never taken from the dataset; rename the column "
                "with this name in the dataset"
            )
        return named


class AsyncTRLReward(TRLReward):
    """A `TRLReward` that is a coroutine function and does not block the event loop of the caller."""

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        return await anyio.to_thread.run_sync(lambda: self.scores(prompts, completions, columns))


def _conversation(prompt: Any, completion: Any, row: Mapping[str, Any]) -> TrlConversation:
    """Return the conversation of a row.

    If the row contains an episode of reward-kit, which may have multiple turns, the conversation is taken from the
    episode. Otherwise, the conversation consists of the prompt and the completion.
    """
    if "rollout_id" not in row or "messages" not in row:
        return make_conversation(prompt, completion)
    messages = _validated(row["messages"])
    by_assistant = [index for index, message in enumerate(messages) if message.role == "assistant"]
    turns = row.get("assistant_turns", by_assistant)  # A prompt may contain example messages of the assistant.
    if not isinstance(turns, list) or any(turn not in by_assistant for turn in turns):
        raise ConfigError(f"assistant_turns must be positions of assistant messages, got {turns!r:.80}")
    return TrlConversation(messages, turns)


def rollout_scores(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    score: Sequence[float | None] | None = None,
    failure: Sequence[str | None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """Return the scores that reward-kit's rollouts contain. This is a reward function for TRL.

    Args:
        prompts: unused.
        completions: unused.
        score: the score of each rollout, or None if it is unscored.
        failure: the reason why a rollout is unscored.
        **columns: additional arguments from TRL.

    Raises:
        ConfigError: If the rollouts have no scores.
    """
    if score is None:
        raise ConfigError(
            "the rollouts have no column 'score', because they have no reward; pass reward=… to as_rollout_func"
        )
    reasons = failure or [None] * len(score)
    failures = [(text or "unscored") if one is None else None for one, text in zip(score, reasons, strict=True)]
    _log_unscored("rollout_scores", failures, columns)
    return list(score)


def _log_unscored(name: str, failures: Sequence[str | None], columns: Mapping[str, Any]) -> None:
    """Log the share of unscored completions and the reasons.

    `log_metric` and `log_extra` are used if TRL passes them.
    """
    unscored = [text for text in failures if text is not None]
    if (log_metric := columns.get("log_metric")) is not None and failures:
        log_metric(f"{name}/unscored", len(unscored) / len(failures))
    if (log_extra := columns.get("log_extra")) is not None:
        # This is logged for every batch, because the columns of TRL's table must have the same length.
        log_extra(f"{name}/failure", list(failures))
    if unscored:
        logger.warning(
            "%s: %d of %d completions are unscored; the first failure: %s",
            name,
            len(unscored),
            len(failures),
            unscored[0],
        )
