"""Train on the locks with TRL: rollouts, rewards and advantages of reward-kit, loss and optimizer of TRL.

python examples/trl_locks/train.py [--steps N] [--seed N]
"""

from __future__ import annotations

import argparse
import tempfile

import locks
import torch
from datasets import Dataset
from trl import GRPOConfig

from reward_kit.integrations.trl import StepCreditTrainer


def train(steps: int, seed: int) -> list[float]:
    """Train, and return the mean score of each update's episodes."""
    tokenizer = locks.tokenizer()
    policy = locks.policy(locks.model(seed, tokenizer), tokenizer, lockstep=True)
    rollouts = locks.rollouts(policy, seed=seed)
    trainer = StepCreditTrainer(
        policy.module,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=steps,
            num_generations=8,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=1,
            learning_rate=4e-3,
            lr_scheduler_type="cosine",
            loss_type="dapo",
            entropy_coef=0.05,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
        ),
        train_dataset=Dataset.from_list(rollouts.rows()),
        processing_class=policy.tokenizer,
        rollout_func=rollouts,
    )
    trainer.train()
    rollouts.close()
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rewards = train(options.steps, options.seed)
    print("reward:", " ".join(f"{reward:.2f}" for reward in (*rewards[:: max(1, options.steps // 10)], rewards[-1])))
