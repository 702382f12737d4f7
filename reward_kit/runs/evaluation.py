"""A task run, or transcripts scored, from Python: in a script, a notebook, a test. The files are those of the command.

`evaluate` and `score_transcripts` block, also where an event loop runs already; `evaluate_async` is for code that is
asynchronous itself. Nothing is printed. Keys of endpoints come from the environment.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from reward_kit.blocking import run_blocking
from reward_kit.display_text import counted
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, ProviderError, RewardKitError, StoreError, boundary, kind_of
from reward_kit.processes import LOG_FOLDER
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, ProviderSession
from reward_kit.report.run_page import write_report
from reward_kit.runs import events
from reward_kit.runs.credit import assign_credit, write_section
from reward_kit.runs.finished import FinishedRun
from reward_kit.runs.given import LivePolicy, is_live, label_each, lent_policies
from reward_kit.runs.overrides import given_in_python
from reward_kit.runs.plan import Control, Plan
from reward_kit.runs.preparation import new_store, plan_of
from reward_kit.runs.request import Request
from reward_kit.runs.resources import check_world
from reward_kit.runs.run_log import logged_to
from reward_kit.runs.runner import Run
from reward_kit.runs.scoring_given import origin_of_data, ready_to_score, scoring_run
from reward_kit.runs.store import RunStore
from reward_kit.runs.summary import summarise, summary_to_json
from reward_kit.runs.tasks import LoadedTask, load_task
from reward_kit.task_parts import CreditModel
from reward_kit.validation import check_number

logger = logging.getLogger("reward_kit.runs")
Policies = str | LivePolicy | Sequence[str | LivePolicy] | Mapping[str, LivePolicy]


@runtime_checkable
class RunnableTask(Protocol):
    """A task that is no file; `python_tasks.Task` is the one that there is."""

    def load(self, overrides: Mapping[str, Any]) -> LoadedTask:
        """The task with these keys laid over its own."""


def evaluate(task: str | Path | RunnableTask, **options: Any) -> FinishedRun:
    """Run a task and score its episodes; `evaluate_async`, to the end.

    Args:
        task: the file, or a `Task`.
        **options: as of `evaluate_async`.

    Raises:
        ConfigError: something is wrong with the task or an option; nothing was written.
        RewardKitError: the run itself failed.
    """
    inspect.signature(evaluate_async).bind(task, **options)  # what is misspelt is told before a coroutine is made
    finished: FinishedRun = run_blocking(evaluate_async(task, **options))
    return finished


async def evaluate_async(
    task: str | Path | RunnableTask,
    *,
    models: str | Sequence[str] = (),
    policies: Policies = (),
    rollouts: int | None = None,
    limit: int | None = None,
    sample_ids: Sequence[str] = (),
    seed: int = 0,
    max_concurrency: int = 16,
    overrides: Mapping[str, Any] | None = None,
    base_url: str | None = None,
    log_dir: str | Path = "runs",
) -> FinishedRun:
    """Run a task and score its episodes, as `reward-kit run` does.

    Args:
        task: the file, or a `Task`.
        models: `openai/NAME`, one or several.
        policies: built-in names, `file.py:Class` relative to the task file, or `replay:RUN`; or an `AgentPolicy`, as a
            class that is made without arguments, or as an instance, which stays open. One or several, or a dict with a
            label for each. Where neither is given, the task names its policy.
        rollouts: episodes of each sample; by default as many as the task says.
        limit: the first so many samples only.
        sample_ids: these samples only.
        seed: everything random derives from it.
        max_concurrency: episodes in flight.
        overrides: keys laid over the task file's, dotted for inner ones.
        base_url: the endpoint of the models.
        log_dir: where the run's folder is made.

    Raises:
        ConfigError: something is wrong with the task or an option; nothing was written.
        RewardKitError: the run itself failed.
    """
    for name, count in (("rollouts", rollouts), ("limit", limit), ("max_concurrency", max_concurrency)):
        if count is not None:
            check_number(name, count, whole=True)
    models, names, live = _several("models", models), *_chosen(policies)
    with given_in_python():
        loaded = _loaded(task, _keys("overrides", overrides))
    if not (models or names or live) and loaded.given.policy is not None:
        live = label_each([loaded.given.policy])
    request = Request(
        task_path=loaded.path,
        overrides=_keys("overrides", overrides),
        models=models,
        policies=names,
        base_url=base_url,
        rollouts=rollouts,
        limit=limit,
        sample_ids=_several("sample_ids", sample_ids),
        seed=seed,
    )
    traffic = ProviderSession()
    try:
        plan, redaction = plan_of(loaded, request, max_concurrency, traffic, lent_policies(live))
        await check_world(loaded.definition, loaded.samples, loaded.located)
        acting = {f"policy {label}": one for label, one in live.items()}
        store = new_store(Path(log_dir), loaded, plan, request, redaction, acting)
        title = f"{loaded.definition.name}  ({counted(len(plan.samples), 'sample')} × {plan.rollouts})"
        finished = await _carried_out(plan, store, title, traffic)
    finally:
        traffic.close()
    return replace(finished, notes=loaded.notes)


evaluate.__signature__ = inspect.signature(evaluate_async)  # type: ignore[attr-defined]  # for help and editors


def score_transcripts(
    data: str | Path,
    reward: str,
    *,
    options: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    pass_threshold: float | None = None,
    folder: str | Path | None = None,
    log_dir: str | Path = "runs",
) -> FinishedRun:
    """Score transcripts that are there already, as `reward-kit score` does.

    Args:
        data: a JSONL, CSV or YAML file whose rows have `messages`.
        reward: `file.py:function`.
        options: of the reward.
        overrides: `sandbox.KEY` and `limits.reward_time_s`, as in a task file.
        pass_threshold: a score of at least this passes; by default 1, or that of the run whose episodes they are.
        folder: what the reward's file is relative to; by default the working directory.
        log_dir: where the run's folder is made.

    Raises:
        ConfigError: the data has no rows, or the reward cannot be loaded, or asks for what the rows do not have.
        RewardKitError: the run itself failed.
    """
    data, own = _path("data", data), _keys("options", options)
    if not isinstance(reward, str):
        raise ConfigError(f"reward is 'file.py:function', not {kind_of(reward)}; AsyncRewardAgent takes functions")
    changes = {**_keys("overrides", overrides), **{f"reward_options.{key}": value for key, value in own.items()}}
    origin = origin_of_data(data)
    with given_in_python():
        ready = ready_to_score(origin, reward, changes, pass_threshold, Path(folder) if folder is not None else None)
    run = scoring_run(data, ready, reward, Path(log_dir))
    finished: FinishedRun = run_blocking(_carried_out(run.plan, run.store, run.title, None, run.episodes))
    return replace(finished, notes=ready.notes)


async def _carried_out(
    plan: Plan, store: RunStore, title: str, traffic: ProviderSession | None, given: Sequence[SingleAgentEpisode] = ()
) -> FinishedRun:
    """Run a plan into its new store, and write what is written at the end."""
    control = Control()
    with store, logged_to(store.path / "run.log", store.redaction), _surroundings(store, traffic):
        if traffic is not None:
            traffic.gave_up = control.give_up
        run = Run(plan, store, control=control)
        run.take_given(given)
        events.began(store.path, "run", plan.total)
        try:
            await run.execute()
        except BaseException as error:
            error.add_note(f"what was collected is in {store.path}")
            raise
        events.ended(store.path, "run", store.header.status)
        rows = list(run.rows.values())
        policies = summarise(rows, plan.definition.pass_threshold)
        store.write_summary(summary_to_json(policies))
        _credit(store, plan.definition.credit)
        _page(store)
    if control.is_failure:
        raise ProviderError(f"{store.path}: {control.stop_reason}")
    stopped = control.stop_reason if run.missing() else None
    return FinishedRun(
        store.path, title, store.header.status, stopped, rows, policies, plan.definition.pass_threshold
    )  # fmt: skip


@contextmanager
def _surroundings(store: RunStore, traffic: ProviderSession | None) -> Iterator[None]:
    """Where servers log, and what rewards ask models through: for the run, and not for what its caller does next."""
    logs, asked = LOG_FOLDER.set(store.path / "logs"), CURRENT_PROVIDER_SESSION.set(traffic)
    try:
        yield
    finally:
        LOG_FOLDER.reset(logs)
        CURRENT_PROVIDER_SESSION.reset(asked)


def _credit(store: RunStore, asked: CreditModel | None) -> None:
    """Assign credit where the task asks for it. A failure leaves the run as it is, and stands in its log."""
    if asked is None:
        return
    try:
        write_section(store.path, assign_credit(store.path, asked))
    except RewardKitError as error:
        logger.warning("no credit: %s", error)


def _page(store: RunStore) -> None:
    """Write the report. A failure leaves the run as it is, and stands in its log; `reward-kit report` tries again."""
    try:
        with boundary(StoreError, "the report"):
            write_report(store.path)
    except RewardKitError as error:
        logger.warning("no report: %s", error)


def _loaded(task: object, overrides: Mapping[str, Any]) -> LoadedTask:
    """A task, from its file or as it was made in Python."""
    if isinstance(task, RunnableTask):
        return task.load(overrides)
    return load_task(_path("task", task), overrides)


def _chosen(policies: object) -> tuple[tuple[str, ...], dict[str, LivePolicy]]:
    """Policies by their names, and those that are Python objects by their labels."""
    if isinstance(policies, Mapping):
        if wrong := [one for one in policies.values() if not is_live(one)]:
            raise ConfigError(f"policies: a dict has a label for each AgentPolicy; {kind_of(wrong[0])} is none")
        return (), {str(label): one for label, one in policies.items()}
    several = list(policies) if isinstance(policies, list | tuple) else [policies]
    live = [one for one in several if is_live(one)]
    return _several("policies", [one for one in several if not is_live(one)]), label_each(live)


def _path(name: str, given: object) -> Path:
    if not isinstance(given, str | Path):
        raise ConfigError(f"{name} is the path of a file, not {kind_of(given)}")
    return Path(given)


def _keys(name: str, given: object) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{name} is a dict of keys and values, not {kind_of(given)}")
    return dict(given or {})


def _several(name: str, given: object) -> tuple[str, ...]:
    several = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else (given,)
    if wrong := [one for one in several if not isinstance(one, str)]:
        raise ConfigError(f"{name} is a name or a list of names; {kind_of(wrong[0])} is none")
    return several
