"""Test reward functions as TRL calls them: columns, conversations, groups; unscored is None and counted."""

from __future__ import annotations

import asyncio
import inspect
import threading
from pathlib import Path
from typing import Any

import pytest

from reward_kit.environments.base import StateSnapshot
from reward_kit.errors import ConfigError, Failure
from reward_kit.integrations.trl.rewards import as_trl_reward, make_conversation, rollout_scores
from reward_kit.models import EvaluateResult, Message
from reward_kit.typed_interface import reward_function

PROMPTS = ["2 + 2?", "2 + 2?", "3 + 3?", "3 + 3?"]
COMPLETIONS = ["4", "5", "6", "six"]
ANSWERS = ["4", "4", "6", "6"]


@reward_function
def exact(messages: list[Message], ground_truth: str) -> EvaluateResult:
    return EvaluateResult(score=float(messages[-1].text == ground_truth))


@reward_function
async def exact_awaited(messages: list[Message], ground_truth: str) -> EvaluateResult:
    await asyncio.sleep(0)
    return EvaluateResult(score=float(messages[-1].text == ground_truth))


@reward_function
def choosy(messages: list[Message]) -> EvaluateResult:
    if not messages[-1].text.isdigit():
        raise ValueError("no number")
    return EvaluateResult(score=1.0)


@reward_function(mode="batch")
def share(rollouts_messages: list[list[Message]], ground_truths: list[str]) -> list[EvaluateResult]:
    """Score the share of the group with the same answer."""
    said = [messages[-1].text for messages in rollouts_messages]
    return [EvaluateResult(score=said.count(one) / len(said)) for one in said]


