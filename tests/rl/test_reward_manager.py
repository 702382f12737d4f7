"""Test rewards of episodes on tokens: positions, scaling, sums, and printed examples."""

from __future__ import annotations

import json
import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.agent.models import episode_steps
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.errors import ConfigError, RewardError
from reward_kit.rl import reward_batches
from reward_kit.rl.learner.training_rows import to_tensors
from reward_kit.rl.losses import ppo_clip_loss
from reward_kit.rl.reward_manager import EpisodeRewardManager
from reward_kit.tokens import TokenBatch, build_rows, pack_rows, row_columns, verl_batch
from tests.devices import DEVICE
from tests.profiles import examples
from tests.rl.reward_cases import WordTokenizer, answers, proto

pytestmark = pytest.mark.device

Rows = list[list[int]]


def manager(**options: Any) -> EpisodeRewardManager:
    return EpisodeRewardManager(WordTokenizer(), 0, **options)


def full(data: Any, **options: Any) -> dict[str, Any]:
    return manager(**options)(data, return_dict=True)


# Placement


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, np.ndarray]:
    """Return batches of any masks, with rows of several episodes in any order, and their valid tokens."""
    size, prompt, width = draw(st.integers(1, 6)), draw(st.integers(0, 3)), draw(st.integers(0, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.sampled_from([0.1, 0.5, 0.9]))
    attention = (generator.random((size, prompt + width)) < density).astype(draw(st.sampled_from(["i8", "i4", "?"])))
    batch = {
        "prompts": torch.zeros((size, prompt), dtype=torch.int64),
        "responses": torch.zeros((size, width), dtype=draw(st.sampled_from([torch.int64, torch.int32]))),
        "attention_mask": torch.as_tensor(attention),
    }
    valid = attention[:, prompt:] != 0
    if (mask := draw(st.sampled_from(["response_mask", "action_mask", None]))) is not None:
        acts = generator.random((size, width)) < density
        batch[mask] = torch.as_tensor(acts.astype(np.int64))
        valid &= acts
    scores = draw(st.lists(st.none() | st.just(math.nan) | st.floats(-8, 8, width=32), min_size=size, max_size=size))
    others: dict[str, Any] = {}
    if draw(st.booleans()):
        uids = draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size))
        by_uid = dict(zip(uids, scores, strict=True))
        scores, others = [by_uid[uid] for uid in uids], {"traj_uid": uids}
    if draw(st.booleans()):
        others["ends_episode"] = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return proto(batch, episode_rewards=scores, **others), valid


def one_by_one(data: Any, valid: np.ndarray) -> np.ndarray:
    """Return the rewards of a reference loop over episodes, rows and tokens."""
    others, rewards = data.non_tensor_batch, np.zeros(valid.shape, dtype=np.float32)
    uids = others.get("traj_uid", range(len(valid)))
    for row, score in enumerate(others["episode_rewards"]):
        tokens = [column for column in range(valid.shape[1]) if valid[row, column]]
        later = [other for other in range(row + 1, len(valid)) if uids[other] == uids[row] and valid[other].any()]
        ends = others["ends_episode"][row] if "ends_episode" in others else not later
        if ends and tokens and score is not None and not math.isnan(score):
            rewards[row, tokens[-1]] = score
    return rewards


@given(batches())
@settings(max_examples=examples(200))
def test_reward_positions_match_a_reference_loop(case: tuple[Any, np.ndarray]) -> None:
    data, valid = case
    found = full(data)
    rewards, info = found["reward_tensor"], found["reward_extra_info"]
    assert rewards.dtype == torch.float32 and rewards.shape == data.batch["responses"].shape
    assert rewards.device == data.batch["responses"].device
    np.testing.assert_array_equal(rewards.cpu().numpy(), one_by_one(data, valid))
    assert rewards.sum().item() == pytest.approx(np.nansum(info["score"]), abs=1e-4)
    np.testing.assert_array_equal(info["is_empty"], ~valid.any(axis=1))
    assert {len(values) for values in info.values()} == {len(valid)}


