"""`reward-kit calibrate`: measure how well an LLM judge, or any other reward, agrees with human labels."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import click
import pydantic
from rich import box
from rich.table import Table
from rich.text import Text

from reward_kit.cli.echo import echo, echo_json
from reward_kit.cli.options import WholeNumber, complete_rewards, json_option, sandbox_keys, sandbox_options, set_option
from reward_kit.cli.trust import require_trust_in, trust_option
from reward_kit.console import SafeConsole
from reward_kit.display_text import truncate
from reward_kit.errors import ConfigError
from reward_kit.models import TaskDefinitionModel
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, ProviderSession
from reward_kit.reward_agent.loading import make_scorer
from reward_kit.reward_agent.scoring import Reward, Scorer, check_parameters, check_truth
from reward_kit.runs.calibration import Calibration, RecordedScorer, Settings, calibrate
from reward_kit.runs.labels import LabelColumns, Pairs, read_labels
from reward_kit.runs.task_file import apply_overrides, parse_override
from reward_kit.runs.tasks import load_task_reward
from reward_kit.validation import describe_validation_error

_COLUMNS = tuple(LabelColumns.__dataclass_fields__)


def _columns(command: Any) -> Any:
    """Add an option for the name of each column in the label file."""
    for name in reversed(_COLUMNS):
        default = getattr(LabelColumns(), name)
        text = f"The column with the {name.replace('rollout', 'rollout id')}."
        option = click.option(f"--{name}-column", default=default, show_default=True, metavar="NAME", help=text)
        command = option(command)
    return command


@click.command(name="calibrate")
@click.argument("labels", type=click.Path(path_type=Path))
@click.option(
    "--reward",
    metavar="FILE.py:FUNCTION",
    shell_complete=complete_rewards,
    help="The reward function, or reward_kit.rewards:NAME.",
)
@click.option(
    "--metric",
    metavar="NAME",
    help="Instead of --reward: a metric recorded by the labeled run, or score. No reward is called.",
)
@set_option("Set an option of the reward.", ("-O", "--option", "options"))
@click.option("--data", type=click.Path(path_type=Path), help="The transcripts to which the rollout_id column refers.")
@click.option(
    "--pairs",
    type=click.Choice(["scores", "judge"]),
    default="scores",
    show_default=True,
    help="For pairs: score each answer separately, or pass the other answer as the ground truth.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="For yes/no labels: the lowest score that counts as yes.",
)
@click.option("--levels", metavar="X,Y,…", help="All possible labels, if the file does not contain all of them.")
@sandbox_options()
@click.option(
    "--max-concurrency", type=WholeNumber(1), default=16, show_default=True, help="Maximum number of concurrent calls."
)
@click.option("--seed", type=WholeNumber(0), default=0, show_default=True, help="Random seed for the bootstrap.")
@click.option(
    "--resamples",
    type=WholeNumber(0),
    default=1_000,
    show_default=True,
    help="Number of bootstrap resamples; 0 computes no intervals.",
)
@click.option("--worst", type=WholeNumber(0), default=5, show_default=True, help="Number of disagreements to show.")
@json_option("Print the result as JSON on standard output.")
@_columns
@trust_option
def command(
    labels: Path,
    reward: str | None,
    metric: str | None,
    options: tuple[str, ...],
    data: Path | None,
    pairs: Pairs,
    threshold: float,
    levels: str | None,
    sandbox: str | None,
    max_concurrency: int,
    seed: int,
    resamples: int,
    worst: int,
    as_json: bool,
    **columns: str,
) -> None:
    """Score human-labeled answers, and show how well the scores agree with the labels.

    LABELS is the labels.jsonl of a run, written by `reward-kit view`, or a CSV file with the columns `id` and `label`,
    and with `prompt` and `response`, `messages` (as JSON), or `rollout_id` (with --data). For pairs, the columns are
    `winner` (A, B or tie), `prompt`, `response_a` and `response_b`.

    \b
    Examples:
      reward-kit calibrate labels.csv --reward my_reward.py:exact
      reward-kit calibrate labels.csv --reward reward_kit.rewards:llm_judge -O model=your-model
      reward-kit calibrate runs/RUN/labels.jsonl --metric tone
      reward-kit calibrate pairs.csv --pairs judge --reward reward_kit.rewards:pairwise_judge -O model=your-model
    """
    if (reward is None) == (metric is None):
        raise click.UsageError("pass either --reward FILE.py:FUNCTION or --metric NAME")
    if metric is not None and (options or sandbox or pairs == "judge"):
        raise click.UsageError("-O, --sandbox and --pairs judge require --reward, because --metric calls no reward")
    try:
        known = tuple(float(part) for part in levels.split(",")) if levels is not None else None
    except ValueError:
        raise click.UsageError(f"--levels {levels!r}: must be numbers separated by commas, such as 1,2,3,4,5") from None
    settings = Settings(threshold, known, seed, resamples)
    names = LabelColumns(**{name.removesuffix("_column"): value for name, value in columns.items()})
    rows = read_labels(labels, names, data=data, pairs=pairs)
    scorer: Scorer
    if reward is not None:
        require_trust_in([reward])
        confinement = sandbox_keys(sandbox)
        loaded, deadline_s = _loaded(reward, labels.stem, confinement, options)
        requests = [request for row in rows for request in row.requests]
        fields = (key for request in requests for key in request.sample)
        check_truth(loaded, (request.ground_truth for request in requests), fields, "row")
        scorer, id_ = make_scorer(loaded, deadline_s), loaded.id
    else:
        scorer, id_ = RecordedScorer((data or labels).parent, str(metric)), f"recorded {metric}"

    async def run() -> Calibration:
        CURRENT_PROVIDER_SESSION.set(
            ProviderSession()
        )  # all requests share one queue, which slows down after a rate limit error
        with contextlib.redirect_stdout(sys.stderr):
            return await calibrate(rows, scorer, settings, pairs=pairs, worst=worst, max_concurrency=max_concurrency)

    done = anyio.run(run)
    if as_json:
        facts = {"labels": str(labels), "reward": id_, "threshold": threshold, "confidence": settings.confidence}
        echo_json({**facts, "seed": seed, "resamples": resamples, **done.to_json()})
        return
    _show(done, f"{id_} against {labels.name}")


def _loaded(
    reward: str, name: str, confinement: Mapping[str, Any], options: tuple[str, ...]
) -> tuple[Reward, float | None]:
    """Load the reward with its options. Return the reward, and the time limit for a call in seconds."""
    given = {"reward_options": apply_overrides({}, dict(parse_override(item, "-O") for item in options))}
    try:
        keys = {"name": name, "reward_function_path": reward, **given}
        definition = TaskDefinitionModel.model_validate(apply_overrides(keys, confinement))
    except pydantic.ValidationError as error:
        raise ConfigError("; ".join(describe_validation_error(error, TaskDefinitionModel))) from None
    with contextlib.redirect_stdout(sys.stderr):  # a user's module may print when it is loaded
        loaded = load_task_reward(definition, Path.cwd())
    assert loaded is not None  # the definition names it
    for note in loaded.notes:
        echo(note, err=True)
    check_parameters(loaded.reward)
    return loaded.reward, definition.limits.reward_time_s


def _show(done: Calibration, title: str) -> None:
    console = SafeConsole(width=None if sys.stdout.isatty() else 120)
    table = Table(title=Text(title, "bold"), box=box.SIMPLE_HEAVY, title_justify="left")
    table.add_column("", style="dim", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("95% interval", justify="right", no_wrap=True)
    table.add_column("meaning", overflow="fold")
    for figure in done.figures:
        interval = "–" if figure.low is None else f"[{_number(figure.low)}, {_number(figure.high)}]"
        table.add_row(figure.name.replace("_", " "), _number(figure.value), interval, figure.meaning)
    console.print(table)
    lines = [f"{done.scored} of {done.rows} rows scored"]
    if done.unscored:
        counts = ", ".join(f"{name} {count}" for name, count in done.unscored.items())
        lines[0] += f"; unscored and excluded: {counts}"
        first = "".join(letter if letter.isprintable() else " " for letter in done.first_error or "")
        lines.append(f"first error: {truncate(first, 500)}")
    if done.clipped:
        lines.append(f"{done.clipped} scores outside 0 to 1 were clipped")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    if done.worst:
        console.print(Text("\nLargest disagreements", "bold"))
    for item in done.worst:
        head = f"{Path(item.where).name} ({item.id}): label {item.label:g}, score {item.score:.2f}"
        answers = [f"  answer: {answer}" for answer in item.answers]
        text = "\n".join([head, f"  asked: {item.prompt}", *answers, f"  reason: {item.reason}"])
        console.print(Text(text), soft_wrap=True)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{round(value, 3) + 0.0:.3f}"  # never -0.000
