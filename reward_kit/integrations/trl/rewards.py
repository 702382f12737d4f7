"""Our reward functions as TRL's: `(prompts, completions, completion_ids, **columns) -> list[float | None]`.

A reward is called concurrently by the reward agent, at the level that the command line would choose. What it leaves
unscored is None, never 0.0: TRL leaves such rows out of the baseline.
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

from reward_kit.errors import ConfigError, Failure, did_you_mean, kind_of
from reward_kit.integrations.trl.rows import ADVANTAGES
from reward_kit.models import Message
from reward_kit.reward_agent.agent import SyncRewardAgent
from reward_kit.reward_agent.levels import SandboxChoice, reward_given, scorer_of
from reward_kit.reward_agent.scoring import Reward, Scored, ScoringRequest
from reward_kit.reward_calls import BATCH_NAMES
from reward_kit.task_parts import SandboxLevel
from reward_kit.validation import describe_validation_error

_MESSAGES = pydantic.TypeAdapter(list[Message])


class TrlConversation(NamedTuple):
    """What was said.

    Attributes:
        messages: the prompt's and the completion's.
        assistant_turns: where the assistant's messages of the completion stand.
    """

    messages: list[Message]
    assistant_turns: list[int]


def conversation_of(prompt: Any, completion: Any) -> TrlConversation:
    """The conversation of a prompt and its completion.

    A text is the user's or the assistant's one message. TRL's tool calls have arguments that are no text, and no ids:
    they get both, and an answer of a tool belongs to the first call of its name that is not answered.

    Args:
        prompt: a text, or messages.
        completion: likewise.

    Raises:
        ConfigError: it is neither, or a message is none.
    """
    asked, said = _listed(prompt, "user", "prompt"), _listed(completion, "assistant", "completion")
    messages = validated([*asked, *said])
    turns = [place for place, message in enumerate(messages) if message.role == "assistant" and place >= len(asked)]
    return TrlConversation(messages, turns)


def validated(messages: Sequence[Any]) -> list[Message]:
    """Messages in TRL's form, or ours.

    Raises:
        ConfigError: one is no message.
    """
    try:
        return _MESSAGES.validate_python(_with_ids(messages))
    except pydantic.ValidationError as error:
        raise ConfigError(f"messages: {'; '.join(describe_validation_error(error, Message))}") from None


def _listed(given: Any, role: str, what: str) -> list[Any]:
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    if isinstance(given, list):
        return given
    raise ConfigError(f"a {what} of TRL is a text or a list of messages; got {kind_of(given)}")


def _with_ids(messages: Sequence[Any]) -> list[Any]:
    waiting: list[tuple[str, str]] = []  # the names of calls that are not answered, and their ids
    made, count = [], 0
    for given in messages:
        if not isinstance(given, Mapping):
            made.append(given)
            continue
        # A column of a data set has every key in every row.
        message = {key: value for key, value in given.items() if value is not None or key == "content"}
        if message.get("tool_calls"):
            message["tool_calls"] = [_call(call, f"call_{count + i}") for i, call in enumerate(message["tool_calls"])]
            count += len(message["tool_calls"])
            waiting += [(call["function"]["name"], call["id"]) for call in message["tool_calls"]]
        elif message.get("role") == "tool":
            _answer(message, waiting)
        made.append(message)
    return made


def _call(call: Any, made_up: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise ConfigError(f"tool_calls: a call has a function; got {call!r:.80}")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    function.setdefault("name", "")
    return {**call, "type": "function", "id": call.get("id") or made_up, "function": function}


def _answer(message: dict[str, Any], waiting: list[tuple[str, str]]) -> None:
    """Name the call that a tool's message answers, and take it off those that wait."""
    if (known := message.get("tool_call_id")) is not None:
        waiting[:] = [one for one in waiting if one[1] != known]
        return
    found = next((one for one in waiting if one[0] == message.get("name")), waiting[0] if waiting else None)
    if found is not None:
        message["tool_call_id"] = found[1]
        waiting.remove(found)


