"""Test that `check_episode` and `check_group` report each planted fault with its kind, and no other."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

import numpy as np
import pytest

from reward_kit.checks.episode import Finding, check_episode, check_group
from reward_kit.episodes import EpisodeTokens, SingleAgentEpisode
from reward_kit.models import Message
from tests.checks.recording import VERSION, Recording, policy, record


def found(recording: Recording) -> list[Finding]:
    """Return all findings on a recording, with each episode's credit and its model."""
    findings = check_group(recording.episodes)
    for episode, steps, scored in zip(recording.episodes, recording.steps, recording.scored, strict=True):
        findings += check_episode(
            episode,
            steps,
            scored=scored,
            token_logprobs=policy().token_logprobs,
            current_version=VERSION,
            max_staleness=1,
        )
    return findings


def test_recorded_episodes_have_no_findings() -> None:
    recording = record()
    assert found(recording) == []
    # What the faults below are planted into is there.
    assert len(recording.long) >= 3
    assert {step.advantage for steps in recording.steps for step in steps} != {0.0}
    starts = {episode.custom_data["start"]["state_key"] for episode in recording.episodes}
    assert len(starts) == 1 and None not in starts


def on_actions(tokens: EpisodeTokens) -> list[int]:
    return [place for span in tokens.spans for place in range(span.start, span.stop)]


def tokenise_again(recording: Recording) -> None:
    """Replace the first action's ids in later prompts by other ids of equal text."""
    episode, drifted = recording.long, EpisodeTokens()
    for step, turn in episode.tokens.turns().items():
        prompt = turn.prompt_ids.tolist()
        if step:
            first = episode.tokens.spans[0]
            prompt[first.start : first.stop] = [7, 8]
        # The sampler did see the drifted prompt, so its log-probabilities are right.
        own = policy().token_logprobs(np.array([*prompt, *turn.token_ids]))[len(prompt) :]
        drifted.add_turn(step, prompt, turn.token_ids.tolist(), own.tolist(), turn.policy_version)
    episode.tokens = drifted


def move_spans(distance: int) -> Callable[[Recording], None]:
    def plant(recording: Recording) -> None:
        tokens = recording.long.tokens
        tokens.spans = [span._replace(start=span.start + distance, stop=span.stop + distance) for span in tokens.spans]

    return plant


def move_logprobs(recording: Recording) -> None:
    tokens = recording.long.tokens
    tokens.logprobs = array("d", np.roll(tokens.logprobs, 1))


def rewrite_logprobs(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Recording], None]:
    """Change the log-probabilities of the action tokens."""

    def plant(recording: Recording) -> None:
        tokens = recording.long.tokens
        places, values = on_actions(tokens), np.array(tokens.logprobs)
        values[places] = change(values[places])
        tokens.logprobs = array("d", values)

    return plant


def set_logprob(value: float) -> Callable[[Recording], None]:
    def plant(recording: Recording) -> None:
        tokens = recording.long.tokens
        tokens.logprobs[tokens.spans[1].start] = value

    return plant


def score_an_observation(recording: Recording) -> None:
    tokens = recording.long.tokens
    tokens.logprobs[tokens.spans[1].start - 1] = -1.5


def set_version(step: int, version: int) -> Callable[[Recording], None]:
    def plant(recording: Recording) -> None:
        spans = recording.long.tokens.spans
        spans[step] = spans[step]._replace(policy_version=version)

    return plant


def lose_a_turn(recording: Recording) -> None:
    del recording.long.assistant_turns[1]


def move_a_turn(recording: Recording) -> None:
    recording.long.assistant_turns[1] += 1


def say_twice(recording: Recording) -> None:
    episode = recording.long
    position = episode.assistant_turns[0] + 1
    episode.messages.insert(position, Message(role="assistant", content="once more"))
    for t in range(1, len(episode.assistant_turns)):
        episode.assistant_turns[t] += 1


