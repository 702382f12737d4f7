"""Test verl's trainers with reward-kit's credit and rewards on verl's queue, without its GPU workers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import verl
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils.config import validate_config
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from reward_kit import reward_function
from reward_kit.agent.models import StepData
from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.data_proto import agent_loop_outputs
from reward_kit.integrations.verl.register import register
from reward_kit.integrations.verl.reward_loop import RewardKitManager
from reward_kit.integrations.verl.trainer_rewards import TrainerRewards
from reward_kit.integrations.verl.trainers import trainer_with_credit
from reward_kit.rl_helpers import system_apply_gigpo_to_batch_steps
from tests.integrations.verl_episodes import collected

pytestmark = pytest.mark.campaign

GIGPO = ("algorithm.adv_estimator=reward_kit_gigpo", "algorithm.gamma=0.9", "+algorithm.reward_kit.omega=0.3")
NAN = float("nan")

_batches = itertools.count()


def output(draw: random.Random, uid: str, score: float, **extra: Any) -> dict[str, Any]:
    """Return one agent loop output as verl queues it: three actions, with a tool answer in between."""
    lengths = [draw.randint(1, 3) for _ in range(3)]
    parts = [[*([1] * length), *([0] * draw.randint(0, 2))] for length in lengths]
    mask = torch.tensor([value for part in parts for value in part])
    rewards = torch.zeros(len(mask))
    rewards[-1] = score
    steps = {
        "state_keys": [draw.choice("abc") for _ in lengths],
        "step_rewards": [draw.random() for _ in lengths],
        "action_lengths": lengths,
    }
    return {
        "uid": uid,
        "prompts": torch.tensor([5] * draw.randint(1, 3)),
        "responses": torch.full_like(mask, 3),
        "input_ids": torch.full((len(mask) + 1,), 3),
        "position_ids": torch.arange(len(mask) + 1),
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "rm_scores": rewards,
        "rollout_log_probs": -torch.rand(len(mask)),
        "old_log_probs": -torch.rand(len(mask)),
        "extra_fields": {**steps, **extra},
    }


def session(draw: random.Random, uid: str, number: int, score: float, outputs: int) -> dict[str, dict[str, Any]]:
    """Return the outputs of one rollout whose context was restarted; verl gives each of them the score."""
    return {f"{uid}_{number}_{index}": output(draw, uid, score) for index in range(outputs)}


def rollouts(seed: int, *, unscored: bool = True) -> dict[str, dict[str, Any]]:
    """Return two groups in the order in which they finished."""
    draw = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    for uid in ("first_prompt", "second"):
        for number in range(3):
            score = NAN if unscored and (uid, number) == ("second", 1) else draw.random()
            rows |= session(draw, uid, number, score, draw.randint(1, 3))
    shuffled = list(rows)
    draw.shuffle(shuffled)
    return {key: rows[key] for key in shuffled}


def put(queue: Any, rows: dict[str, dict[str, Any]]) -> Any:
    tags = [{"status": "success", "seq_len": len(row["input_ids"])} for row in rows.values()]
    fields = list_of_dict_to_tensordict(list(rows.values()))
    return queue.kv_batch_put(keys=list(rows), partition_id=f"train {next(_batches)}", fields=fields, tags=tags)


def fetched(queue: Any, batch: Any, field: str, keys: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    keys = list(batch.keys if keys is None else keys)
    data = queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=[field])[field]
    return dict(zip(keys, data.unbind(), strict=True))


def steps_of_session(rows: dict[str, dict[str, Any]], name: str) -> list[StepData]:
    own = sorted((key for key in rows if key.rsplit("_", 1)[0] == name), key=lambda key: int(key.rsplit("_", 1)[1]))
    said = [rows[key]["extra_fields"] for key in own]
    pairs = [pair for one in said for pair in zip(one["state_keys"], one["step_rewards"], strict=True)]
    return [
        StepData(
            system_step_index=t, observation_data="", action_taken={}, base_reward=reward, step_info={"state_key": key}
        )
        for t, (key, reward) in enumerate(pairs)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_gigpo_in_the_verl_trainer_equals_gigpo_on_sessions(
    queue: Any, configured: Callable[..., Any], seed: int
) -> None:
    register()
    config = configured(*GIGPO, "trainer.v1.trainer_mode=reward_kit_sync")
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    # verl's own in everything else: its buffer and its options go by the name "sync".
    assert isinstance(trainer, PPOTrainerSync) and trainer.trainer_mode == "sync"
    assert type(trainer.replay_buffer) is ReplayBuffer

    rows = rollouts(seed)
    # verl fills a batch up with copies of its first row, without tokens that count.
    batch = upsample_batch_to_divisible_size(put(queue, rows), 16, 1)
    metrics: dict[str, Any] = {}
    trainer._compute_advantage(batch, metrics)

    sessions = list(dict.fromkeys(key.rsplit("_", 1)[0] for key in rows))
    scores = [float(rows[f"{name}_0"]["rm_scores"][-1]) for name in sessions]
    wanted = system_apply_gigpo_to_batch_steps(
        [steps_of_session(rows, name) for name in sessions],
        [None if score != score else score for score in scores],
        0.3,
        0.9,
        "state_key",
        group_ids=[name.rsplit("_", 1)[0] for name in sessions],
    )
    found = {
        name: fetched(queue, batch, name, rows) for name in ("advantages", "returns", "response_mask", "rm_scores")
    }
    lost = 0
    for name, steps in zip(sessions, wanted, strict=True):
        values = iter(steps)
        for index in range(sum(key.rsplit("_", 1)[0] == name for key in rows)):
            key = f"{name}_{index}"
            row = rows[key]
            is_lost = steps[0].advantage is None
            lost += is_lost
            expected: dict[str, list[float]] = {"advantages": [], "returns": []}
            for length in row["extra_fields"]["action_lengths"]:
                step = next(values)
                expected["advantages"] += [step.advantage or 0.0] * length
                expected["returns"] += [step.return_to_go or 0.0] * length
            sampled = row["response_mask"] == 1
            for field, numbers in expected.items():
                assert found[field][key][sampled].tolist() == pytest.approx(numbers, abs=1e-6)
                assert not found[field][key][~sampled].any()
            assert torch.equal(found["response_mask"][key], row["response_mask"] * (not is_lost))
            assert not torch.isnan(found["rm_scores"][key]).any()
    assert metrics["reward_kit/unscored_rows"] == lost > 0
    padding = [key for key in batch.keys if key not in rows]
    assert padding and not any(values.any() for values in fetched(queue, batch, "advantages", padding).values())


def test_tokens_rejected_by_verl_have_no_credit_and_others_keep_theirs(
    queue: Any, configured: Callable[..., Any]
) -> None:
    """verl's rollout correction masks tokens before advantages are computed, which splits actions."""
    rows = rollouts(1, unscored=False)
    plain = configured(*GIGPO, "algorithm.rollout_correction.bypass_mode=false")
    mode = trainer_with_credit(PPOTrainerSync, "sync")
    batch = put(queue, rows)
    mode(plain)._compute_advantage(batch, {})
    before = fetched(queue, batch, "advantages")
    rejecting = (
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.6_1.5",
    )
    batch = put(queue, rows)
    mode(configured(*GIGPO, *rejecting))._compute_advantage(batch, {})
    after, masks = fetched(queue, batch, "advantages"), fetched(queue, batch, "response_mask")
    taken = sum(int((rows[key]["response_mask"] - masks[key]).sum()) for key in rows)
    assert taken > 0
    for key in rows:
        assert torch.allclose(after[key], before[key] * masks[key])


