"""A run of a sweep in its own process: training, and evaluations of the last weights.

`sweep` starts `python -m reward_kit.rl.training.sweep_run`, and writes a `RunRequest` as JSON to its standard input.
The process prints JSON lines: `progress` after each update, `note`, `trained`, `evaluation` after each evaluation, and
at the end `status` or `error`. The output of the user's code goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import anyio
import pydantic

from reward_kit.agent.samples import Sample, parse_tags
from reward_kit.display_text import one_line
from reward_kit.errors import ConfigError, RewardKitError, did_you_mean
from reward_kit.report.run_page import write_page
from reward_kit.rl.checkpoint import load_latest
from reward_kit.rl.training.logs import TrainingDisplay
from reward_kit.rl.training.pipelines import Progress, restore_state
from reward_kit.rl.training.plan import TrainingPlan, load_plan
from reward_kit.rl.training.resume import new_run_header
from reward_kit.rl.training.rollouts import Collector, evaluation_policy
from reward_kit.rl.training.setup import Factories, in_lockstep, make_worker, open_components, use_threads
from reward_kit.rl.training.train_file import train_into
from reward_kit.runs.files import HELD_OUT_SCORE, RUN_FILE
from reward_kit.runs.plan import INTERRUPTED, Control
from reward_kit.runs.run_folder import CHECKPOINTS, RunFolder, RunHeader
from reward_kit.runs.statistics import mean_interval, safe_mean

Report = Callable[[Mapping[str, Any]], None]


class EvaluationRequest(pydantic.BaseModel):
    """An evaluation to make: the sampling temperature (None for the policy's own), and the episodes per sample."""

    temperature: float | None
    rollouts: int


class RunRequest(pydantic.BaseModel):
    """The work of a process.

    Attributes:
        train: the train file.
        overrides: the overrides of the train file. They come from a file, so they cannot send keys to endpoints.
        run: the directory of the run; None to evaluate the untrained policy.
        evaluation_overrides: the overrides for the evaluations, which may have other samples.
        evaluations: the evaluations to make.
        by: the key of the samples or the tag by whose values to group the scores.
        sys_path: the `sys.path` of the process that started this one.
    """

    train: str
    overrides: dict[str, Any]
    run: str | None
    evaluation_overrides: dict[str, Any]
    evaluations: list[EvaluationRequest]
    by: str | None = None
    sys_path: list[str]


class _ReportingDisplay(TrainingDisplay):
    """Reports the progress of training instead of showing it."""

    def __init__(self, plan: TrainingPlan, report: Report) -> None:
        super().__init__("none", plan.config)
        self._report = report

    def say(self, note: str) -> None:
        self._report({"note": note})

    def updated(self, figures: Mapping[str, float], progress: Progress) -> None:
        score = figures.get(HELD_OUT_SCORE, figures.get("score/mean"))
        self._report({"progress": {"updates": progress.updates, "env_steps": progress.env_steps, "score": score}})


@asynccontextmanager
async def _until_signal(control: Control) -> AsyncIterator[None]:
    """Stop after the current update on the first signal, and immediately on the second."""

    async def watch() -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if control.stop_reason:
                    control.scope.cancel()
                control.finish(INTERRUPTED)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        yield
        tasks.cancel_scope.cancel()


def train_run(request: RunRequest, report: Report) -> str:
    """Train a run, or continue it from its latest checkpoint, and return its status."""
    assert request.run is not None
    plan = load_plan(Path(request.train), request.overrides, stored=request.overrides)
    path = Path(request.run)
    is_new = not (path / RUN_FILE).is_file()
    if is_new:
        shutil.rmtree(path, ignore_errors=True)  # left behind by a killed process
        RunFolder.create(path, new_run_header(path.name, plan), plan.redaction)
    elif (status := RunHeader.read(path).status) == "complete":
        return status
    display = _ReportingDisplay(plan, report)
    return train_into(path, plan, display, _until_signal, is_new=is_new, on_end=write_page).status


async def evaluate_run(request: RunRequest, report: Report) -> None:
    """Evaluate the last weights of a run, or the untrained policy, on the held-out samples."""
    plan = load_plan(Path(request.train), request.evaluation_overrides, stored=request.evaluation_overrides)
    assert plan.held_out is not None
    use_threads(plan.config.threads)
    folder = Path(request.run) if request.run is not None else plan.folder
    async with open_components(plan, folder, lambda line: None, Factories()) as components:
        if request.run is not None:
            checkpoint = load_latest(folder / CHECKPOINTS)
            assert checkpoint is not None, "a finished run has a checkpoint"
            await restore_state(checkpoint, components.pipeline)
        assert components.evaluation is not None
        for one in request.evaluations:
            acting = evaluation_policy(components.policy, one.temperature)
            evaluation = replace(
                components.evaluation,
                worker=make_worker(plan.held_out.task, in_lockstep(acting)),
                rollouts=one.rollouts,
                collector=Collector(one.rollouts, plan.config.rollout.max_concurrency),
            )
            _, scored = await evaluation.collect()
            samples = [sample for sample in plan.held_out.samples for _ in range(one.rollouts)]
            figures = score_groups(samples, [each.score for each in scored], request.by)
            report({"evaluation": {"temperature": one.temperature, "rollouts": one.rollouts, **figures}})


def score_groups(samples: Sequence[Sample], scores: Sequence[float | None], by: str | None) -> dict[str, Any]:
    """Return the figures of an evaluation, and those of each category if `by` is set.

    Args:
        samples: (N,) the sample of each episode.
        scores: (N,) the score of each episode; None if unscored.
        by: the key or tag by which to group.
    """

    def figures(chosen: Sequence[int]) -> dict[str, Any]:
        known = [score for at in chosen if (score := scores[at]) is not None]
        return {"episodes": len(chosen), "scored": len(known), "score": safe_mean(known) if known else None}

    found = figures(range(len(scores)))
    if found["scored"]:
        error = mean_interval(scores, [sample.id for sample in samples]).standard_error
        found |= {"samples": len({sample.id for sample in samples}), "standard_error": error}
    if by is not None:
        members: dict[str, list[int]] = defaultdict(list)
        for at, sample in enumerate(samples):
            for category in categories(sample, by):
                members[category].append(at)
        found["categories"] = {category: figures(chosen) for category, chosen in sorted(members.items())}
    return found


def categories(sample: Sample, by: str) -> list[str]:
    """Return the categories of a sample: the value of a key (each item if it is a list), or whether it has a tag."""
    if by == "tags":
        return list(parse_tags(sample.row.get("tags")))
    if by in sample.row:
        value = sample.row[by]
        return list(dict.fromkeys(map(str, value if isinstance(value, list | tuple) else [value])))
    return [by if by in parse_tags(sample.row.get("tags")) else f"not {by}"]


def check_category(samples: Sequence[Sample], by: str) -> None:
    """Raise a ConfigError if no sample has the key or tag `by`."""
    known = {key for sample in samples for key in sample.row}
    known |= {tag for sample in samples for tag in parse_tags(sample.row.get("tags"))}
    if by not in known:
        raise ConfigError(f"no held-out sample has the key or tag {by!r}{did_you_mean(by, known)}")


def main() -> NoReturn:
    """Do the work that standard input requests, and exit."""
    # Standard output is for the reports, so everything else that is printed must go to standard error.
    output = os.fdopen(os.dup(1), "w", encoding="ascii", buffering=1)
    os.dup2(2, 1)

    def report(line: Mapping[str, Any]) -> None:
        output.write(json.dumps(line) + "\n")

    code = 0
    try:
        request = RunRequest.model_validate_json(sys.stdin.read())
        sys.path[:] = request.sys_path
        status = "complete"
        if request.run is not None:
            status = train_run(request, report)
            report({"trained": status})
        if status == "complete" and request.evaluations:
            asyncio.run(evaluate_run(request, report))
        report({"status": status})
    except (RewardKitError, ExceptionGroup) as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        report({"error": one_line(f"{first}" if isinstance(first, RewardKitError) else repr(first))})
        code = 1
    except KeyboardInterrupt:
        report({"status": INTERRUPTED})
    # Threads of the user's code must not keep the process alive.
    output.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
