"""`ReplayPolicy`, which replays a recorded run and reports the first difference.

A new episode repeats the actions, tokens, usage and value estimates of the recorded episode in a new environment. Its
conversation is compared with the recorded conversation before every action and at the end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anyio.to_thread

from reward_kit.agent.models import read_log_probs
from reward_kit.agent.policy_interface import Action, AgentPolicy, EpisodeContext, PastTurn, PolicyOutput, ToolAnswer
from reward_kit.display_text import first_difference
from reward_kit.environments.base import ToolSpec, hash_key
from reward_kit.episodes.record import episode_from_record, get_attempt, get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, Failure, PolicyError, did_you_mean
from reward_kit.models import Message
from reward_kit.safe_input import complete_lines

logger = logging.getLogger("reward_kit.agent")
_AFTER_IDENTITY = b',"stop_reason":'
_ENVIRONMENT_FAILURES = ("EnvironmentFailure", "ToolError")


class _Line(NamedTuple):
    """An episode's attempt number, and the offset of its line in the file. Only the latest attempt is replayed."""

    attempt: int
    offset: int


class ReplayPolicy(AgentPolicy):
    """A policy that replays recorded episodes.

    It replays the episode with the same rollout id or otherwise the episode with the same sample and the same
    position in its group.

    Args:
        run: the directory of a run, or its `episodes.jsonl`. Only an index of the file is kept in memory.
        on_difference: what to do at the first difference in the conversation. With "stop", the episode fails with a
            `PolicyError` that shows the difference. With "continue", the difference is logged and the episode
            continues.
        policy: the label of the policy to replay. It is required if the run contains multiple policies.

    Raises:
        ConfigError: If the run or the policy does not exist, or if `policy` is required but missing.
    """

    path_options = ("run",)
    is_free = True

    def __init__(
        self, run: str | Path, on_difference: Literal["stop", "continue"] = "stop", policy: str | None = None
    ) -> None:
        if on_difference not in ("stop", "continue"):
            raise ConfigError(f"on_difference must be stop or continue, got {on_difference!r}")
        self._file, self._stops = episodes_file(Path(run)), on_difference == "stop"
        labels: set[str] = set()
        self._by_id: dict[str, _Line] = {}
        self._by_position: dict[tuple[str, int], _Line] = {}
        for offset, identity in _identities(self._file):
            labels.add(identity["policy"])
            if policy is None or identity["policy"] == policy:
                line = _Line(get_attempt(identity), offset)
                rollout_id, position = identity["rollout_id"], (identity["sample_id"], identity["rollout_index"])
                self._by_id[rollout_id] = max(line, self._by_id.get(rollout_id, line))
                self._by_position[position] = max(line, self._by_position.get(position, line))
        if policy is not None and policy not in labels:
            raise ConfigError(f"{self._file} has no episodes from policy {policy!r}{did_you_mean(policy, labels)}")
        if not labels:
            raise ConfigError(f"{self._file} has no finished episodes")
        if policy is None and len(labels) > 1:
            names = ", ".join(sorted(labels))
            raise ConfigError(f"{self._file} has episodes from multiple policies ({names}); set policy to one of them")

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Return a session that replays one recorded episode.

        Raises:
            PolicyError: If the run has no matching episode, or if the episode has no recorded actions.
        """
        position = (context.sample_id, context.rollout_index)
        line = self._by_id.get(context.rollout_id) or self._by_position.get(position)
        if line is None:
            number = f"rollout {context.rollout_index} of sample {context.sample_id!r}"
            raise PolicyError(f"{self._file} has no recorded episode for {number} ({context.rollout_id})")
        episode = await anyio.to_thread.run_sync(self._read, line.offset)
        return _ReplaySession(episode, f"replay of {episode.id_} ({self._file})", self._stops, context.call_tool)

    def _read(self, offset: int) -> SingleAgentEpisode:
        with self._file.open("rb") as lines:
            lines.seek(offset)
            episode = episode_from_record(json.loads(lines.readline()))
        if not episode.is_reset or len(episode.assistant_turns) != len(episode):
            raise PolicyError(f"{self._file}: episode {episode.id_} has no recorded actions to replay")
        return episode

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Raise a `PolicyError`, because an action always belongs to an episode.

        Use the session that `open` returns.
        """
        raise PolicyError("ReplayPolicy cannot act outside an episode; open a session first")