@given(st.integers(0, 40), st.integers(0, 2000), st.sampled_from([0.0, 0.001, 0.5]), st.integers(0, 99))
@settings(max_examples=examples(60))
def test_last_token_search_agrees_in_blocks_and_on_devices(rows: int, width: int, share: float, seed: int) -> None:
    drawn = np.random.default_rng(seed).random((rows, width)) < share
    expected = [max(np.flatnonzero(row), default=-1) for row in drawn]
    for kind in (torch.int64, torch.int8, torch.uint8, torch.bool, torch.float32):
        mask = torch.as_tensor(drawn, device="cpu").to(kind)
        assert reward_batches._by_blocks(mask).tolist() == expected
        assert reward_batches._by_columns(mask.to(DEVICE)).tolist() == expected
    if width > 1:
        assert reward_batches._by_blocks(mask.T.contiguous().T).tolist() == expected


def test_numpy_arrays_and_tensors_give_equal_rewards() -> None:
    data = answers([[4, 5], [6]], episode_rewards=[1.0, 2.0])
    arrays = {key: values.cpu().cpu().numpy().copy() for key, values in data.batch.items()}
    for values in arrays.values():
        values.flags.writeable = False
    rewards = manager()(TokenBatch(arrays, data.non_tensor_batch))
    assert rewards.tolist() == manager()(data).tolist() == [[0.0, 1.0], [2.0, 0.0]]


def test_empty_batch_has_no_rewards() -> None:
    assert manager()(answers([], episode_rewards=[])).shape == (0, 0)


def two_turns() -> tuple[SingleAgentEpisode, list[Any]]:
    episode = SingleAgentEpisode("r1")
    episode.add_env_reset("a kitchen")
    episode.tokens.add_turn(0, prompt_ids=[2, 3], token_ids=[4, 5], logprobs=[-0.3, -0.4], policy_version=0)
    episode.add_env_step("open", {"type": "text", "content": "open"}, 0.25)
    episode.tokens.add_turn(1, prompt_ids=[2, 3, 4, 5, 6, 7], token_ids=[1], logprobs=[-0.7], policy_version=0)
    episode.add_env_step("an egg", {"type": "text", "content": "take"}, 0.5, terminated=True)
    rewards = [{"base_reward": 0.25, "advantage": 0.0}, {"base_reward": 0.5, "advantage": 0.0}]
    return episode, [step.model_copy(update=row) for step, row in zip(episode_steps(episode), rewards, strict=True)]


@pytest.mark.parametrize("per", ["segment", "action"])
@pytest.mark.parametrize(
    ("form", "padding"),
    [*((form, side) for form in ("numpy", "tensors") for side in ("right", "left", "outer")), ("verl", "outer")],
)
def test_token_batches_are_rewarded_in_every_layout(per: Any, form: str, padding: Any) -> None:
    episode, steps = two_turns()
    other = SingleAgentEpisode("r2")
    other.add_env_reset("a hall")
    other.tokens.add_turn(0, prompt_ids=[2], token_ids=[4], logprobs=[-0.1], policy_version=0)
    other.add_env_step("done", {"type": "text", "content": "go"}, 0.0, terminated=True)
    rows = build_rows(
        [episode, other], [steps, episode_steps(other)], scores=[3.0, None], pad_token_id=0, padding=padding, per=per
    )
    data: Any = verl_batch(rows) if form == "verl" else rows
    if form == "tensors":
        data = SimpleNamespace(batch=to_tensors(rows), non_tensor_batch=rows.non_tensor_batch)
    rewards = manager()(data).cpu().numpy()
    assert rewards.sum() == 3.0
    row, column = np.argwhere(rewards).tolist()[0]
    assert row == (1 if per == "action" else 0)
    mask = data.batch["response_mask" if form == "verl" else "action_mask"]
    assert column == np.flatnonzero(np.asarray(mask[row]))[-1]
    hybrid = manager(step_rewards=True)(data).cpu().numpy()
    assert sorted(hybrid[hybrid != 0].tolist()) == [0.25, 3.5]
    if per == "segment":
        shown: list[str] = []
        EpisodeRewardManager(WordTokenizer(), 9, echo=shown.append)(repeated(data, 100))
        assert {"[unknown][prompt] what is", "[unknown][response] one two and more <eos>"} <= set(shown)


def repeated(data: Any, times: int) -> Any:
    arrays = {key: torch.as_tensor(values).repeat(times, 1) for key, values in data.batch.items()}
    others = {key: np.tile(values, times) for key, values in data.non_tensor_batch.items()}
    return SimpleNamespace(batch=arrays, non_tensor_batch=others)


