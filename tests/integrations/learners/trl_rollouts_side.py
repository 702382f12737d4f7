"""TRL's trainer on reward-kit rollouts: training results, and its loss and gradient compared with the learner.

Both sides of the comparison begin with the episodes of one generation: TRL's with the rows that the trainer made of
them, ours with `build_rows` and `PPOLearner`.
"""

from __future__ import annotations

import copy
import os
import tempfile
from typing import Any

import torch
from datasets import Dataset
from request_loop import answer_all
from torch import Tensor
from trl import GRPOConfig
from trl.trainer.utils import split_tensor_dict
from trl_training import optimizer_step, own_logprobs

from examples.trl_locks import locks
from reward_kit.agent.policies.hf_policy import HFAgentPolicy
from reward_kit.errors import ConfigError
from reward_kit.integrations.trl.rollouts import Rollouts
from reward_kit.integrations.trl.trainer import StepCreditTrainer
from reward_kit.models import EvaluateResult, Message
from reward_kit.reward_agent.scoring import Scored
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl_processing import CreditAssigner
from reward_kit.tokens import TokenBatch, build_rows
from reward_kit.typed_interface import reward_function

GROUP = 8


@reward_function
def moody(messages: list[Message], environment_return: float | None, rollout_id: str) -> EvaluateResult:
    """Return `opened`, but leave every third episode of a group and every episode of the last lock unscored."""
    if is_left_out(rollout_id):
        raise ValueError("no score today")
    return EvaluateResult(score=(environment_return or 0.0) / len(locks.COMBINATIONS[0]))


def is_left_out(rollout_id: str) -> bool:
    """Return whether `moody` leaves the episode unscored."""
    return int(rollout_id.rsplit("-", 1)[1]) % 3 == 2 or rollout_id.startswith(f"lock-{len(locks.COMBINATIONS) - 1}")


REWARDS = {"opened": locks.opened, "moody": moody}


def new_policy(seed: int, **options: Any) -> HFAgentPolicy:
    """Return a policy with fresh weights."""
    words = locks.tokenizer()
    return locks.policy(locks.model(seed, words), words, **options)


def _trainer(policy: Any, rollouts: Rollouts, model: Any = None, **options: Any) -> StepCreditTrainer:
    return StepCreditTrainer(
        policy.module if model is None else model,
        args=GRPOConfig(
            **{
                "output_dir": tempfile.gettempdir(),
                "use_cpu": True,
                "bf16": False,
                "report_to": [],
                "num_generations": GROUP,
                "per_device_train_batch_size": GROUP * len(locks.COMBINATIONS),
                "gradient_accumulation_steps": 1,
                "lr_scheduler_type": "constant",
                "gradient_checkpointing": False,
                "logging_steps": 1,
                "save_strategy": "no",
                "disable_tqdm": True,
                "loss_type": "dapo",
                **options,
            }
        ),
        train_dataset=Dataset.from_list(rollouts.rows()),
        processing_class=policy.tokenizer,
        rollout_func=rollouts,
    )


def train(seed: int, steps: int, lr: float) -> dict[str, Any]:
    """Return the mean score of each update's episodes.

    Args:
        seed: of weights, samples and draws.
        steps: updates.
        lr: the learning rate.
    """
    policy = new_policy(seed, lockstep=True)
    rollouts = locks.rollouts(policy, seed=seed)
    options = {"learning_rate": lr, "lr_scheduler_type": "cosine", "entropy_coef": 0.05}
    trainer = _trainer(policy, rollouts, seed=seed, max_steps=steps, **options)
    trainer.train()
    rollouts.close()
    return {"rewards": [line["reward"] for line in trainer.state.log_history if "reward" in line]}


def resume(before: int, after: int) -> dict[str, Any]:
    """Return the rewards of a run, and of one stopped after `before` updates and resumed from its checkpoint."""
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as parts:
        uninterrupted = _trained(whole, before + after, before)
        _trained(parts, before, before)
        return {
            "whole": uninterrupted,
            "resumed": _trained(parts, before + after, before, f"{parts}/checkpoint-{before}"),
        }


def _trained(folder: str, steps: int, save_steps: int, checkpoint: str | None = None) -> list[float]:
    policy = new_policy(0, lockstep=True)
    rollouts = locks.rollouts(policy)
    saving = {"output_dir": folder, "save_strategy": "steps", "save_steps": save_steps}
    options = {"max_steps": steps, "learning_rate": 4e-3, "lr_scheduler_type": "constant", "seed": 0}
    trainer = _trainer(policy, rollouts, **saving, **options)
    trainer.train(resume_from_checkpoint=checkpoint)
    rollouts.close()
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


