"""`reward-kit sweep`: compare training settings over several seeds. Sweeps can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reward_kit.cli.options import WholeNumber, display_option, json_option, resume_options
from reward_kit.cli.trust import trust_option
from reward_kit.errors import requires_extra


@click.command(name="sweep")
@click.argument("config", required=False, metavar="[SWEEP]", type=click.Path(path_type=Path))
@click.option("--processes", type=WholeNumber(1), metavar="N", help="Number of concurrent runs.")
@resume_options
@display_option()
@json_option()
@click.option("--dry-run", is_flag=True, help="Check all inputs, and print the arms and the number of runs.")
@trust_option
def command(**given: Any) -> None:
    """Compare training settings ("arms") over several seeds, as configured in SWEEP, a YAML file.

    Each arm is trained with each seed, and the last weights are evaluated on held-out samples. The arms are compared
    with the baseline by the differences between runs that have the same seed. Ctrl-C stops all runs after their current
    update, and --resume continues them.

    \b
    Examples:
      reward-kit sweep sweep.yaml --dry-run
      reward-kit sweep sweep.yaml --processes 2
      reward-kit sweep --resume
    """
    with requires_extra("train", "sweep"):  # keeps --help and completion free of PyTorch
        from reward_kit.cli.sweeping import SweepArgs, run_sweep
    run_sweep(SweepArgs(**given))