def answer_another_call(recording: Recording) -> None:
    answer = recording.long.messages[recording.long.assistant_turns[0] + 1]
    assert answer.role == "tool"
    answer.tool_call_id = "call_of_somebody_else"


def answer_twice(recording: Recording) -> None:
    episode = recording.long
    place = episode.assistant_turns[0] + 1
    episode.messages.insert(place, episode.messages[place].model_copy())
    turns = episode.assistant_turns
    turns[1:] = array(turns.typecode, [turn + 1 for turn in turns[1:]])


def call_another_tool(recording: Recording) -> None:
    message = recording.long.messages[recording.long.assistant_turns[0]]
    assert message.tool_calls
    message.tool_calls[0].function.name = "look"


def reward_nan(recording: Recording) -> None:
    recording.long.rewards.data[0] = math.nan
    recording.long_steps[0].step_info["environment_reward"] = math.nan


def end_twice(recording: Recording) -> None:
    recording.long.is_terminated = recording.long.is_truncated = True


def stop_otherwise(recording: Recording) -> None:
    episode = recording.long
    episode.custom_data["stop_reason"] = "max_steps" if episode.is_terminated else "answered"


def misname_the_end(recording: Recording) -> None:
    recording.long.custom_data["stop_reason"] = "max_step"


def lose_an_observation(recording: Recording) -> None:
    recording.long.observations.data.pop()


def miss_the_score(recording: Recording) -> None:
    recording.scored[recording.long_index] = False


def set_credit(step: int, **values: float | None) -> Callable[[Recording], None]:
    def plant(recording: Recording) -> None:
        recording.steps[recording.long_index][step] = recording.long_steps[step].model_copy(update=values)

    return plant


def credit_of_another(recording: Recording) -> None:
    recording.long_steps.pop()


def step_info(key: str, value: object) -> Callable[[Recording], None]:
    def plant(recording: Recording) -> None:
        recording.long_steps[1].step_info[key] = value

    return plant


def start_elsewhere(recording: Recording) -> None:
    """Start fork and first action in another state, as after a reset with another seed."""
    episode = recording.episodes[-1]
    episode.custom_data["start"]["state_key"] = "elsewhere"
    episode.get_infos(0)["state_key"] = "elsewhere"


def act_before_the_start(recording: Recording) -> None:
    recording.long.get_infos(0)["state_key"] = "elsewhere"


def seed_otherwise(recording: Recording) -> None:
    recording.episodes[-1].custom_data["seeds"]["environment"] += 1


def fact(key: str, value: object) -> Callable[[Recording], None]:
    def plant(recording: Recording) -> None:
        recording.episodes[-1].custom_data[key] = value
        if key == "group_id":
            for step in recording.steps[-1]:
                step.step_info["group_id"] = value

    return plant


def repeat_an_episode(recording: Recording) -> None:
    for part in (recording.episodes, recording.steps, recording.scored):
        part.append(part[0])


def lose_the_beginning(recording: Recording) -> None:
    tokens = recording.long.tokens
    tokens.segments = [segment.__class__(segment.start + 1, 0, segment.reason) for segment in tokens.segments]


def lose_an_action(recording: Recording) -> None:
    recording.long.tokens.spans.pop()


def id_below_zero(recording: Recording) -> None:
    recording.long.tokens.ids[0] = -100


def lose_a_logprob(recording: Recording) -> None:
    recording.long.tokens.logprobs.pop()


