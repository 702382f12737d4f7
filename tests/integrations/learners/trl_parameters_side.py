"""TRL's trainer with reward-kit's rewards, environments and rollouts as parameters, without a subclass.

The environment's episodes are played by a scripted model: what it says is generated, parsed, carried out and put back
by TRL itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from request_loop import answer_all
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer
from trl_rollouts_side import moody, new_policy

from examples.trl_locks import locks
from reward_kit.integrations.trl.environments import environment_factory
from reward_kit.integrations.trl.rewards import as_trl_reward, rollout_scores
from reward_kit.integrations.trl.rollouts import as_rollout_func
from reward_kit.models import EvaluateResult, Message
from reward_kit.rl.model_kit.models import build_decoder, build_tokenizer
from reward_kit.typed_interface import reward_function

GROUP = 4


def _config(**options: Any) -> GRPOConfig:
    return GRPOConfig(
        **{
            "output_dir": tempfile.mkdtemp(),
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "num_generations": GROUP,
            "per_device_train_batch_size": 2 * GROUP,
            "gradient_accumulation_steps": 1,
            "learning_rate": 1e-3,
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "max_completion_length": 8,
            **options,
        }
    )


@reward_function
def short(messages: list[Message], longest: int) -> EvaluateResult:
    """1 for short answers, and no score for empty ones."""
    said = len(messages[-1].text.split())
    if not said:
        raise ValueError("nothing was said")
    return EvaluateResult(score=float(said <= longest))


def rewards(is_async: bool) -> dict[str, Any]:
    """Return what TRL logs for a reward function on completions that it generates."""
    words = locks.tokenizer()
    reward = as_trl_reward(short, columns={"limit": "longest"}, is_async=is_async)
    seen: list[list[float | None]] = []
    scores = reward.scores

    def kept(*arguments: Any) -> list[float | None]:
        seen.append(scores(*arguments))
        return seen[-1]

    reward.scores = kept
    rows = [{"prompt": f"lock{n % 4} place{n % 3}", "limit": 3} for n in range(8)]
    trainer = GRPOTrainer(
        locks.model(0, words),
        reward_funcs=reward,
        args=_config(max_steps=2, log_completions=True, num_completions_to_print=0),
        train_dataset=Dataset.from_list(rows),
        processing_class=words,
    )
    trainer.train()
    reward.close()
    (first, *_) = [line for line in trainer.state.log_history if "reward" in line]
    return {
        "scores": seen,
        "mean": first["rewards/short/mean"],
        "unscored": first["short/unscored"],
        "failures": list(trainer._logs["extra"]["short/failure"]),
        "counted": dict(reward.unscored),
    }


def rollouts() -> dict[str, Any]:
    """Train and evaluate TRL's trainer on rollouts; return its advantages and its training input."""
    policy = new_policy(0)
    made = as_rollout_func(locks.task(), policy, reward=moody, samples=locks.samples(), run_seed=3)
    dataset = Dataset.from_list(made.rows())
    trainer = GRPOTrainer(
        policy.module,
        reward_funcs=rollout_scores,
        args=_config(
            max_steps=2, eval_strategy="steps", eval_steps=1, num_generations_eval=2, per_device_eval_batch_size=8
        ),
        train_dataset=dataset,
        eval_dataset=dataset,
        processing_class=policy.tokenizer,
        rollout_func=made,
    )
    before = {name: weights.clone() for name, weights in trainer.model.named_parameters()}
    trainer.train()
    trainer.model.train()
    batch = trainer._generate_and_score_completions(
        [{"prompt": name} for name in ("lock-0", "lock-3") for _ in range(GROUP)]
    )
    log = trainer.state.log_history
    facts = [episode.custom_data for episode in made.episodes]
    made.close()
    return {
        "changed": any(not torch.equal(before[name], weights) for name, weights in trainer.model.named_parameters()),
        "eval_rewards": [line["eval_reward"] for line in log if "eval_reward" in line],
        "unscored": [line["rollout_scores/unscored"] for line in log if "rollout_scores/unscored" in line],
        "tool_mask": batch["tool_mask"],
        "completion_mask": batch["completion_mask"],
        "advantages": batch["advantages"],
        "groups": [fact["group_id"] for fact in facts],
        "starts": [fact["start"]["state_key"] for fact in facts],
        "versions": sorted({span.policy_version for one in made.episodes for span in one.tokens.spans}),
        "step": trainer.state.global_step,
    }


