"""Test that `check_rows` reports each planted fault with its kind, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from reward_kit.checks.rows import check_rows
from reward_kit.errors import ConfigError
from reward_kit.tokens import TokenBatch, build_rows
from tests.checks.recording import VERSION, policy, record
from tests.tiny_policy import PAD


def first_action(batch: TokenBatch, row: int = 0) -> tuple[int, int]:
    """Return the start and end of the first action of a row."""
    mask = batch.batch["action_mask"][row]
    start = int(np.argmax(mask))
    return start, start + int(np.argmin(mask[start:]))


def move_mask(batch: TokenBatch) -> None:
    """Shift the mask alone; arrays derived from it shift along."""
    for key in ("action_mask", "loss_mask", "completion_mask", "advantages", "returns", "step_rewards"):
        batch.batch[key][0] = np.roll(batch.batch[key][0], -1)
    batch.batch["policy_versions"][0] = np.roll(batch.batch["policy_versions"][0], -1)


def invert_mask(batch: TokenBatch) -> None:
    """Invert the mask along the whole row."""
    attended = batch.batch["attention_mask"][0]
    batch.batch["action_mask"][0] = attended - batch.batch["action_mask"][0]
    batch.batch["completion_mask"][0] = attended
    for key in ("loss_mask", "advantages", "returns", "step_rewards"):
        batch.batch[key][0] = 0
    batch.batch["policy_versions"][0] = VERSION


def set_on(key: str, where: int, value: float) -> Callable[[TokenBatch], None]:
    """Change one number of the first row, `where` tokens after the start of its first action."""

    def plant(batch: TokenBatch) -> None:
        batch.batch[key][0, first_action(batch)[0] + where] = value

    return plant


def shorten(batch: TokenBatch) -> None:
    batch.batch["action_mask"] = batch.batch["action_mask"][:, 1:]


def pull_reward_to_the_end(batch: TokenBatch) -> None:
    """Move the reward to the end of the padded row, as code that indexes from the right does."""
    batch.batch["step_rewards"][0] = 0
    batch.batch["step_rewards"][0, -1] = 1.0
    batch.batch["attention_mask"][0, -1] = 0


FAULTS: dict[str, tuple[Callable[[TokenBatch], None], str]] = {
    "the mask is one token early": (move_mask, "shifted-mask"),
    "the mask is the other way round": (invert_mask, "inverted-mask"),
    "a mask of 2": (set_on("action_mask", 0, 2), "mask-values"),
    "an action outside the completion": (set_on("completion_mask", 0, 0), "mask-outside"),
    "loss on an observation": (set_on("loss_mask", 3, 1), "mask-outside"),
    "a mask on the axis of the completion": (shorten, "length-mismatch"),
    "logprob of an observation": (set_on("logprobs", 3, -1.0), "logprob-off-action"),
    "logprob above 0": (set_on("logprobs", 1, 0.2), "logprob-positive"),
    "logprob of another token": (set_on("logprobs", 1, -30.0), "logprob-differs"),
    "an advantage on an observation": (set_on("advantages", 3, 0.5), "credit-off-action"),
    "a return on an observation": (set_on("returns", 3, 0.5), "credit-off-action"),
    "credit that varies within an action": (set_on("advantages", 1, 9.0), "credit-varies"),
    "a step reward on the first token": (set_on("step_rewards", 0, 1.0), "reward-misplaced"),
    "a step reward at the end of the padding": (pull_reward_to_the_end, "reward-misplaced"),
    "two versions in one action": (set_on("policy_versions", 1, VERSION - 1), "two-versions"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("with_episodes", [False, True])
def test_planted_fault_is_reported_with_its_kind(name: str, with_episodes: bool) -> None:
    plant, kind = FAULTS[name]
    recording = record()
    recording.episodes.sort(key=len)  # the first row has padding
    recording.steps.sort(key=len)
    batch = recording.rows()
    assert batch.batch["attention_mask"][0, -1] == 0
    plant(batch)
    known = recording.episodes if with_episodes else None
    findings = check_rows(batch, known, token_logprobs=policy().token_logprobs, current_version=VERSION)
    assert {finding.kind for finding in findings} == {kind}, [finding.message for finding in findings]
    assert findings[0].message.startswith(f"row 0 (episode {recording.episodes[0].id_}, segment 0)")


@pytest.mark.parametrize("with_episodes", [False, True])
def test_rows_of_recorded_episodes_have_no_findings(with_episodes: bool) -> None:
    recording = record()
    known = recording.episodes if with_episodes else None
    options = {"token_logprobs": policy().token_logprobs, "current_version": VERSION}
    assert check_rows(recording.rows(), known, **options) == []
    unscored = build_rows(recording.episodes, pad_token_id=PAD)
    assert check_rows(unscored, known, **options) == []


def test_advantage_of_an_unscored_row_is_reported() -> None:
    batch = build_rows(record().episodes, pad_token_id=PAD)
    start, stop = first_action(batch)
    batch.batch["advantages"][0, start:stop] = -0.5
    assert [finding.kind for finding in check_rows(batch)] == ["advantage-unscored"]


def test_current_version_may_come_from_the_batch() -> None:
    batch = record().rows()
    batch.meta_info["policy_version"] = VERSION + 2
    assert {finding.kind for finding in check_rows(batch)} == {"stale-version"}
    assert check_rows(batch, max_staleness=2) == []
    batch.batch["policy_versions"][:] = -1
    assert {finding.kind for finding in check_rows(batch)} == {"unknown-version"}


@pytest.mark.parametrize("per", ["segment", "action"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_and_rows_per_action_are_valid(padding: Literal["left", "right"], per: Any) -> None:
    recording = record()
    batch = build_rows(recording.episodes, recording.steps, pad_token_id=PAD, padding=padding, per=per)
    assert batch.batch["attention_mask"].min() == 0
    assert check_rows(batch, recording.episodes, token_logprobs=policy().token_logprobs) == []


def test_action_without_tokens_is_valid() -> None:
    recording = record()
    episode, steps = recording.long, recording.long_steps
    last = episode.tokens.spans[-1]
    turns = list(episode.tokens.turns().items())
    episode.tokens = type(episode.tokens)()
    for step, turn in turns:
        sampled = [] if step == last.step else turn.token_ids.tolist()
        episode.tokens.add_turn(step, turn.prompt_ids.tolist(), sampled, [-1.0] * len(sampled), VERSION)
    assert check_rows(build_rows([episode], [steps], pad_token_id=PAD), [episode]) == []


def test_adjacent_actions_are_separated_with_the_episode() -> None:
    recording = record()
    episode = recording.long
    steps, tokens = recording.long_steps, episode.tokens
    fresh = type(tokens)()
    seen = [1]
    for step in range(len(episode)):
        fresh.add_turn(step, seen, [5, 6], [-1.0, -2.0], VERSION)
        seen = [*seen, 5, 6]
    episode.tokens = fresh
    steps = [step.model_copy(update={"advantage": float(t), "return_to_go": float(t)}) for t, step in enumerate(steps)]
    batch = build_rows([episode], [steps], pad_token_id=PAD)
    assert check_rows(batch, [episode]) == []
    assert {finding.kind for finding in check_rows(batch)} == {"credit-varies"}


def test_batch_without_action_mask_is_rejected() -> None:
    rows = build_rows(record().episodes, pad_token_id=PAD)
    with pytest.raises(ConfigError, match="the batch has no 'action_mask'"):
        check_rows(rows.select(["input_ids", "attention_mask"]))
    assert check_rows(rows.select([], [])) == []


@pytest.mark.parametrize("padding", ["right", "left", "outer"])
def test_finding_position_accounts_for_the_padding(
    padding: Literal["right", "left", "outer"],
) -> None:
    episodes = record().episodes
    rows = build_rows(episodes, pad_token_id=PAD, padding=padding)
    number = int(np.argmin(rows.lengths()))
    shortest = next(one for one in episodes if one.id_ == rows[number].non_tensor_batch["rollout_id"])
    span = shortest.tokens.spans[-1]
    offset = int(np.argmax(rows.batch["attention_mask"][number]))
    rows.batch["logprobs"][number, offset + span.stop - 1] = 0.5
    findings = check_rows(rows, episodes)
    assert [(one.kind, one.step, one.token) for one in findings] == [
        ("logprob-positive", span.step, offset + span.stop - 1)
    ]