class Log:
    """The logging callbacks that TRL passes."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.table: dict[str, list[Any]] = {}

    def columns(self) -> dict[str, Any]:
        return {"log_metric": self.metrics.__setitem__, "log_extra": self.table.__setitem__, "trainer_state": object()}


@pytest.mark.parametrize("function", [exact, exact_awaited])
def test_column_is_used_as_ground_truth(function: Any) -> None:
    with as_trl_reward(function, columns={"answer": "ground_truth"}) as reward:
        found = reward(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=[[1]] * 4, answer=ANSWERS)
    assert found == [1.0, 0.0, 1.0, 0.0]
    assert reward.__name__ == function.__name__
    assert not inspect.iscoroutinefunction(reward.__call__)


async def test_async_reward_is_awaited_in_the_trl_event_loop() -> None:
    loop_thread = threading.current_thread()

    @reward_function
    def where(messages: list[Message]) -> EvaluateResult:
        return EvaluateResult(score=float(threading.current_thread() is not loop_thread))

    with as_trl_reward(where, is_async=True, name="elsewhere") as reward:
        assert inspect.iscoroutinefunction(reward.__call__) and reward.__name__ == "elsewhere"
        both = await asyncio.gather(*(reward(prompts=PROMPTS, completions=COMPLETIONS) for _ in range(2)))
    assert both == [[1.0] * 4] * 2


def test_reward_works_in_a_thread_with_a_running_event_loop() -> None:
    async def trl() -> list[float | None]:
        with as_trl_reward(exact) as reward:
            found: list[float | None] = reward(PROMPTS, COMPLETIONS, ground_truth=ANSWERS)
            return found

    assert asyncio.run(trl()) == [1.0, 0.0, 1.0, 0.0]


def test_calls_run_concurrently() -> None:
    together = threading.Barrier(4, timeout=20)

    @reward_function
    def meets(messages: list[Message]) -> EvaluateResult:
        together.wait()
        return EvaluateResult(score=1.0)

    with as_trl_reward(meets, max_concurrency=4) as reward:
        assert reward(PROMPTS, COMPLETIONS) == [1.0] * 4


def test_failed_reward_is_unscored_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    with as_trl_reward(choosy) as reward:
        assert reward(PROMPTS, COMPLETIONS, **log.columns()) == [1.0, 1.0, 1.0, None]
        assert reward(PROMPTS[:1], COMPLETIONS[:1], **log.columns()) == [1.0]
    assert reward.unscored == {"crash": 1}
    assert log.metrics == {"choosy/unscored": 0.0}
    assert log.table == {"choosy/failure": [None]}
    assert "choosy: 1 of 4 completions are unscored; the first failure: crash: " in caplog.text
    assert "no number" in caplog.text


def test_unscored_share_and_reasons_are_logged_by_trl() -> None:
    log = Log()
    with as_trl_reward(choosy) as reward:
        reward(PROMPTS, COMPLETIONS, **log.columns())
    assert log.metrics == {"choosy/unscored": 0.25}
    assert log.table["choosy/failure"][:3] == [None] * 3
    assert log.table["choosy/failure"][3].startswith("crash: ")


def test_call_beyond_the_deadline_is_unscored() -> None:
    @reward_function
    async def never(messages: list[Message]) -> EvaluateResult:
        await asyncio.Event().wait()
        raise AssertionError("the deadline should have ended the call")

    with as_trl_reward(never, deadline_s=0.01) as reward:
        assert reward(PROMPTS[:2], COMPLETIONS[:2]) == [None, None]
    assert reward.unscored == {"timeout": 2}


def test_consecutive_equal_prompts_form_a_group() -> None:
    said = ["a", "a", "b", "b", "b", "a"]
    prompts = ["x", "x", "x", "y", "y", "y"]
    with as_trl_reward(share) as reward:
        found = reward(prompts, said, ground_truth=["-"] * 6)
    assert found == pytest.approx([2 / 3, 2 / 3, 1 / 3, 2 / 3, 2 / 3, 1 / 3])
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    with as_trl_reward(share, columns={"answer": "ground_truth"}) as reward:
        again = reward(conversations, [[{"role": "assistant", "content": one}] for one in said], answer=["-"] * 6)
    assert again == found


def test_group_size_splits_repeated_prompts() -> None:
    with as_trl_reward(share, group_size=2) as reward:
        assert reward(["x"] * 4, ["a", "b", "a", "a"], ground_truth=["-"] * 4) == [0.5, 0.5, 1.0, 1.0]
        with pytest.raises(ConfigError, match="3 completions cannot be divided into groups of 2"):
            reward(["x"] * 3, ["a"] * 3, ground_truth=["-"] * 3)
    with pytest.raises(ConfigError, match="group_size=2 must be at least 1, and applies only to batch rewards"):
        as_trl_reward(exact, group_size=2)


def test_reward_receives_the_columns_it_names() -> None:
    seen: list[Any] = []

    @reward_function
    def looks(messages: list[Message], level: int, sample: dict[str, Any], rollout_id: str) -> EvaluateResult:
        seen.append((level, sample, rollout_id))
        return EvaluateResult(score=0.5)

    with as_trl_reward(looks, columns={"hard": "level"}) as reward:
        reward(PROMPTS[:2], COMPLETIONS[:2], hard=[1, 2], other=["a", "b"])
    assert sorted(seen) == [
        (1, {"level": 1, "other": "a"}, "completion-0"),
        (2, {"level": 2, "other": "b"}, "completion-1"),
    ]


def test_missing_column_suggests_the_nearest() -> None:
    with as_trl_reward(exact, columns={"answer": "ground_truth"}) as reward:
        with pytest.raises(ConfigError, match="no column 'answer'; did you mean 'answers'"):
            reward(PROMPTS, COMPLETIONS, answers=ANSWERS)
        with pytest.raises(
            ConfigError,
            match="'answer' would be renamed to 'ground_truth', but the dataset already has a column with that",
        ):
            reward(PROMPTS, COMPLETIONS, answer=ANSWERS, ground_truth=ANSWERS)
    with as_trl_reward(exact) as reward, pytest.raises(ConfigError, match="requires 'ground_truth', but the dataset"):
        reward(PROMPTS, COMPLETIONS, answer=ANSWERS)


def test_parameters_unavailable_in_a_dataset_are_rejected() -> None:
    def steps(messages: list[Message], step_data: list[Any]) -> EvaluateResult:
        raise AssertionError("never called")

    def state(messages: list[Message], state: Any) -> EvaluateResult:
        raise AssertionError("never called")

    with pytest.raises(ConfigError, match="requires step_data, but only reward-kit's rollouts have step_data"):
        as_trl_reward(steps)
    with as_trl_reward(state) as reward, pytest.raises(ConfigError, match="requires 'state'"):
        reward(PROMPTS, COMPLETIONS)
    with (
        as_trl_reward(state) as reward,
        pytest.raises(ConfigError, match="the parameter 'state' of the reward is never taken from the dataset"),
    ):
        reward(PROMPTS, COMPLETIONS, state=[1] * 4)
    with pytest.raises(ConfigError, match="two columns would be renamed to 'x'"):
        as_trl_reward(choosy, columns={"a": "x", "b": "x"})
    with pytest.raises(ConfigError, match="sandbox has no effect on a loaded reward"):
        as_trl_reward(choosy, sandbox="warm")


REWARD = """
import os
from reward_kit import EvaluateResult, Message, reward_function