class _ReplaySession(AgentPolicy):
    """A session that replays one recorded episode from its beginning."""

    def __init__(
        self,
        episode: SingleAgentEpisode,
        name: str,
        stops: bool,
        call_tool: Callable[[str, Mapping[str, Any]], Awaitable[ToolAnswer]] | None,
    ) -> None:
        self._episode, self._name, self._stops, self._call_tool = episode, name, stops, call_tool
        self._turns = episode.tokens.turns()
        self._next = 0
        self._compared = 0
        self._has_diverged = False

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return the next recorded action.

        Raises:
            PolicyError: If the conversation differs from the recorded conversation or is longer.
            RewardKitError: If the recorded policy raised this error at this point.
        """
        step, recorded = self._next, self._episode
        if step == len(recorded):
            return self._past_the_end(observation)
        # Before the first action, compare with the conversation that the task passed to the recorded policy.
        given = recorded.get_infos(0).get("given_messages") if step == 0 else None
        if given is not None:
            expected = [Message.model_validate(message) for message in given]
        else:
            expected = recorded.messages[: recorded.assistant_turns[step]]
        self._compare(observation, expected)
        outputs = {key: column.get(step) for key, column in recorded.extra_model_outputs.items()}
        action = await self._action(step, outputs)
        self._next += 1
        # The record starts with the prompt of the first action.
        self._compared = recorded.assistant_turns[step]
        log_probs = read_log_probs(recorded, step, self._turns.get(step))
        return PolicyOutput(action, outputs.get("raw_policy_output"), log_probs, outputs.get("value_estimate"))

    async def resume(self, turns: Sequence[PastTurn]) -> None:
        """Skip the actions of earlier turns, because these turns have already been repeated.

        Raises:
            PolicyError: If the recorded episode is shorter.
        """
        if len(turns) > len(self._episode):
            raise PolicyError(
                f"{self._name}: the recorded episode has {len(self._episode)} actions, but {len(turns)} must be skipped"
            )
        self._next = len(turns)

    async def on_episode_end(self, messages: Sequence[Message]) -> None:
        """Compare the messages after the last action with the recorded messages.

        Raises:
            PolicyError: If the messages differ.
        """
        self._compare(messages, self._episode.messages)

    def _compare(self, now: Sequence[Message], before: Sequence[Message]) -> None:
        if self._has_diverged:
            return
        pairs = zip_longest(before[self._compared :], now[self._compared :])
        for index, (old, new) in enumerate(pairs, self._compared):
            if old is not None and new is not None:
                difference = first_difference(old.to_chat(), new.to_chat())
                if not difference:
                    continue
                self._report(f"message {index} ({old.role}) differs{difference}")
            elif (only := old or new) is not None:
                state = "missing" if new is None else "not in the recording"
                self._report(f"message {index} ({only.role}): {only.text!r:.120} is {state}")
            return
        self._compared = len(before)

    def _report(self, what: str) -> None:
        """Raise or log the first difference.

        Later differences result from the first difference and are not reported.
        """
        if self._has_diverged:
            return
        text = f"{self._name}: step {self._next}: {what}"
        if self._stops:
            raise PolicyError(text)
        logger.warning("%s; continuing", text)
        self._has_diverged = True

    def _past_the_end(self, observation: Sequence[Message]) -> PolicyOutput:
        """Raise the recorded policy's failure, or report that this episode is longer than the recorded episode."""
        self._compare(observation[: len(self._episode.messages)], self._episode.messages)
        facts = get_facts(self._episode)
        failure = facts["failure"]
        if failure and failure["where"] not in _ENVIRONMENT_FAILURES and not self._has_diverged:
            raise Failure.from_json(failure).to_exception()
        ended = f"ended with {facts['stop_reason']} after {len(self._episode)} actions"
        self._report(f"the recorded episode {ended}, but this episode continues")
        return PolicyOutput({"type": "terminate"})

    async def _action(self, step: int, outputs: Mapping[str, Any]) -> Action:
        """Repeat the calls that the policy executed itself, and return the recorded action."""
        recorded, action = self._episode, dict(self._episode.get_actions(step))
        turn, own = recorded.assistant_turns[step], outputs.get("own_account") or ()
        if step == 0 and "given_messages" in recorded.get_infos(0):
            action["prompt_messages"] = [message.to_chat() for message in recorded.messages[:turn]]
        elif outputs.get("prompt_messages") is not None:
            action["prompt_messages"] = outputs["prompt_messages"]
        if "is_final" in own:
            action["is_final"] = True
        for call in recorded.get_infos(step + 1).get("own_calls") or ():
            if self._call_tool is None:
                raise PolicyError(f"{self._name}: the policy called {call['name']}, but no episode is open")
            answer = (await self._call_tool(call["name"], call["arguments"])).text
            if hash_key(answer) != call["answer"]:
                self._report(
                    f"{call['name']} {call['arguments']!r} returned a result that differs from the recorded result: "
                    f"{answer!r:.200}"
                )
        if "results" in own:
            action["results"] = [message.to_chat() for message in recorded.answers_to(step)]
        return action


def episodes_file(run: Path) -> Path:
    """Return the `episodes.jsonl` of a run, given the directory of the run or the file itself.

    Raises:
        ConfigError: If the file is missing.
    """
    file = run / "episodes.jsonl" if run.is_dir() else run
    if not file.is_file():
        raise ConfigError(
            f"run: {run} is not a run; set it to a directory that contains episodes.jsonl, or to that file"
        )
    return file


def recorded_labels(run: Path) -> list[str]:
    """Return the labels of the policies that have episodes in a run.

    Raises:
        ConfigError: If the run cannot be read.
    """
    return sorted({identity["policy"] for _, identity in _identities(episodes_file(run))})


def _identities(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the offset and the first fields of each line. An incomplete last line is skipped."""
    for number, (offset, line) in enumerate(complete_lines(file), 1):
        # Quotes are escaped inside JSON strings, so this match is the key itself. The long rest need not be parsed.
        end = line.find(_AFTER_IDENTITY)
        try:
            identity = json.loads(line if end < 0 else line[:end] + b"}")
            known = {key: identity[key] for key in ("rollout_id", "sample_id", "rollout_index", "policy")}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}:{number}: not an episode: {type(error).__name__}: {error}") from None
        yield offset, {**known, "attempt": get_attempt(identity)}