def test_rows_go_from_a_score_to_a_gradient() -> None:
    episode, steps = two_turns()
    other = SingleAgentEpisode("r2")
    other.add_env_reset("a hall")
    other.tokens.add_turn(0, prompt_ids=[2], token_ids=[4], logprobs=[-0.1], policy_version=0)
    other.add_env_step("done", {"type": "text", "content": "go"}, 0.0, terminated=True)
    rows = build_rows([episode, other], [steps, episode_steps(other)], scores=[3.0, 1.0], pad_token_id=0)
    tensors = to_tensors(rows)
    rewards = manager()(SimpleNamespace(batch=tensors, non_tensor_batch=rows.non_tensor_batch))
    returns = rewards.sum(dim=1, keepdim=True)
    advantages = (returns - returns.mean()).expand_as(rewards)
    logprobs = tensors["logprobs"].clone().requires_grad_()
    ppo_clip_loss(logprobs, tensors["logprobs"], advantages, tensors["loss_mask"]).loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -advantages * tensors["loss_mask"] / tensors["loss_mask"].sum())


def test_packed_rows_are_rejected() -> None:
    episode, steps = two_turns()
    packed = pack_rows(row_columns([episode], [steps], scores=[3.0]))
    with pytest.raises(ConfigError, match="a reward manager cannot use packed rows; pass padded rows"):
        manager()(packed)


# The defects of the class of this name in verl-agent


def test_precomputed_rewards_have_the_same_info_keys() -> None:
    data = answers([[4, 5], [6]])
    data.batch["rm_scores"] = torch.tensor([[0.0, 0.5], [math.nan, 0.0]])
    data.non_tensor_batch["acc"], data.meta_info["reward_extra_keys"] = np.array([1, 0]), ["acc"]
    found = full(data)
    assert found.keys() == {"reward_tensor", "reward_extra_info"}
    assert found["reward_tensor"] is data.batch["rm_scores"] is manager()(data)
    assert found["reward_extra_info"]["is_scored"].tolist() == [True, False]
    assert found["reward_extra_info"]["acc"].tolist() == [1, 0]
    data.meta_info["reward_extra_keys"] = ["ac"]
    with pytest.raises(ConfigError, match="unknown name 'ac' in reward_extra_keys; did you mean 'acc'"):
        full(data)


def test_a_row_without_tokens_is_not_rewarded_in_its_last_column() -> None:
    found = full(answers([[4, 5], []], episode_rewards=[1.0, 1.0]))
    assert found["reward_tensor"].tolist() == [[0.0, 1.0], [0.0, 0.0]]
    assert found["reward_extra_info"]["is_empty"].tolist() == [False, True]


def test_only_the_last_row_of_an_episode_gets_its_reward() -> None:
    rows = {"episode_rewards": [1.0, 1.0, 1.0, 5.0], "traj_uid": ["a", "a", "a", "b"]}
    rewards = manager()(answers([[4], [5], [], [6]], **rows))
    assert rewards.flatten().tolist() == [0.0, 1.0, 0.0, 5.0]  # the third row of "a" has no token to stand on


def test_the_observation_after_the_last_action_is_not_rewarded() -> None:
    data = answers([[4, 5, 6, 7]], episode_rewards=[1.0])
    data.batch["response_mask"] = torch.tensor([[1, 1, 0, 0]])
    assert manager()(data).tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_responses_are_decoded_only_if_shown() -> None:
    data = answers([[4]] * 100, episode_rewards=[1.0] * 100)
    silent = EpisodeRewardManager(tokenizer := WordTokenizer(), 0, echo=print)
    silent(data)
    assert tokenizer.decoded == 0
    EpisodeRewardManager(tokenizer, 5, echo=lambda line: None)(data)
    assert tokenizer.decoded == 10


def test_global_random_generators_are_not_used() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    EpisodeRewardManager(WordTokenizer(), 5, echo=lambda line: None)(answers([[4]] * 99, episode_rewards=[1.0] * 99))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_row_info_has_its_own_score_and_not_the_batch_mean() -> None:
    info = full(answers([[4], [5], [6]], episode_rewards=[1.0, 0.0, None]))["reward_extra_info"]
    np.testing.assert_array_equal(info["score"], [1.0, 0.0, math.nan])
    assert info["is_scored"].tolist() == [True, True, False]