def step(options: dict[str, Any], ours: dict[str, Any], parts: int, reward: str) -> dict[str, Any]:
    """Return loss and gradient of both sides for weights that have changed since the episodes were collected.

    Args:
        options: of `GRPOConfig`.
        ours: of `PPOConfig`.
        parts: micro-batches on TRL's side.
        reward: the name of the reward function.
    """
    with tempfile.TemporaryDirectory() as folder:
        policy = new_policy(0)
        policy.module.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        rollouts = locks.rollouts(policy, reward=REWARDS[reward], seed=0)
        size = GROUP * len(locks.COMBINATIONS) // parts
        batches = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
        model = {"model_init_kwargs": {"dtype": "float32"}}
        trainer = _trainer(
            policy, rollouts, folder, learning_rate=1e-3, max_grad_norm=1e9, **batches, **model, **options
        )
    trainer.create_optimizer_and_scheduler(num_training_steps=10)
    trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
    trainer.model.train()
    inputs = [{"prompt": sample.id} for sample in locks.samples() for _ in range(GROUP)]
    batch = trainer._generate_and_score_completions(inputs)
    reference = copy.deepcopy(policy.module)
    _move(trainer.model)
    found = _theirs(trainer, split_tensor_dict(batch, parts))
    learned = copy.deepcopy(policy.module)
    learned.load_state_dict(trainer.model.state_dict())  # the gradient was taken there; no step is made
    rows, unscored = _our_rows(rollouts, reward)
    config = PPOConfig(**{"max_grad_norm": None, "max_tokens_per_micro_batch": None, **ours})
    learner = PPOLearner(learned, config, reference=reference if config.kl_coefficient else None)
    step_metrics = learner.gradients(rows)
    gradient = {name: weight.grad for name, weight in learned.named_parameters()}
    rollouts.close()
    return {
        "theirs": found,
        "ours": {"loss": step_metrics["loss"], "gradient": gradient, "ratio_max": step_metrics["ratio_max"]},
        "unscored": unscored,
        "tokens": int(rows.batch["loss_mask"].sum()),
    }


@torch.no_grad()
def _move(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    for weights in model.parameters():
        weights += 0.02 * torch.randn(weights.shape, generator=generator)


def _theirs(trainer: StepCreditTrainer, parts: list[dict[str, Tensor]]) -> dict[str, Any]:
    gradient: dict[str, Tensor] = {}
    clip = trainer._clip_grad_norm
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.optimizer.step = lambda *_: None

    def seen(model: torch.nn.Module) -> Tensor:
        gradient.update({name: weight.grad.clone() for name, weight in model.named_parameters()})
        return clip(model)

    trainer._clip_grad_norm = seen
    loss, _ = optimizer_step(trainer, parts)
    return {"loss": loss, "gradient": gradient}


def _our_rows(rollouts: Rollouts, reward: str) -> tuple[TokenBatch, int]:
    """Return rows of the same episodes with recomputed scores and credit, and the number of unscored ones."""
    scored = []
    for episode in rollouts.episodes:
        result = EvaluateResult(score=episode.get_return() / len(locks.COMBINATIONS[0]))
        scored.append(Scored(episode.id_, None if reward == "moody" and is_left_out(episode.id_) else result))
    credited = CreditAssigner("gigpo", step_rewards="environment").assign(rollouts.episodes, scored)
    rows = build_rows(rollouts.episodes, credited.steps, scores=credited.scores, pad_token_id=0)
    return rows, credited.scores.count(None)


def sampled() -> dict[str, Any]:
    """Return the sampled log-probabilities, and TRL's for the same tokens and weights."""
    policy = new_policy(0)
    rollouts = locks.rollouts(policy)
    trainer = _trainer(policy, rollouts)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "lock-1"}] * GROUP)
    rollouts.close()
    return {
        "sampled": batch["old_per_token_logps"],
        "trl": own_logprobs(trainer, batch),
        "mask": batch["completion_mask"] * batch["tool_mask"],
        "advantages": batch["advantages"],
        "shown": list(trainer._logs["advantages"]),
    }


def refused(options: dict[str, Any]) -> dict[str, Any]:
    """Return the error for invalid trainer options, at construction or first generation; "" if none."""
    policy = new_policy(0)
    rollouts = locks.rollouts(policy, seed=0)
    try:
        trainer = _trainer(policy, rollouts, **options)
        trainer.model.train()
        trainer._generate_and_score_completions([{"prompt": "lock-0"}] * GROUP)
    except ConfigError as error:
        return {"message": str(error)}
    finally:
        rollouts.close()
    return {"message": ""}


if __name__ == "__main__":
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    answer_all({"train": train, "step": step, "refused": refused, "sampled": sampled, "resume": resume})