def scored_by_trl() -> dict[str, Any]:
    """Return rollouts without a reward, scored by TRL's reward functions from the messages of their episodes."""
    policy = new_policy(0)
    made = as_rollout_func(locks.task(), policy, samples=locks.samples())
    reward = as_trl_reward(moody)
    trainer = GRPOTrainer(
        policy.module,
        reward_funcs=reward,
        args=_config(),
        train_dataset=Dataset.from_list(made.rows()),
        processing_class=policy.tokenizer,
        rollout_func=made,
    )
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "lock-1"} for _ in range(2 * GROUP)])
    returns = [episode.get_return() for episode in made.episodes]
    made.close()
    reward.close()
    return {"rewards": list(trainer._logs["rewards"]["moody"]), "returns": returns, "advantages": batch["advantages"]}


class _ScriptedTrainer(GRPOTrainer):
    """A trainer that generates scripted turns instead of the model's."""

    script: list[str]
    turn = 0

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], list[list[float]]]:
        text = self.script[min(self.turn, len(self.script) - 1)]
        type(self).turn += 1
        ids = self.processing_class(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
        return [list(ids) for _ in prompt_ids], [[-1.0] * len(ids) for _ in prompt_ids]


def _chat_tokenizer() -> PreTrainedTokenizerBase:
    """Return a byte tokenizer with the chat template of a model whose tool calls TRL parses."""
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    words = build_tokenizer(level="byte", context=8192)
    words.add_special_tokens({"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"]})
    words.chat_template = template.read_text()
    return words


@reward_function
def finished(messages: list[Message], environment_return: float | None, sample: Mapping[str, Any]) -> EvaluateResult:
    """Return the environment's reward, and whether the answers of the tools are present."""
    texts = [message.text for message in messages if message.role == "tool"]
    return EvaluateResult(score=(environment_return or 0.0) / 3, reason=" | ".join(texts))


def environment(script: list[str]) -> dict[str, Any]:
    """Return the result of TRL's loop over an environment for scripted turns of the model."""
    words = _chat_tokenizer()
    model = build_decoder(words, layers=1, width=16, heads=2, context=8192)
    reward = as_trl_reward(finished)
    factory = environment_factory(locks.CombinationLock, {"lock": 0})
    prompt = [{"role": "user", "content": "Open it."}]
    rows = [{"prompt": prompt, "resource_config": f'{{"lock": {n}}}'} for n in (0, 1)]
    _ScriptedTrainer.script, _ScriptedTrainer.turn = script, 0
    trainer = _ScriptedTrainer(
        model,
        reward_funcs=reward,
        args=_config(max_completion_length=4096, max_tool_calling_iterations=6),
        train_dataset=Dataset.from_list(rows),
        processing_class=words,
        environment_factory=factory,
    )
    trainer.model.train()
    inputs = [dict(row) for row in rows for _ in range(GROUP)]
    batch = trainer._generate_and_score_completions(inputs)
    said = [[message for message in each if message["role"] == "tool"] for each in trainer._logs["completion"]]
    found = {
        "rewards": {name: list(values) for name, values in trainer._logs["rewards"].items()},
        "told": [[message["content"] for message in each] for each in said],
        "prompts": [prompt[-1]["content"] for prompt in trainer._logs["prompt"]],
        "tool_tokens": int((batch["completion_mask"] * (1 - batch["tool_mask"])).sum()),
        "tools": [tool.__name__ for tool in trainer.tools],
    }
    reward.close()
    factory.close()
    return found


if __name__ == "__main__":
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    answer_all({"rewards": rewards, "rollouts": rollouts, "scored_by_trl": scored_by_trl, "environment": environment})