class Broken(WordTokenizer):
    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        raise OverflowError("no such id")


def test_failed_call_does_not_update_statistics() -> None:
    data = answers([[4]] * 50, episode_rewards=np.arange(50.0))
    failing = EpisodeRewardManager(Broken(), 1, normalization_type="variance", echo=lambda line: None)
    with pytest.raises(RewardError, match=r"tokenizer on row .*no such id"):
        failing(data)
    assert failing.state_dict()["count"] == 0
    failing.tokenizer = WordTokenizer()
    once = manager(normalization_type="variance")
    once(data)
    assert once.state_dict()["count"] == 50


def test_an_unscored_episode_is_not_a_zero() -> None:
    data = answers([[4], [5], [6]], episode_rewards=[2.0, None, 4.0])
    found = full(data, normalization_type="variance")
    np.testing.assert_allclose(found["reward_tensor"].flatten().cpu(), [-1.0, 0.0, 1.0])  # mean 3, not 2
    assert found["reward_extra_info"]["is_scored"].tolist() == [True, False, True]


# Normalization


def test_a_score_is_divided_by_the_length_of_its_episode() -> None:
    data = answers([[4], [5]], episode_rewards=[1.0, 3.0], episode_lengths=[2.0, 4.0])
    assert EpisodeRewardManager(WordTokenizer(), 0, True)(data).flatten().tolist() == [0.5, 0.75]
    assert manager(normalization_type="length")(data).flatten().tolist() == [0.5, 0.75]
    assert manager(normalize_by_length=True, normalization_type="length").normalization_type == "length"
    data.non_tensor_batch["episode_lengths"][1] = 0.0
    with pytest.raises(ConfigError, match=r"episode_lengths\[1\] is 0"):
        manager(normalization_type="length")(data)


numbers = st.lists(st.floats(-50, 50, width=32), max_size=6)


@given(st.lists(numbers, min_size=1, max_size=5))
def test_running_statistics_cover_all_batches(given_batches: list[list[float]]) -> None:
    running, seen = manager(normalization_type="variance"), []
    for scores in given_batches:
        seen += scores
        rewards = running(answers([[4]] * len(scores), episode_rewards=np.array(scores))).flatten().cpu().numpy()
        if np.std(seen or [0.0]) > 1e-3:
            np.testing.assert_allclose(rewards, (np.array(scores) - np.mean(seen)) / np.std(seen), rtol=1e-4, atol=1e-4)
        elif len(set(seen)) <= 1:
            assert np.abs(rewards).max(initial=0.0) < 1e-5


def test_running_statistics_count_episodes_and_not_rows() -> None:
    running = manager(normalization_type="variance")
    running(answers([[4]] * 4, episode_rewards=[1.0, 1.0, 1.0, 5.0], traj_uid=["a", "a", "a", "b"]))
    assert running.state_dict() == {"normalization_type": "variance", "count": 2, "mean": 3.0, "m2": 8.0}


def test_restored_manager_continues_identically() -> None:
    first, data = manager(normalization_type="variance"), answers([[4], [5]], episode_rewards=[1.0, 2.0])
    first(data)
    second = manager(normalization_type="variance")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    later = answers([[4], [5]], episode_rewards=[7.0, -2.0])
    assert torch.equal(first(later), second(later))


@pytest.mark.parametrize("score", [0.1, 1e8 + 0.1, 1e16 / 3])
def test_equal_scores_are_normalized_to_zero(score: float) -> None:
    # The mean of seven equal numbers can differ from them by rounding, which the division by 1e-8 would enlarge.
    running = manager(normalization_type="variance")
    for _ in range(2):
        assert not running(answers([[4]] * 7, episode_rewards=[score] * 7)).any()


@pytest.mark.parametrize("state", [{}, {"count": 1, "mean": 0.0}, {"count": -1, "mean": 0.0, "m2": 0.0}])
def test_invalid_state_is_rejected(state: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="invalid running statistics"):
        manager(normalization_type="variance").load_state_dict({"normalization_type": "variance", **state})
    with pytest.raises(ConfigError, match="the state has normalization_type 'length'"):
        manager(normalization_type="variance").load_state_dict({"normalization_type": "length", **state})


# Step rewards