OF_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")
"""What TRL hands over beside the columns of the dataset."""
_POINTWISE_NAMES = {many: one for one, many in BATCH_NAMES.items()}
_ALWAYS = {"messages", "assistant_turns", "sample", "rollout_id"}
_OF_ENVIRONMENT = {"state", "environment_return"}
_OWN = {*_ALWAYS, *_OF_ENVIRONMENT, "ground_truth", "stop_reason", "step_data"}
_NO_COLUMN = {"state", "step_data", "assistant_turns", "sample"}
_LONG = {"messages", ADVANTAGES}
logger = logging.getLogger("reward_kit.integrations.trl")


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
    """A reward function for `GRPOTrainer(reward_funcs=…)`, and for TRL's other trainers that take such.

    Args:
        reward: a `@reward_function`, a plain function of that form, a `compute_score` of verl's form; or where one is,
            `file.py:function`. A function that is given runs in this process.
        columns: what columns of the dataset are called in the reward: `{"answer": "ground_truth"}`. All others keep
            their names, and the reward gets those that it names; `sample` has all of them.
        is_async: give TRL a coroutine function, which it awaits together with its other asynchronous rewards. Either
            way the calls of a batch run concurrently.
        name: under which TRL logs it; by default the reward's id.
        options: parameters of the reward to fix.
        sandbox: the level of a reward that is named by where it is; by default as the command line chooses.
        folder: what a file is relative to; by default the working directory.
        deadline_s: for one call; what takes longer is unscored.
        max_concurrency: calls in flight.
        group_size: completions in a group of a batch reward; by default equal prompts in a row are one.

    Raises:
        ConfigError: the reward cannot be loaded, or an option would have no effect.
    """
    choice = SandboxChoice(level=sandbox, reward_time_s=deadline_s)
    scored_by = reward_given(reward, folder, choice, options, choice_is="sandbox")
    if group_size is not None and (scored_by.mode != "batch" or group_size < 1):
        raise ConfigError(f"group_size={group_size} is for batch rewards, from 1; {scored_by.id!r} is {scored_by.mode}")
    agent = SyncRewardAgent(scorer_of(scored_by, deadline_s), max_concurrency=max_concurrency)
    kind = AsyncTRLReward if is_async else TRLReward
    return kind(scored_by, agent, columns=columns, name=name, group_size=group_size)