@reward_function
def inside(messages: list[Message], ground_truth: str, bonus: float = 0.0) -> EvaluateResult:
    score = float(messages[-1].text == ground_truth) + bonus
    return EvaluateResult(score=score, reason=str(os.getppid()))

@reward_function
def leaves(messages: list[Message]) -> EvaluateResult:
    os._exit(0)
"""


def test_reward_given_by_name_is_sandboxed(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    with as_trl_reward("reward.py:inside", folder=tmp_path, options={"bonus": 0.5}) as reward:
        assert getattr(reward.reward, "level", "in_process") in ("warm", "in_process")
        assert reward(PROMPTS, COMPLETIONS, ground_truth=ANSWERS) == [1.5, 0.5, 1.5, 0.5]
    if getattr(reward.reward, "level", None) != "warm":
        pytest.skip("nothing is confined on this machine")
    with as_trl_reward("reward.py:leaves", folder=tmp_path) as reward:  # it ends its own worker, and not TRL
        assert reward(PROMPTS[:2], COMPLETIONS[:2]) == [None, None]


def test_rollouts_are_scored_from_their_episode_messages() -> None:
    conversation = [
        {"role": "user", "content": "dial"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "4"},
    ]
    turns: list[Any] = []

    @reward_function
    def last(messages: list[Message], assistant_turns: list[int], environment_return: float) -> EvaluateResult:
        turns.append(assistant_turns)
        return EvaluateResult(score=environment_return + float(messages[-1].text))

    extras = {
        "rollout_id": ["a", "b"],
        "messages": [conversation, conversation],
        "environment_return": [1.0, 1.0],
        "failure": [None, "timeout: too slow"],
    }
    with as_trl_reward(last) as reward:
        assert reward(["id", "id"], ["red go on 4", "red"], **extras) == [5.0, None]
    assert turns == [[1, 3]]
    assert reward.unscored == {"timeout": 1}


def test_reward_receives_the_steps_of_the_policy() -> None:
    example = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    said = [*example, {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    seen: list[Any] = []

    @reward_function
    def steps(messages: list[Message], assistant_turns: list[int]) -> EvaluateResult:
        seen.append(assistant_turns)
        return EvaluateResult(score=1.0)

    rollout = {"rollout_id": ["a"], "messages": [said], "failure": [None]}
    with as_trl_reward(steps) as reward:
        assert reward(["id"], ["4"], assistant_turns=[[3]], **rollout) == [1.0]
        with pytest.raises(ConfigError, match=r"completion 0: assistant_turns must be positions of assistant messages"):
            reward(["id"], ["4"], assistant_turns=[[0]], **rollout)
        with pytest.raises(ConfigError, match="parameter 'assistant_turns' of the reward is never taken"):
            reward(["2 + 2?"], ["4"], assistant_turns=[[3]])
    assert seen == [[3]]


class _Play:
    environment_return, failure = 0.25, None

    def final_state(self) -> StateSnapshot:
        return StateSnapshot.from_json({"door": "open"})


class _BrokenPlay(_Play):
    failure = Failure("crash", "EnvironmentFailure", "the world broke")


class _Environment:
    def __init__(self, play: _Play) -> None:
        self._play = play


def test_environments_provide_state_and_return() -> None:
    @reward_function
    def opened(messages: list[Message], state: Any, environment_return: float) -> EvaluateResult:
        return EvaluateResult(score=environment_return + float(state["door"] == "open"))

    with as_trl_reward(opened) as reward:
        found = reward(PROMPTS[:2], COMPLETIONS[:2], environments=[_Environment(_Play()), _Environment(_BrokenPlay())])
    assert found == [1.25, None]


class _NoState(_Play):
    def final_state(self) -> StateSnapshot:
        raise AssertionError("must not be requested")


class _StateThatBreaks(_Play):
    def final_state(self) -> None:  # type: ignore[override]
        self.failure = Failure("timeout", "DeadlineError", "no state in time")


def test_final_state_is_read_on_demand_and_its_failure_affects_a_single_row() -> None:
    @reward_function
    def opened(messages: list[Message], state: Any) -> EvaluateResult:
        return EvaluateResult(score=float(state["door"] == "open"))

    with as_trl_reward(choosy) as reward:
        assert reward(["a"], ["4"], environments=[_Environment(_NoState())]) == [1.0]
    with as_trl_reward(opened) as reward:
        worlds = [_Environment(_StateThatBreaks()), _Environment(_Play())]
        assert reward(["a", "a"], ["4", "4"], environments=worlds) == [None, 1.0]
    assert reward.unscored == {"timeout": 1}


def test_rollout_scores_are_passed_to_trl() -> None:
    log = Log()
    assert rollout_scores([], [], score=[1.0, None], failure=[None, "timeout: slow"], **log.columns()) == [1.0, None]
    assert log.metrics == {"rollout_scores/unscored": 0.5}
    assert log.table == {"rollout_scores/failure": [None, "timeout: slow"]}
    with pytest.raises(ConfigError, match="the rollouts have no column 'score'"):
        rollout_scores([], [])


def test_tool_calls_of_trl_get_ids_and_arguments_as_text() -> None:
    call = {"type": "function", "function": {"name": "dial", "arguments": {"colour": "red"}}}
    other = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    completion = [
        {"role": "assistant", "content": "", "tool_calls": [call, other]},
        {"role": "tool", "name": "look", "content": "a door"},
        {"role": "tool", "name": "dial", "content": "click"},
        {"role": "assistant", "content": "done", "tool_calls": None, "name": None},
    ]
    said = make_conversation([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], completion)
    assert said.assistant_turns == [2, 5]
    calls = said.messages[2].tool_calls or []
    assert [(one.id, one.function.arguments) for one in calls] == [("call_0", '{"colour": "red"}'), ("call_1", "{}")]
    assert [message.tool_call_id for message in said.messages[3:5]] == ["call_1", "call_0"]


def test_invalid_conversation_is_rejected() -> None:
    with pytest.raises(ConfigError, match="a TRL completion must be a string or a list of messages, got"):
        make_conversation("hi", 3)
    with (
        as_trl_reward(choosy) as reward,
        pytest.raises(ConfigError, match="completion 1: messages: "),
    ):
        reward(["a", "a"], ["1", [{"role": "nobody", "content": "x"}]])