def with_actions(**others: Any) -> Any:
    """Return two rows of two actions and one action, with an observation between the first two."""
    data = answers([[4, 5, 6, 7, 1], [4, 5]], **others)
    data.batch["response_mask"] = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 0, 0, 0]])
    return data


def test_step_rewards_are_on_last_action_tokens_plus_the_episode_reward() -> None:
    data = with_actions(episode_rewards=[10.0, None], step_rewards=[[0.5, 0.25], [0.75]])
    assert manager(step_rewards=True)(data).tolist() == [[0, 0.5, 0, 0, 10.25], [0, 0, 0, 0, 0]]
    assert manager()(data).tolist() == [[0, 0, 0, 0, 10.0], [0, 0, 0, 0, 0]]
    data = with_actions(episode_rewards=[10.0, 1.0], step_rewards=[[None, 0.25], [0.75]])
    assert manager(step_rewards=True)(data).tolist() == [[0, 0, 0, 0, 10.25], [0, 1.75, 0, 0, 0]]


def test_step_rewards_on_tokens_count_on_valid_tokens_only() -> None:
    data = with_actions(episode_rewards=[1.0, 2.0])
    data.batch["step_rewards"] = torch.tensor([[0, 0.5, 9.0, 0, math.nan], [0, 0.25, 0, 0, 9.0]], dtype=torch.float64)
    assert manager(step_rewards=True)(data).tolist() == [[0, 0.5, 0, 0, 1.0], [0, 2.25, 0, 0, 0]]


def test_mismatched_step_rewards_are_rejected() -> None:
    rewards = {"episode_rewards": [1.0, 1.0]}
    with pytest.raises(ConfigError, match=r"step_rewards'\]\[0\] has 3 rewards, but the row has 2 actions"):
        manager(step_rewards=True)(with_actions(step_rewards=[[1.0, 2.0, 3.0], [1.0]], **rewards))
    with pytest.raises(ConfigError, match="the batch has no 'step_rewards'"):
        manager(step_rewards=True)(with_actions(**rewards))
    data = with_actions(**rewards)
    data.batch["step_rewards"] = torch.zeros(2)
    with pytest.raises(ConfigError, match=r"step_rewards has shape \(2,\), but the action mask has shape \(2, 5\)"):
        manager(step_rewards=True)(data)


# Pictures


def pictures(*seen: Any, **others: Any) -> Any:
    return answers([[4]] * len(seen), multi_modal_inputs=list(seen), **others)


def share_of_white(inputs: Any) -> float:
    return float(np.mean(inputs["pixel_values"]))


def test_a_visual_scorer_multiplies_or_adds_before_normalization() -> None:
    seen = [{"pixel_values": np.array([0.0, 1.0]), "image_grid_thw": np.array([[1, 1, 2]])}, None, {}]
    data = pictures(*seen, episode_rewards=[4.0, 3.0, 2.0], episode_lengths=[2, 2, 2])
    assert manager(visual_scorer=share_of_white)(data).flatten().tolist() == [2.0, 3.0, 2.0]
    assert manager(visual_scorer=share_of_white, visual_rule="add")(data).flatten().tolist() == [4.5, 3.0, 2.0]
    by_length = manager(visual_scorer=share_of_white, normalize_by_length=True)
    assert by_length(data).flatten().tolist() == [1.0, 1.5, 1.0]


def test_visual_scorer_is_called_once_per_episode_and_fails_only_its_episode() -> None:
    asked: list[int] = []

    def scorer(inputs: Any) -> float | None:
        asked.append(inputs["pixel_values"])
        return {1: 0.5, 3: None}[inputs["pixel_values"]]

    data = pictures(
        *({"pixel_values": number} for number in range(4)),
        episode_rewards=[4.0, 4.0, 3.0, 2.0],
        traj_uid=["a", "a", "b", "c"],
    )
    found = full(data, visual_scorer=scorer)
    assert asked == [1, 2, 3]
    assert found["reward_tensor"].flatten().tolist() == [0.0, 2.0, 0.0, 0.0]
    info = found["reward_extra_info"]
    assert info["is_scored"].tolist() == [True, True, False, False]
    assert info["failure_class"].tolist() == ["", "", "crash", "invalid_result"]
    assert (
        "KeyError: 2" in info["failure"][2] and "it returned None, which is not a finite number" in info["failure"][3]
    )


# Examples


