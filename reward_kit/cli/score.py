"""`reward-kit score`: a reward function on transcripts one already has."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from reward_kit.cli.outcome import Ending, run_into
from reward_kit.cli.scoring import Asked, Origin, made_ready, origin_of, scoring_flags
from reward_kit.episodes.record import facts_of
from reward_kit.errors import ConfigError
from reward_kit.runs.header import FILE, RunHeader
from reward_kit.runs.plan import Plan
from reward_kit.runs.request import environment_of
from reward_kit.runs.scoring_given import check_reward
from reward_kit.runs.store import RunStore, new_run_path
from reward_kit.runs.transcripts import read_transcripts


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
    definition, reward, redaction = made_ready(_origin_of(data), asked)
    episodes = read_transcripts(data)
    if not episodes:
        raise ConfigError(f"{data} has no rows")
    check_reward(reward, map(facts_of, episodes))
    plan = Plan(definition, reward=reward, given=len(episodes))
    header = RunHeader(
        task_name=definition.name,
        data=str(data.resolve()),
        reward=asked.reward,
        task={"pass_threshold": definition.pass_threshold},
        total=plan.total,
        **environment_of(reward),
    )
    store = RunStore.create(new_run_path(asked.log_dir, definition.name), header, redaction)
    ending = Ending(
        title=f"{data.name}  ({len(episodes)} transcripts)",
        pass_threshold=definition.pass_threshold,
        expected=plan.total,
        fail_under=asked.fail_under,
        as_json=asked.as_json,
    )
    sys.exit(run_into(plan, store, ending, display=asked.display, given=episodes))


def _origin_of(data: Path) -> Origin:
    """The run's own task where the transcripts are a run's, else next to nothing."""
    is_of_run = data.name == "episodes.jsonl" and (data.parent / FILE).is_file()
    known = origin_of(RunHeader.read(data.parent)) if is_of_run else None
    return known or Origin({"name": data.stem}, Path.cwd())
