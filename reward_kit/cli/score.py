"""`reward-kit score`: a reward function on transcripts one already has."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from pathlib import Path

import anyio
import click

from reward_kit.cli.outcome import close_run, display_kind, interruptible, log_to
from reward_kit.errors import ConfigError
from reward_kit.loading import load_object
from reward_kit.models import TaskDefinitionModel
from reward_kit.runs.display import Display
from reward_kit.runs.runner import Control, Plan, Run
from reward_kit.runs.store import RunStore, new_run_path
from reward_kit.runs.tasks import Task
from reward_kit.runs.transcripts import read_transcripts
from reward_kit.typed_interface import reward_spec


@click.command(name="score")
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--reward", required=True, metavar="FILE.py:FUNCTION", help="The reward function.")
@click.option("--pass-threshold", default=1.0, show_default=True, help="A score of at least this counts as a pass.")
@click.option("--log-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--fail-under", type=float, metavar="X", help="Exit 1 where a mean score is below X.")
@click.option("--display", type=click.Choice(["rich", "plain", "none"]), help="Progress; default by terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on standard output.")
def command(
    data: Path,
    reward: str,
    pass_threshold: float,
    log_dir: Path,
    fail_under: float | None,
    display: str | None,
    as_json: bool,
) -> None:
    """Score DATA with a reward function: a JSONL, CSV or YAML file whose rows have `messages`.

    A row may have `id`, `ground_truth` and `policy`. The `episodes.jsonl` of a run is such a file too.

    \b
    Example: reward-kit score transcripts.jsonl --reward my_reward.py:exact
    """
    spec = reward_spec(load_object(reward))
    episodes = list(read_transcripts(data))
    if not episodes:
        raise ConfigError(f"{data} has no rows")
    definition = TaskDefinitionModel(name=data.stem, reward_function_path=reward, pass_threshold=pass_threshold)
    plan = Plan(Task(definition, data, (), 0, reward=spec), (), (), 0)
    header = {
        "task_name": definition.name,
        "data": str(data.resolve()),
        "reward": reward,
        "total": len(episodes),
        "versions": {"reward_kit": version("reward-kit"), "python": platform.python_version()},
    }
    store = RunStore.create(new_run_path(log_dir, definition.name), header)

    async def score() -> int:
        control, shown = Control(), Display(display_kind(display), len(episodes))
        execution = Run(plan, store, listener=shown, control=control)
        async with interruptible(control, shown):
            with shown:
                await execution.execute()
        return close_run(
            store,
            list(execution.rows.values()),
            control,
            title=f"{data.name}  ({len(episodes)} transcripts)",
            pass_threshold=pass_threshold,
            expected=len(episodes),
            fail_under=fail_under,
            as_json=as_json,
            resume_command=None,
        )

    with store:
        log_to(store.path / "run.log")
        for episode in episodes:
            store.append_episode(episode)
        sys.exit(anyio.run(score))