def test_examples_are_shown_with_their_special_tokens() -> None:
    shown: list[str] = []
    data = answers([[4, 1]] * 60, prompt=[0, 1, 2], episode_rewards=[0.5] * 60, data_source=["math"] * 60)
    EpisodeRewardManager(WordTokenizer(), 1, echo=shown.append)(data)
    assert shown == ["[math][prompt] <eos> what", "[math][response] one <eos>", "[math][score] 0.5"]


def test_examples_are_limited_per_source_and_sampled_otherwise() -> None:
    data = answers([[4]] * 2000, episode_rewards=[None] * 2000, data_source=["a", "b"] * 1000)
    shown: list[str] = []
    few = EpisodeRewardManager(WordTokenizer(), 3, seed=7, echo=shown.append)
    few(data)
    few(data)
    assert [sum(line == f"[{source}][score] none" for line in shown) for source in "ab"] == [6, 6]
    shown.clear()
    EpisodeRewardManager(WordTokenizer(), 2000, seed=7, echo=shown.append)(data)
    assert 150 < len(shown) / 3 < 250


def test_examples_are_printed_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    data = answers([[4]] * 60, episode_rewards=[1.0] * 60, data_source=["\x1b[2J"] * 60)
    EpisodeRewardManager(WordTokenizer(), 1)(data)
    assert "[\\x1b[2J][response] one" in capsys.readouterr().out.splitlines()


# One row for each step


def step_rows(**others: Any) -> TokenBatch:
    """Return three rows of episode "a", one of "b", and two of the unscored "c"."""
    return answers(
        [[4], [4, 5], [4], [5], [4], [5]],
        traj_uid=["a", "a", "a", "b", "c", "c"],
        episode_rewards=[1.0, 1.0, 1.0, 3.0, np.nan, np.nan],
        episode_lengths=[3, 3, 3, 1, 2, 2],
        **others,
    )


def test_each_row_gets_the_score_of_its_episode() -> None:
    found = manager(rows="each")(step_rows(), return_dict=True)
    assert found["reward_tensor"].tolist() == [[1, 0], [0, 1], [1, 0], [3, 0], [0, 0], [0, 0]]
    np.testing.assert_array_equal(found["reward_extra_info"]["score"], [1, 1, 1, 3, np.nan, np.nan])
    assert manager(rows="last")(step_rows()).tolist() == [[0, 0], [0, 0], [1, 0], [3, 0], [0, 0], [0, 0]]


def test_normalized_scores_of_each_row_count_episodes_once() -> None:
    each = manager(rows="each", normalization_type="variance")
    assert each(step_rows()).sum(dim=1).tolist() == [-1, -1, -1, 1, 0, 0]
    assert each.state_dict() == {"normalization_type": "variance", "count": 2, "mean": 2.0, "m2": 2.0}
    by_length = manager(rows="each", normalization_type="length")(step_rows()).sum(dim=1)
    torch.testing.assert_close(by_length, torch.tensor([1 / 3, 1 / 3, 1 / 3, 3.0, 0.0, 0.0]))


def ragged(rows: list[list[float]]) -> np.ndarray:
    return np.fromiter(rows, dtype=object, count=len(rows))


def test_step_rewards_are_placed_by_action_lengths() -> None:
    # Two actions in one run of tokens, as two calls without a result between them.
    columns = {
        "action_lengths": [[1, 2], [0, 3], [2, 0, 1]],
        "step_rewards": [[0.5, 0.25], [0.5, 0.25], [1.0, 2.0, 4.0]],
    }
    data = answers(
        [[4, 5, 4]] * 3,
        episode_rewards=[0.0] * 3,
        **{key: np.array([*v, None], dtype=object)[:-1] for key, v in columns.items()},
    )
    assert manager(step_rewards=True)(data).tolist() == [[0.5, 0, 0.25], [0.5, 0, 0.25], [0, 3.0, 4.0]]


def test_action_lengths_must_match_the_mask() -> None:
    columns = {"action_lengths": [[1, 1]], "step_rewards": [[0.5, 0.25]]}
    data = answers(
        [[4, 5, 4]],
        episode_rewards=[0.0],
        **{key: np.array([*v, None], dtype=object)[:-1] for key, v in columns.items()},
    )
    with pytest.raises(ConfigError, match=r"action_lengths'\]\[0\] is \[1, 1\], but the row has 3 valid tokens"):
        manager(step_rewards=True)(data)
