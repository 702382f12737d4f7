"""`reward-kit score`: a reward function on transcripts one already has."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from reward_kit.cli.outcome import Ending, run_into
from reward_kit.cli.scoring import Asked, made_ready, scoring_flags
from reward_kit.runs.scoring_given import origin_of_data, scoring_run


@click.command(name="score")
@click.argument("data", type=click.Path(path_type=Path))
@scoring_flags("score")
def command(data: Path, asked: Asked) -> None:
    """Score DATA with a reward function: a JSONL, CSV or YAML file whose rows have `messages`.

    A row may have `id`, `ground_truth` and `policy`. The `episodes.jsonl` of a run is such a file too; `rescore` scores
    those of a whole run, and says what changed.

    \b
    Example: reward-kit score transcripts.jsonl --reward my_reward.py:exact
    """
    ready = made_ready(origin_of_data(data), asked)
    run = scoring_run(data, ready, asked.reward, asked.log_dir)
    ending = Ending(
        title=run.title,
        pass_threshold=ready.definition.pass_threshold,
        expected=run.plan.total,
        fail_under=asked.fail_under,
        as_json=asked.as_json,
    )
    sys.exit(run_into(run.plan, run.store, ending, display=asked.display, given=run.episodes))