class TRLReward:
    """A reward as TRL calls it; `as_trl_reward` makes it.

    Args:
        reward: what scores.
        agent: calls it; opened at the first call.
        columns: columns of the dataset, and what they are called in the reward.
        name: under which TRL logs it.
        group_size: completions in a group of a batch reward.

    Attributes:
        reward: as given.
        unscored: how many completions were left unscored so far, by class of failure.

    Raises:
        ConfigError: two columns would have one name, or the reward wants what only an episode has.
    """

    def __init__(
        self,
        reward: Reward,
        agent: SyncRewardAgent,
        *,
        columns: Mapping[str, str] | None = None,
        name: str | None = None,
        group_size: int | None = None,
    ) -> None:
        self.reward = reward
        self.unscored: Counter[str] = Counter()
        self.__name__ = name or reward.id
        # A batch reward's names are those of lists.
        self._columns = {column: _POINTWISE_NAMES.get(ours, ours) for column, ours in (columns or {}).items()}
        self._needed = {_POINTWISE_NAMES.get(one, one) for one in reward.required - reward.resources.keys()}
        self._agent, self._group_size, self._is_open = agent, group_size, False
        self._opening = threading.Lock()  # TRL awaits several batches at once
        if twice := [one for one, count in Counter(self._columns.values()).items() if count > 1]:
            raise ConfigError(f"columns: two of them would be {twice[0]!r}")
        if "step_data" in self._needed:
            raise ConfigError(
                f"reward {reward.id!r} asks for step_data, which only our own rollouts have; give it to as_rollout_func"
            )

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any = None, **columns: Any
    ) -> Any:
        """A score for each completion, None where it is unscored.

        Args:
            prompts: texts, or lists of messages.
            completions: likewise.
            completion_ids: their tokens; not looked at.
            **columns: of the dataset, and what TRL hands over besides.

        Raises:
            ConfigError: a column is missing that is named here or that the reward requires, or what TRL gave is no
                conversation.
        """
        return self.scores(prompts, completions, columns)

    def scores(
        self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
    ) -> list[float | None]:
        """As the call."""
        requests = self._requests(prompts, completions, columns)
        with self._opening:
            if not self._is_open:
                self._agent.__enter__()
                self._is_open = True
        tickets = [self._agent.submit(group, size) for group, size in self._groups(prompts, requests)]
        scored = [one for ticket in tickets for one in self._agent.get(len(ticket.requests), ticket=ticket).extra_infos]
        self._tell(scored, columns)
        return [one.score for one in scored]

    def close(self) -> None:
        """End the reward's workers and its thread; another call begins them anew."""
        if self._is_open:
            self._is_open = False
            self._agent.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _groups(
        self, prompts: Sequence[Any], requests: Sequence[ScoringRequest]
    ) -> list[tuple[Sequence[ScoringRequest], int]]:
        """What is submitted, each with the size of its groups."""
        size = 1 if self.reward.mode == "pointwise" else self._group_size
        if size is None:
            found = [list(same) for _, same in groupby(range(len(prompts)), key=lambda place: prompts[place])]
            return [([requests[place] for place in group], len(group)) for group in found]
        if len(requests) % size:
            raise ConfigError(f"group_size: {len(requests)} completions cannot be cut into groups of {size}")
        return [(requests, size)]

    def _requests(
        self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
    ) -> list[ScoringRequest]:
        named = self._named(columns)
        worlds = columns.get("environments") or [None] * len(prompts)
        requests = []
        for place, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            row = {name: values[place] for name, values in named.items()}
            said = _conversation(prompt, completion, row, place)
            requests.append(self._request(said, row, worlds[place], place))
        return requests

    def _request(self, said: TrlConversation, row: Mapping[str, Any], world: Any, place: int) -> ScoringRequest:
        wanted = self.reward.parameters
        play = getattr(world, "_play", None)
        # Asked for first: what breaks on the way is the play's failure.
        state = play.final_state() if play is not None and (wanted is None or "state" in wanted) else None
        return ScoringRequest(
            rollout_id=str(row.get("rollout_id") or f"completion-{place}"),
            messages=said.messages,
            ground_truth=row.get("ground_truth"),
            assistant_turns=said.assistant_turns,
            sample={name: value for name, value in row.items() if name not in _LONG},
            environment_return=play.environment_return if play is not None else row.get("environment_return"),
            stop_reason=row.get("stop_reason"),
            final_state=state,
            failure=play.failure if play is not None else _failure_of(row),
            extra={
                name: value
                for name, value in row.items()
                if name not in _OWN and name not in _LONG and (wanted is None or name in wanted)
            },
        )

    def _named(self, columns: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
        """The columns under the names that they have in the reward.

        Raises:
            ConfigError: one is missing, or two have one name.
        """
        known = {name: values for name, values in columns.items() if name not in OF_TRAINER}
        for column, ours in self._columns.items():
            if column not in known:
                raise ConfigError(f"columns: the dataset has no column {column!r}{did_you_mean(column, known)}")
            if ours != column and ours in known and ours not in self._columns:
                raise ConfigError(f"columns: {column!r} would be {ours!r}, and the dataset has a column of that name")
        named = {self._columns.get(column, column): values for column, values in known.items()}
        given = named.keys() | _ALWAYS | (_OF_ENVIRONMENT if columns.get("environments") else set())
        if missing := sorted(self._needed - given):
            raise ConfigError(
                f"reward {self.reward.id!r} asks for {missing[0]!r}, and the dataset has no such column"
                f"{did_you_mean(missing[0], known)} (name the column that it is: columns={{'…': {missing[0]!r}}})"
            )
        ours_already = {"assistant_turns"} if "rollout_id" in named else set()
        if clash := sorted(named.keys() & (_NO_COLUMN - ours_already) & (self.reward.parameters or set())):
            raise ConfigError(f"the reward's {clash[0]!r} is no column of the dataset; give that column another name")
        return named

    def _tell(self, scored: Sequence[Scored], columns: Mapping[str, Any]) -> None:
        """Count what is unscored, where TRL logs and here."""
        failures = [one.failure for one in scored]
        told = [why.to_line() if why is not None else None for why in failures]
        self.unscored.update(why.failure_class for why in failures if why is not None)
        log_unscored(self.__name__, told, columns)


class AsyncTRLReward(TRLReward):
    """`TRLReward` as a coroutine function."""

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        """As `TRLReward`; the loop of the caller is free meanwhile."""
        return await anyio.to_thread.run_sync(lambda: self.scores(prompts, completions, columns))


def _conversation(prompt: Any, completion: Any, row: Mapping[str, Any], place: int) -> TrlConversation:
    """That of an episode of ours where it is one, whose completion is tokens of several turns; else of TRL's."""
    try:
        if "rollout_id" in row and "messages" in row:
            messages = validated(row["messages"])
            said = [i for i, one in enumerate(messages) if one.role == "assistant"]
            turns = row.get("assistant_turns", said)  # a prompt may have examples of what an assistant says
            if not isinstance(turns, list) or any(turn not in said for turn in turns):
                raise ConfigError(f"assistant_turns: {turns!r:.80} are not all messages of an assistant")
            return TrlConversation(messages, turns)
        return conversation_of(prompt, completion)
    except ConfigError as error:
        raise ConfigError(f"completion {place}: {error}") from error


def _failure_of(row: Mapping[str, Any]) -> Failure | None:
    """Why an episode of ours broke: it is not scored."""
    told = row.get("failure") if "rollout_id" in row else None
    return None if told is None else Failure.from_line(told, "rollout")


def rollout_scores(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    score: Sequence[float | None] | None = None,
    failure: Sequence[str | None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """The scores that our rollouts bring along, as a reward function of TRL.

    Args:
        prompts: not looked at.
        completions: not looked at.
        score: of each rollout, None where it is unscored.
        failure: why.
        **columns: what TRL hands over besides.

    Raises:
        ConfigError: the rollouts bring none.
    """
    if score is None:
        raise ConfigError(
            "there is no column 'score': the rollouts were given no reward; give as_rollout_func reward=…"
        )
    why = failure or [None] * len(score)
    told = [(text or "unscored") if one is None else None for one, text in zip(score, why, strict=True)]
    log_unscored("rollout_scores", told, columns)
    return list(score)


def log_unscored(name: str, failures: Sequence[str | None], columns: Mapping[str, Any]) -> None:
    """Tell TRL, where it takes such, and the log of the share that is unscored, and of each reason.

    Args:
        name: of the reward.
        failures: why each completion is unscored; None where it is scored.
        columns: has `log_metric` and `log_extra`, where TRL has them.
    """
    found = [text for text in failures if text is not None]
    if (log_metric := columns.get("log_metric")) is not None and failures:
        log_metric(f"{name}/unscored", len(found) / len(failures))
    if (log_extra := columns.get("log_extra")) is not None:
        # In every batch: the columns of TRL's table are as long as one another.
        log_extra(f"{name}/failure", list(failures))
    if found:
        logger.warning(
            "%s: %d of %d completions are unscored; the first: %s", name, len(found), len(failures), found[0]
        )
