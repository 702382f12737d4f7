"""`reward-kit train`: train a policy as configured in a train file. Runs can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reward_kit.cli.options import display_option, json_option, resume_options, set_option
from reward_kit.cli.trust import trust_option
from reward_kit.errors import requires_extra


@click.command(name="train")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@set_option("Set a key of the train file (dotted if nested; task.KEY for the task).")
@resume_options
@click.option("--force", is_flag=True, help="With --resume: continue even if files have changed.")
@display_option()
@json_option()
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check all inputs and print the batches, the credit and the loss as formulas. Nothing is written.",
)
@trust_option
def command(**given: Any) -> None:
    """Train a policy as configured in CONFIG, a YAML file.

    Ctrl-C stops the training after the current update, and --resume continues it.

    \b
    Examples:
      reward-kit train train.yaml
      reward-kit train train.yaml -T ppo.lr=1e-4 -T pipeline=one_step_off
      reward-kit train train.yaml --dry-run
      reward-kit train --resume
    """
    with requires_extra("train", "train"):  # keeps --help and completion free of PyTorch
        from reward_kit.cli.training import TrainArgs, run_train
    run_train(TrainArgs(**given))
