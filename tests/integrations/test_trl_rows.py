"""Test episodes as rows of a `rollout_func`: the exact sampled tokens, and which rows are masked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from examples.trl_locks import locks
from reward_kit.agent.policies.hf_policy import HFAgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.checks import check_trl_rollout
from reward_kit.credit import token_advantages
from reward_kit.episodes.segments import EpisodeTokens
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, Failure
from reward_kit.integrations.trl.rollouts import as_rollout_func, check_trainer, group_prompts, plain_weights, publish
from reward_kit.integrations.trl.rows import ADVANTAGES, RowOutcome, rollout_output
from reward_kit.models import EvaluateResult, Message, TaskDefinitionModel
from reward_kit.reward_agent.scoring import Scored
from reward_kit.rl.training.rollouts import Collector
from reward_kit.rl.training.trainer import trainable
from reward_kit.rl_processing import CreditAssigner
from reward_kit.runs.tasks import load_task
from reward_kit.tokens import build_rows
from tests.tiny_policy import TinyPolicy

PAD = 0


def new_policy(seed: int, **options: Any) -> HFAgentPolicy:
    words = locks.tokenizer()
    return locks.policy(locks.model(seed, words), words, **options)


@pytest.fixture
async def policy() -> AsyncIterator[HFAgentPolicy]:
    made = new_policy(0)
    yield made
    await made.close()


async def collected(policy: HFAgentPolicy, samples: list[Sample] | None = None) -> list[SingleAgentEpisode]:
    """Collect four episodes of each sample."""
    worker = RLRolloutWorker(locks.task(), policy)
    groups = await Collector(4).collect(worker, [(sample, 7) for sample in samples or locks.samples()[:2]])
    return [episode for group in groups for episode in group]


def scored(episodes: list[SingleAgentEpisode], *, unscored: tuple[int, ...] = ()) -> list[Scored]:
    crash = Failure("timeout", "DeadlineError", "too slow")
    return [
        Scored(episode.id_, None, crash)
        if place in unscored
        else Scored(episode.id_, EvaluateResult(score=float(place % 3)))
        for place, episode in enumerate(episodes)
    ]


def credited(episodes: list[SingleAgentEpisode], results: list[Scored]) -> RowOutcome:
    return RowOutcome(results, CreditAssigner("gigpo", step_rewards="environment").assign(episodes, results))


async def test_row_contains_observed_and_sampled_tokens(policy: HFAgentPolicy) -> None:
    episodes = await collected(policy)
    output = rollout_output(episodes, filler_id=PAD)
    for place, episode in enumerate(episodes):
        (row,) = episode.tokens.rows()
        assert output["prompt_ids"][place] == row.prompt_ids.tolist()
        assert output["completion_ids"][place] == row.completion_ids.tolist()
        assert output["env_mask"][place] == row.action_mask.tolist()
        assert output["logprobs"][place] == row.logprobs.tolist()
    assert check_trl_rollout(output) == []
    assert output["rollout_id"] == [episode.id_ for episode in episodes]
    assert output["assistant_turns"] == [list(episode.assistant_turns) for episode in episodes]
    assert all(output["assistant_turns"])
    assert {"score", ADVANTAGES}.isdisjoint(output)


async def test_advantages_match_build_rows(policy: HFAgentPolicy) -> None:
    episodes = await collected(policy)
    outcome = credited(episodes, scored(episodes))
    assert outcome.credited is not None
    output = rollout_output(episodes, outcome, filler_id=PAD)
    rows = build_rows(episodes, outcome.credited.steps, pad_token_id=PAD, padding="outer")
    prompt = rows.batch["prompt_ids"].shape[1]
    for theirs, ours in ((ADVANTAGES, "advantages"), ("env_mask", "loss_mask")):
        width = rows.batch["completion_ids"].shape[1]
        laid = np.array([row + [0] * (width - len(row)) for row in output[theirs]])
        assert np.array_equal(laid, rows.batch[ours][:, prompt:])
    assert np.abs(rows.batch["advantages"]).max() > 0
    assert check_trl_rollout(output) == []


async def test_columns_of_actions_suffice_to_compute_the_same_advantages(policy: HFAgentPolicy) -> None:
    """A trainer of its own computes credit from the padded rows alone."""
    episodes = await collected(policy)
    scores = scored(episodes, unscored=(2,))
    theirs = rollout_output(episodes, credited(episodes, scores), filler_id=PAD)
    output = rollout_output(episodes, RowOutcome(scores), filler_id=PAD)
    assert [len(rewards) for rewards in output["step_rewards"]] == output["num_steps"]
    assert output["step_rewards"] == theirs["step_rewards"] and any(map(any, output["step_rewards"]))
    width = max(map(len, output["env_mask"]))
    laid = {
        key: np.array([row + [0] * (width - len(row)) for row in rows])
        for key, rows in (("env_mask", output["env_mask"]), (ADVANTAGES, theirs[ADVANTAGES]))
    }
    found = token_advantages(
        laid["env_mask"],
        output["step_rewards"],
        output["sample_id"],
        scores=output["score"],
        state_keys=output["state_keys"],
        action_lengths=output["action_lengths"],
    )
    np.testing.assert_allclose(found.advantages, laid[ADVANTAGES], rtol=1e-9, atol=1e-12)
    assert found.loss_mask.sum(axis=1).tolist() == list(map(sum, theirs["env_mask"]))
    assert found.advantages.any()


async def test_unscored_episode_is_masked(policy: HFAgentPolicy) -> None:
    episodes = await collected(policy)
    output = rollout_output(episodes, credited(episodes, scored(episodes, unscored=(1, 6))), filler_id=PAD)
    assert [place for place, score in enumerate(output["score"]) if score is None] == [1, 6]
    assert [place for place, mask in enumerate(output["env_mask"]) if not any(mask)] == [1, 6]
    for place in (1, 6):
        assert not any(output["logprobs"][place]) and not any(output[ADVANTAGES][place])
        assert output["failure"][place] == "timeout: too slow"
        assert output["completion_ids"][place]  # it is attended to, and not learned from


async def test_episode_that_cannot_be_aligned_is_unscored(policy: HFAgentPolicy) -> None:
    episodes = await collected(policy)
    results = scored(episodes)
    wrong = EvaluateResult(score=1.0, step_outputs=[{"step_index": 99, "base_reward": 1.0}])
    results[2] = replace(results[2], result=wrong)
    output = rollout_output(episodes, credited(episodes, results), filler_id=PAD)
    assert output["score"][2] is None and not any(output["env_mask"][2])
    assert output["failure"][2].startswith("invalid_result: ")


async def test_episode_that_failed_at_the_start_is_a_masked_row(policy: HFAgentPolicy) -> None:
    broken = Sample("no-such-lock", resource_config={"lock": "x"})
    episodes = await collected(policy, [locks.samples()[0], broken])
    failed = [Scored(one.id_, None, Failure("crash", "EnvironmentFailure", "no")) for one in episodes[4:]]
    output = rollout_output(episodes, credited(episodes, [*scored(episodes[:4]), *failed]), filler_id=9)
    assert len(output["prompt_ids"]) == 8
    for place in range(4, 8):
        assert (output["prompt_ids"][place], output["completion_ids"][place]) == ([9], [9])
        assert (output["env_mask"][place], output["logprobs"][place]) == ([0], [0.0])
        assert output["score"][place] is None and "ValueError" in output["failure"][place]


async def test_action_without_tokens_is_a_masked_row(policy: HFAgentPolicy) -> None:
    (episode, *_) = await collected(policy)
    episode.tokens = EpisodeTokens()
    episode.tokens.add_turn(0, [3, 4], [], [])
    output = rollout_output([episode], filler_id=9)
    assert (output["prompt_ids"], output["completion_ids"], output["env_mask"]) == ([[9]], [[9]], [[0]])


async def test_multi_segment_episode_is_rejected_or_uses_its_last_segment(policy: HFAgentPolicy) -> None:
    (episode, *_) = await collected(policy)
    episode.tokens = EpisodeTokens()
    episode.tokens.add_turn(0, [3, 4], [8], [-0.5])
    episode.tokens.add_turn(1, [5, 6], [7], [-0.5], reason="reasoning left out")
    with pytest.raises(ConfigError, match=r"has 2 segments \(reasoning left out\), but TRL supports one row"):
        rollout_output([episode], filler_id=PAD)
    output = rollout_output([episode], filler_id=PAD, segments="last")
    assert (output["prompt_ids"], output["completion_ids"]) == ([[5, 6]], [[7]])
    with pytest.raises(ConfigError, match="segments"):
        rollout_output([episode], filler_id=PAD, segments="first")  # type: ignore[arg-type]


async def test_rows_unsupported_by_trl_are_rejected(policy: HFAgentPolicy) -> None:
    (episode, *_) = await collected(policy)
    unknown = episode.tokens.get_state()
    unknown["logprobs"][0] = [None]
    episode.tokens = type(episode.tokens).from_state(unknown)
    with pytest.raises(ConfigError, match="the policy did not record any"):
        rollout_output([episode], filler_id=PAD)


async def test_constrained_sampling_is_rejected() -> None:
    policy = new_policy(0, constrain=True, max_new_tokens=2)
    episodes = await collected(policy)
    with pytest.raises(ConfigError, match="set constrain to False"):
        rollout_output(episodes, filler_id=PAD)
    await policy.close()


def test_equal_prompts_form_groups() -> None:
    assert group_prompts(["a", "a", "b", "b", "b", "b"], 2) == ["a", "b", "b"]
    messages = [{"role": "user", "content": "a"}]
    assert group_prompts([messages, list(messages)], 2) == [messages]
    with pytest.raises(
        ConfigError,
        match=r"3 prompts do not form groups of 2 identical prompts \(the runs of identical prompts have the lengths "
        r"\[3\]\)",
    ):
        group_prompts(["a", "a", "a"], 2)
    with pytest.raises(ConfigError, match="share"):
        group_prompts(["a", "b", "b", "a"], 2)


def trainer_of(model: torch.nn.Module, step: int = 0, **options: Any) -> Any:
    """Return the part of a trainer that a policy takes its weights from."""
    accelerator = SimpleNamespace(unwrap_model=lambda module: module, state=SimpleNamespace(), process_index=0)
    args = SimpleNamespace(**options)
    state = SimpleNamespace(global_step=step)
    return SimpleNamespace(model=model, accelerator=accelerator, args=args, state=state, temperature=1.0)


async def logprobs(policy: HFAgentPolicy) -> list[list[float]]:
    episodes = await collected(policy)
    return [episode.tokens.logprobs.tolist() for episode in episodes]


async def test_policy_uses_the_weights_of_the_trainer(policy: HFAgentPolicy) -> None:
    other = locks.model(5, policy.tokenizer)
    await publish(trainable(policy), trainer_of(other, step=3))
    assert policy.version == 3
    same = new_policy(5)
    assert await logprobs(policy) == await logprobs(same)
    await same.close()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft asks by the old name
async def test_policy_uses_the_adapters_of_the_trainer(policy: HFAgentPolicy) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        locks.model(0, policy.tokenizer), peft.LoraConfig(target_modules=["o_proj", "down_proj"], r=2)
    )
    before = await logprobs(policy)
    with torch.no_grad():
        for name, weights in adapted.named_parameters():
            if "lora_B" in name:
                weights.fill_(0.3)
    await publish(trainable(policy), trainer_of(adapted))
    merged = HFAgentPolicy(
        adapted.merge_and_unload(), policy.tokenizer, action_format="bare", tools_in_prompt=False, max_new_tokens=1
    )
    after = await logprobs(policy)
    assert after != before
    assert np.allclose(np.concatenate(after), np.concatenate(await logprobs(merged)), atol=1e-6)
    await merged.close()


async def test_policy_without_another_module_is_trained_in_place() -> None:
    tiny = TinyPolicy()
    await publish(tiny, trainer_of(tiny.module, step=4))
    assert tiny.version == 4
    with pytest.raises(ConfigError, match=r"pass model=policy\.module to the trainer"):
        await publish(tiny, trainer_of(torch.nn.Linear(1, 1)))


def test_adapter_weights_have_plain_model_names() -> None:
    assert list(plain_weights({"base_model.model.lm_head.weight": 1, "lm_head.bias": 2})) == [
        "lm_head.weight",
        "lm_head.bias",
    ]


def test_ineffective_trainer_option_is_rejected() -> None:
    policy = TinyPolicy()
    check_trainer(trainer_of(policy.module, top_p=1.0, top_k=0), policy)
    for options, told in (({"min_p": 0.1}, r"min_p=0\.1 has no effect"), ({"use_vllm": True}, "use_vllm=True")):
        with pytest.raises(ConfigError, match=told):
            check_trainer(trainer_of(policy.module, **options), policy)
    sharded = trainer_of(policy.module)
    sharded.is_fsdp_enabled = True
    with pytest.raises(ConfigError, match="train without FSDP and ZeRO-3"):
        check_trainer(sharded, policy)


def test_missing_reward_or_sample_is_reported_at_construction() -> None:
    policy, task = TinyPolicy(), TaskDefinitionModel(name="t", messages=[Message(role="user", content="?")])
    with pytest.raises(ConfigError, match="credit is computed from scores, but the task has no reward"):
        as_rollout_func(task, policy, credit=CreditAssigner("gigpo"))
    with pytest.raises(ConfigError, match="samples have no effect with sample_of"):
        as_rollout_func(task, policy, samples=[Sample("a")], sample_of=Sample)
    own = as_rollout_func(task, policy, sample_of=lambda prompt: Sample(f"sample of {prompt['x']}"))
    assert own._sample_of({"x": 1}).id == "sample of 1"
    rollouts = as_rollout_func(task, policy, samples=[Sample("a"), Sample("b")])
    assert rollouts.rows() == [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(ConfigError, match="no sample 'c'"):
        rollouts._named("c")
    assert rollouts._named([{"role": "user", "content": "b"}]).id == "b"


TASK = """
name: locks
resource_type: {locks}:CombinationLock
messages: [{{role: user, content: "{{{{ observation }}}}"}}]
dataset_path: locks.jsonl
max_episode_steps: 3
reward_function_path: {locks}:opened
credit: {{estimator: gigpo, omega: 0.25, step_rewards: environment}}
"""


def test_task_file_defines_samples_reward_and_credit(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(TASK.format(locks=locks.__file__))
    (tmp_path / "locks.jsonl").write_text('{"id": "a", "resource_config": {"lock": 1}}\n{"id": "b"}\n')
    policy = TinyPolicy()
    rollouts = as_rollout_func(load_task(tmp_path / "task.yaml", {"sandbox.level": "in_process"}), policy)
    assert rollouts.rows() == [{"prompt": "a"}, {"prompt": "b"}]
    assert rollouts._named("a").resource_config == {"lock": 1}
    assert rollouts.credit is not None and rollouts.credit.options["omega"] == 0.25
    assert rollouts.reward_agent is not None
    assert rollouts.worker.max_episode_steps == 3
