"""A process of distributed training, started by torchrun; writes its final state to a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from trl_rollouts_side import GROUP, _trainer, new_policy

from examples.trl_locks import locks

if __name__ == "__main__":
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    policy = new_policy(0, lockstep=True)
    rollouts = locks.rollouts(policy)
    size = GROUP * len(locks.COMBINATIONS) // int(os.environ["WORLD_SIZE"])
    batch = {"per_device_train_batch_size": size, "ddp_backend": "gloo", "loss_type": "grpo"}
    trainer = _trainer(policy, rollouts, seed=0, max_steps=int(sys.argv[2]), learning_rate=4e-3, **batch)
    trainer.train()
    found = {
        "groups": sorted({str(episode.custom_data["group_id"]) for episode in rollouts.episodes}),
        "episodes": len(rollouts.episodes),
        "weights": sum(float(weights.double().sum()) for weights in trainer.model.parameters()),
        "rewards": [line["reward"] for line in trainer.state.log_history if "reward" in line],
    }
    rollouts.close()
    Path(sys.argv[1], f"{trainer.accelerator.process_index}.json").write_text(json.dumps(found))