def test_verl_estimators_are_rejected_without_a_score(queue: Any, configured: Callable[..., Any]) -> None:
    trainer = trainer_with_credit(PPOTrainerSync, "sync")(configured("algorithm.adv_estimator=grpo"))
    with pytest.raises(ConfigError, match=r"verl's estimator 'grpo' would count them as 0\.0"):
        trainer._compute_advantage(put(queue, rollouts(0)), {})
    batch = put(queue, rollouts(0, unscored=False))
    trainer._compute_advantage(batch, {})
    assert any(values.any() for values in fetched(queue, batch, "advantages").values())


def test_agent_loop_without_step_fields_gets_a_helpful_error(queue: Any, configured: Callable[..., Any]) -> None:
    rows = {
        key: {name: value for name, value in row.items() if name != "extra_fields"}
        for key, row in rollouts(0, unscored=False).items()
    }
    trainer = trainer_with_credit(PPOTrainerSync, "sync")(configured(*GIGPO))
    with pytest.raises(ConfigError, match="have no 'extra_fields'; for each output, the agent loop must store in them"):
        trainer._compute_advantage(put(queue, rows), {})


async def test_worker_episodes_pass_through_a_verl_agent_loop(
    queue: Any, configured: Callable[..., Any], tokenizer: Any
) -> None:
    """Run reward loop, queue and trainer on a loop's outputs as verl's worker does; only sampling is replaced."""
    given = collected(7, groups=1, unscored=False)
    manager = RewardKitManager(configured("reward.custom_reward_function.path=r.py"), tokenizer, by_length)
    rows: dict[str, dict[str, Any]] = {}
    scores = []
    for number, (episode, steps) in enumerate(zip(given.episodes, given.steps, strict=True)):
        outputs = agent_loop_outputs(episode, steps)
        beside = np.array([one.extra_fields for one in outputs], dtype=object)
        shown = verl.DataProto.from_dict(
            tensors={"responses": torch.ones(len(outputs), 1)}, non_tensors={"tool_extra_fields": beside}
        )
        result = await manager.run_single(shown)
        scores.append(result["reward_score"])
        for index, one in enumerate(outputs):
            one.reward_score = result["reward_score"]
            ids = torch.tensor([*one.prompt_ids, *one.response_ids])
            row = {**one.as_dict(), "uid": "g0", "input_ids": ids}
            # Computed by the actor, on a GPU.
            rows[f"g0_{number}_{index}"] = {**row, "old_log_probs": row["rollout_log_probs"]}
    batch = put(queue, rows)
    trainer_with_credit(PPOTrainerSync, "sync")(configured(*GIGPO))._compute_advantage(batch, {})
    wanted = system_apply_gigpo_to_batch_steps(given.steps, scores, 0.3, 0.9, "state_key", group_ids=given.group_ids)
    assert scores == [len(episode) / 8 for episode in given.episodes]
    found = fetched(queue, batch, "advantages")
    for number, steps in enumerate(wanted):
        values = [step.advantage for step in steps]
        own = [key for key in rows if key.startswith(f"g0_{number}_")]
        parts = [
            found[key][rows[key]["response_mask"] == 1].split(rows[key]["extra_fields"]["action_lengths"])
            for key in own
        ]
        assert [part[0].item() for of_row in parts for part in of_row] == pytest.approx(values, abs=1e-6)
    await manager.held.close()