FAULTS: dict[str, tuple[Callable[[Recording], None], str]] = {
    "drifted prefix: the history was tokenised again": (tokenise_again, "drifted-prefix"),
    "the mask is one token late": (move_spans(1), "shifted-mask"),
    "the mask is one token early": (move_spans(-1), "shifted-mask"),
    "the logprobs are one token late": (move_logprobs, "shifted-mask"),
    "logprob of the token before": (rewrite_logprobs(lambda x: np.roll(x, 1)), "logprob-of-other-token"),
    "logprob of the token after": (rewrite_logprobs(lambda x: np.roll(x, -1)), "logprob-of-other-token"),
    "logprobs permuted": (rewrite_logprobs(lambda x: x[::-1]), "logprob-of-other-token"),
    "logprobs at another temperature": (rewrite_logprobs(lambda x: x * 0.7), "logprob-differs"),
    "logprob of an observation is not 0": (score_an_observation, "logprob-off-action"),
    "logprob above 0": (set_logprob(0.5), "logprob-positive"),
    "logprob of a token without a chance": (set_logprob(-math.inf), "logprob-not-finite"),
    "one logprob of an action unknown": (set_logprob(math.nan), "logprob-not-finite"),
    "one logprob too few": (lose_a_logprob, "length-mismatch"),
    "a label of -100 among the ids": (id_below_zero, "token-id"),
    "ids cut off at the front": (lose_the_beginning, "segment"),
    "the last action is not in the mask": (lose_an_action, "action-span"),
    "versions descend": (set_version(0, VERSION + 1), "stale-version"),
    "a version too old": (set_version(0, VERSION - 2), "stale-version"),
    "a version unknown": (set_version(1, -1), "unknown-version"),
    "an assistant turn is missing": (lose_a_turn, "assistant-turns"),
    "an assistant turn points at an answer": (move_a_turn, "assistant-turns"),
    "two assistant messages for one action": (say_twice, "two-assistant-messages"),
    "a tool call without its answer": (answer_another_call, "unanswered-call"),
    "a tool call answered twice": (answer_twice, "call-answered-twice"),
    "a message that says another action": (call_another_tool, "action-and-message"),
    "a reward of NaN": (reward_nan, "reward-not-finite"),
    "terminated and truncated": (end_twice, "terminated-and-truncated"),
    "a stop reason of the other kind": (stop_otherwise, "stop-reason"),
    "a stop reason that is none": (misname_the_end, "stop-reason"),
    "T observations in place of T + 1": (lose_an_observation, "track-lengths"),
    "an advantage in an unscored episode": (miss_the_score, "advantage-unscored"),
    "a step without an advantage among others": (set_credit(1, advantage=None), "credit-missing"),
    "an advantage of NaN": (set_credit(1, advantage=math.nan), "credit-not-finite"),
    "the credit of a shorter episode": (credit_of_another, "credit-steps"),
    "the credit of another group": (step_info("group_id", "another"), "group-id"),
    "environment rewards moved": (step_info("environment_reward", 5.0), "environment-reward"),
    "mixed starts in a group": (start_elsewhere, "mixed-starts"),
    "something acted before the first action": (act_before_the_start, "start-moved"),
    "environment seeds differ in a group": (seed_otherwise, "mixed-seeds"),
    "two samples in one group": (fact("sample_id", "pond"), "mixed-groups"),
    "two policies in one group": (fact("policy", "another"), "mixed-groups"),
    "a group cut at the wrong place": (fact("group_id", "another"), "mixed-groups"),
    "an episode repeated to fill a batch": (repeat_an_episode, "duplicate-rollout"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_reported_with_its_kind(name: str) -> None:
    plant, kind = FAULTS[name]
    recording = record()
    plant(recording)
    findings = found(recording)
    assert {finding.kind for finding in findings} == {kind}, [finding.message for finding in findings]
    assert len(findings) == 1 and findings[0].level == "error"
    assert findings[0].rollout_id is not None and f"episode {findings[0].rollout_id}" in findings[0].message


@pytest.mark.parametrize(
    ("name", "step"), [("drifted prefix: the history was tokenised again", 1), ("logprob above 0", 1)]
)
def test_finding_names_step_and_token(name: str, step: int) -> None:
    recording = record()
    FAULTS[name][0](recording)
    (finding,) = found(recording)
    assert (finding.step, finding.rollout_id) == (step, recording.long.id_)
    assert finding.token is not None and f"step {step}, token {finding.token}: " in finding.message


def test_shifted_logprobs_are_detected_by_zeros_outside_actions() -> None:
    recording = record()
    move_logprobs(recording)
    assert [finding.kind for finding in check_episode(recording.long)] == ["shifted-mask"]
    recording = record()
    rewrite_logprobs(lambda x: np.roll(x, 1))(recording)
    assert check_episode(recording.long) == []


def test_rewritten_context_with_a_reason_is_valid() -> None:
    episode = SingleAgentEpisode("r")
    episode.add_env_reset("o")
    for step, (prompt, reason) in enumerate((([1, 2], ""), ([1, 9], "reasoning stripped"))):
        episode.tokens.add_turn(step, prompt, [5], [-1.0], reason=reason)
        episode.add_env_step("o", {"type": "text", "content": ""}, None)
    assert check_episode(episode) == []


def test_rewritten_prompt_without_a_reason_is_a_warning() -> None:
    episode = SingleAgentEpisode("r")
    episode.add_env_reset("o")
    for step, prompt in enumerate(([1, 2], [1, 9])):
        episode.tokens.add_turn(step, prompt, [5], [-1.0])
        episode.add_env_step("o", {"type": "text", "content": ""}, None)
    (finding,) = check_episode(episode)
    assert (finding.kind, finding.level) == ("drifted-prefix", "warning")


def test_segment_that_extends_the_previous_one_is_reported() -> None:
    episode = SingleAgentEpisode("r")
    episode.add_env_reset("o")
    for step, prompt in enumerate(([1, 2], [1, 9, 5, 7])):
        episode.tokens.add_turn(step, prompt, [5], [-1.0])
        episode.add_env_step("o", {"type": "text", "content": ""}, None)
    episode.tokens.ids[4] = 2  # 1 2 5 | 1 2 5 7 5
    (finding,) = check_episode(episode)
    assert finding.kind == "drifted-prefix" and "belongs to the same segment" in finding.message


def test_unknown_logprobs_and_actions_without_tokens_are_valid() -> None:
    episode = SingleAgentEpisode("r")
    episode.add_env_reset("o")
    for step, (prompt, sampled) in enumerate((([1], [2]), ([1, 2, 3], []))):
        episode.tokens.add_turn(step, prompt, sampled)
        episode.add_env_step("o", {"type": "text", "content": ""}, None)
    assert check_episode(episode) == []


def test_credit_lines_are_checked_like_steps() -> None:
    recording = record()
    lines = [line for line in recording.credit.rows() if line["rollout_id"] == recording.long.id_]
    assert check_episode(recording.long, lines, scored=True) == []
    lines[-1]["A_E"] += 0.25
    (finding,) = check_episode(recording.long, lines, scored=True)
    assert (finding.kind, finding.step) == ("episode-advantage-varies", len(lines) - 1)


def test_unscored_episode_without_credit_is_valid() -> None:
    recording = record()
    steps = [step.model_copy(update={"advantage": None, "return_to_go": None}) for step in recording.long_steps]
    assert check_episode(recording.long, steps, scored=False) == []


def test_mixed_unverified_starts_are_a_warning() -> None:
    recording = record()
    start_elsewhere(recording)
    recording.episodes[-1].custom_data["start"]["verified"] = False
    assert [(f.kind, f.level) for f in check_group(recording.episodes)] == [("mixed-starts", "warning")]


def test_finding_behind_a_rewritten_context_has_the_right_position() -> None:
    episode = SingleAgentEpisode("e")
    episode.add_env_reset("o")
    for step, (prompt, logprobs) in enumerate([([1], [-1.0]), ([7, 7], [-1.0]), ([7, 7, 5, 6], [0.5])]):
        episode.tokens.add_turn(step, prompt, [5], logprobs, policy_version=1, reason="compacted")
        episode.add_env_step("o", "a", 0.0)
    ((kind, step, token),) = [(one.kind, one.step, one.token) for one in check_episode(episode)]
    assert (kind, step, token) == ("logprob-positive", 2, 6)