@reward_function
def by_length(messages, assistant_turns):
    assert len(messages) == 1 + 2 * len(assistant_turns)
    return {"score": len(assistant_turns) / 8}


RANKED = """
from reward_kit import reward_function

@reward_function(mode="batch")
def ranked(rollouts_messages, ground_truths):
    answers = [messages[-1].text for messages in rollouts_messages]
    assert all(messages[0].text == "word5" for messages in rollouts_messages)
    return [
        {"score": 0.0, "is_score_valid": False, "reason": "none"} if answer == "word9"
        else {"score": sorted(set(answers)).index(answer) / len(answers)}
        for answer in answers
    ]
"""


class Started(PPOTrainerSync):
    """verl's trainer without the workers that its `_setup` starts on GPUs."""

    def _setup(self) -> None:
        self.reward_loop_manager = None


def test_trainer_requests_group_rewards(
    queue: Any, configured: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "ranked.py").write_text(RANKED)
    section = (
        "+reward.reward_kit.in_trainer=true",
        "+reward.reward_kit.reward=ranked.py:ranked",
        f"+reward.reward_kit.folder={tmp_path}",
    )
    trainer = trainer_with_credit(Started, "sync")(configured(*GIGPO, *section))
    trainer.tokenizer = tokenizer
    trainer._setup()
    assert trainer.get_reward_handles() is None  # so that verl's step asks the trainer
    rows = {}
    words = {"u_0_0": [2], "u_1_0": [3], "u_2_0": [9], "v_0_0": [4, 4], "v_1_0": [3], "v_1_1": [2]}
    for key, answer in words.items():
        rows[key] = {
            "uid": key[0],
            "prompts": torch.tensor([5]),
            "responses": torch.tensor([*answer, 1]),
            "input_ids": torch.tensor([5, *answer, 1]),
            "response_mask": torch.tensor([1] * len(answer) + [0]),
            "loss_mask": torch.tensor([1] * len(answer) + [0]),
            "raw_prompt": [{"role": "user", "content": "word5"}],
            "reward_model": {"ground_truth": "4"},
            "data_source": "words",
            "extra_fields": {"state_keys": ["a"]},
        }
    batch = trainer._compute_reward_colocate(put(queue, rows))
    found = {key: values.tolist() for key, values in fetched(queue, batch, "rm_scores").items()}
    assert found.pop("u_2_0")[0] != 0.0  # NaN: unscored
    # The end of a text is a tool's here, and gets nothing; of two outputs the last one is scored.
    assert found == {
        "u_0_0": [0.0, 0.0],
        "u_1_0": [pytest.approx(1 / 3), 0.0],
        "v_0_0": [0.0, 0.5, 0.0],
        "v_1_0": [0.0, 0.0],
        "v_1_1": [0.0, 0.0],
    }
    trainer._compute_advantage(batch, {})
    assert not fetched(queue, batch, "response_mask")["u_2_0"].any()
    advantages = fetched(queue, batch, "advantages")
    assert advantages["u_0_0"][0] < 0 < advantages["u_1_0"][0] and not advantages["u_2_0"].any()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ((), r"no reward is set; set \+reward\.reward_kit\.reward=file\.py:function"),
        (("+reward.reward_kit.reward=x.py:f", "+reward.reward_kit.metrics=[a]"), "metrics has no effect with in_train"),
    ],
)
def test_ineffective_trainer_settings_are_rejected(
    configured: Callable[..., Any], tokenizer: Any, section: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainerRewards(configured("+reward.reward_kit.in_trainer=true", *section), tokenizer)


def test_verl_accepts_a_configuration_with_our_sections(configured: Callable[..., Any]) -> None:
    config = configured(
        *GIGPO,
        "trainer.v1.trainer_mode=reward_kit_sync",
        "+reward.reward_kit.reward=rewards.py:graded",
        "+reward.reward_kit.on_unscored=mask",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.name=vllm",
    )
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert not need_critic(config)
