"""A pytest plugin that runs tasks and reward functions as tests with score thresholds.

pytest loads the plugin if the package is installed. The task of a marked test runs before the body of the test, and the
threshold is checked afterwards. If the test fails, the report shows the scores and the failed episodes:

    @pytest.mark.reward_kit("task.yaml", policies="expert", threshold=0.9, rollouts=4)
    def test_the_expert(reward_kit_run): ...
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# The first marked test imports the package, so other test runs are not slowed down.
if TYPE_CHECKING:
    from reward_kit.runs.finished import FinishedRun

MARK = "reward_kit"
_GATES: Mapping[str, Any] = {"threshold": None, "thresholds": {}, "lower_bound": False, "max_errors": 0}
_OF_TASKS = (
    *("models", "policies", "rollouts", "limit", "sample_ids", "seed", "max_concurrency", "overrides", "base_url"),
)
_OF_REWARDS = ("data", "options", "overrides", "pass_threshold")
_MOST_SHOWN = 10  # episodes
_SCORE = "reward_kit_score:"
_RUN = pytest.StashKey["FinishedRun"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("reward-kit")
    group.addoption(
        "--reward-kit-log-dir",
        metavar="DIR",
        help="directory for the runs (default: pytest's temporary directory)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARK}(task, *, threshold, thresholds, lower_bound, max_errors, …): run a task file before the test and "
        "check the mean scores of the task afterwards; with reward= and data= instead of a task, score transcripts",
    )


@pytest.fixture
def reward_kit_run(request: pytest.FixtureRequest) -> FinishedRun:
    """The finished run of the task named in the test's mark."""
    from reward_kit.errors import RewardKitError
    from reward_kit.runs.evaluation import evaluate, score_transcripts

    mark = request.node.get_closest_marker(MARK)
    if mark is None:
        pytest.fail(f"reward_kit_run can only be used in tests with @pytest.mark.{MARK}(…)", pytrace=False)
    if problem := _problem_with_gates({**_GATES, **mark.kwargs}):
        pytest.fail(f"{MARK}({problem}", pytrace=False)
    folder, asked = request.path.parent, request.config.getoption("--reward-kit-log-dir")
    if asked is not None:
        log_dir = Path(request.config.invocation_params.dir, asked)
    else:
        log_dir = request.getfixturevalue("tmp_path_factory").mktemp("reward_kit_runs")
    problem = ""
    try:
        arguments = _run_arguments(mark)
        if "task" in arguments:
            _check_metrics(folder / arguments["task"], arguments.get("overrides"), mark.kwargs.get("thresholds", {}))
            run = evaluate(folder / arguments.pop("task"), log_dir=log_dir, **arguments)
        else:
            run = score_transcripts(folder / arguments.pop("data"), folder=folder, log_dir=log_dir, **arguments)
    except RewardKitError as error:
        problem = _printable(str(error))
    if problem:  # This is outside the handler, so pytest reports the error only once.
        pytest.fail(f"{MARK}: {problem}", pytrace=False)
    request.node.stash[_RUN] = run
    request.node.user_properties += _properties(run)
    return run


def pytest_itemcollected(item: pytest.Item) -> None:
    names = getattr(item, "fixturenames", None)
    if names is not None and "reward_kit_run" not in names and item.get_closest_marker(MARK) is not None:
        names.append("reward_kit_run")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    mark, run = item.get_closest_marker(MARK), item.stash.get(_RUN, None)
    missed = list(_missed_gates(run, {**_GATES, **mark.kwargs})) if mark is not None and run is not None else []
    if missed:
        pytest.fail(_printable("\n".join(missed)), pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed and (run := item.stash.get(_RUN, None)) is not None:
        report.sections.append(("reward-kit", _printable(_summary(run))))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the scores of all marked tests, including the tests that passed."""
    reports = (report for key in ("passed", "failed") for report in terminalreporter.stats.get(key, ()))
    called = ((report.nodeid, dict(report.user_properties)) for report in reports if report.when == "call")
    shown = sorted(((nodeid, facts) for nodeid, facts in called if "reward_kit_run" in facts), key=itemgetter(0))
    if shown:
        terminalreporter.section("reward-kit")
    for nodeid, facts in shown:
        terminalreporter.write_line(nodeid)
        for name, text in facts.items():
            if name.startswith(_SCORE):
                terminalreporter.write_line(_printable(f"  {name.removeprefix(_SCORE)}: {text}"))
        terminalreporter.write_line(f"  {facts['reward_kit_page']}")


def _properties(run: FinishedRun) -> list[tuple[str, str]]:
    """Return the properties that `--junitxml` writes and that the terminal summary shows."""
    from reward_kit.display_text import pluralize
    from reward_kit.runs.display import interval_text

    properties = [("reward_kit_run", str(run.path)), ("reward_kit_page", str(run.page))]
    for policy in run.policies:
        texts = [f"mean score {interval_text(policy.score)}"]
        if policy.pass_at_1 is not None:
            texts.append(f"pass@1 {policy.pass_at_1:.1%}")
        texts.append(pluralize(policy.episodes, "episode"))
        if errors := sum(policy.errors.values()):
            texts.append(pluralize(errors, "error"))
        properties.append((f"{_SCORE}{policy.policy}", ", ".join(texts)))
        if policy.score is not None:
            properties.append((f"reward_kit_mean:{policy.policy}", f"{policy.score.mean:.6g}"))
        for name, metric in policy.metrics.items():
            if metric is not None:
                properties.append((f"reward_kit_metric:{policy.policy}:{_printable(name)}", f"{metric.mean:.6g}"))
    return properties


def _printable(text: str) -> str:
    from reward_kit.display_text import printable

    return printable(text)


def _problem_with_gates(gates: Mapping[str, Any]) -> str:
    """Return a description of an invalid gate, or "" if all gates are valid.

    This function is called before the run, because the run may cost money.
    """
    thresholds = gates["thresholds"]
    if not isinstance(thresholds, Mapping) or not all(isinstance(name, str) for name in thresholds):
        return f"thresholds={thresholds!r}): expected a dict that maps the names of metrics to numbers"
    named = {f"thresholds={{{name!r}: …}}": value for name, value in thresholds.items()}
    for name, value in {"threshold": gates["threshold"], "max_errors": gates["max_errors"], **named}.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number and (name != "threshold" or value is not None):
            shown = f"{name}={value!r}" if name in gates else name.replace("…", repr(value))
            return f"{shown}): expected a finite number"
    if gates["max_errors"] < 0:
        return f"max_errors={gates['max_errors']!r}): must be at least 0"
    if not isinstance(gates["lower_bound"], bool):
        return f"lower_bound={gates['lower_bound']!r}): must be True or False"
    if gates["lower_bound"] and gates["threshold"] is None and not thresholds:
        return "lower_bound=True) has no effect without a threshold"
    return ""


def _check_metrics(task: Path, overrides: Mapping[str, Any] | None, metrics: Iterable[str]) -> None:
    """Raise a ConfigError if it is clear before the run that no reward returns one of the metrics."""
    from reward_kit.errors import ConfigError
    from reward_kit.runs.summary import Threshold
    from reward_kit.runs.task_file import LocatedYaml, parse_task

    if not metrics:
        return
    definition = parse_task(LocatedYaml(task), overrides)
    for metric in metrics:
        if unknown := Threshold(0.0, metric).unknown_reward(definition):
            raise ConfigError(f"thresholds: {unknown}")


def _run_arguments(mark: pytest.Mark) -> dict[str, Any]:
    """Return the mark's arguments that are passed to the run. The gates are not included."""
    from reward_kit.errors import ConfigError, did_you_mean

    given = {name: value for name, value in mark.kwargs.items() if name not in _GATES}
    if len(mark.args) > 1 or (mark.args and "task" in given):
        raise ConfigError("pass one task file as the positional argument, and all other arguments by name")
    given |= {"task": mark.args[0]} if mark.args else {}
    if "task" in given and "reward" in given:
        raise ConfigError("pass either a task file, or reward= with data=")
    if "task" not in given and "reward" not in given:
        raise ConfigError('pass a task file, or reward="file.py:function" and data="transcripts.jsonl"')
    known = ("task", *_OF_TASKS) if "task" in given else ("reward", *_OF_REWARDS)
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}{did_you_mean(name, (*known, *_GATES))}")
    if "reward" in given and "data" not in given:
        raise ConfigError("reward= requires data=, a file whose rows have `messages`")
    return given


def _missed_gates(run: FinishedRun, gates: Mapping[str, Any]) -> Iterator[str]:
    from reward_kit.runs.summary import Threshold

    if run.why_stopped:
        yield f"the run stopped: {run.why_stopped}"
    if len(run.errors) > gates["max_errors"]:
        broken = f"{len(run.errors)} of {len(run.rows)} episodes ended with an error and have no score"
        yield f"{broken}; max_errors is {gates['max_errors']:g}"
    named = {None: gates["threshold"]} if gates["threshold"] is not None else {}
    for metric, least in {**named, **gates["thresholds"]}.items():
        threshold = Threshold(least, metric, gates["lower_bound"])
        if unknown := threshold.unknown_metric(run.policies):
            yield unknown
            continue
        for policy in run.policies:
            value = threshold.value(policy)
            if value is None:
                yield f"{policy.policy}: the {threshold.what} is unknown; the threshold is {least:g}"
            elif value < least:
                yield f"{policy.policy}: the {threshold.what} is {value:.3f}, below the threshold {least:g}"


def _summary(run: FinishedRun) -> str:
    """Return a failed test's report section: the scores, the failed episodes and the path of the report page."""
    shown = {row.rollout_id for row in run.failed[:_MOST_SHOWN]}
    reasons = {}
    for result in run.results():
        rollout_id, score = result.episode["rollout_id"], (result.score or {}).get("result") or {}
        if rollout_id in shown and score.get("reason"):
            reasons[rollout_id] = " ".join(str(score["reason"]).split())[:200]
    bad = [f"  {row.rollout_id}  error: {row.score_error or row.error_class}" for row in run.errors]
    bad += [f"  {row.rollout_id}  {row.score:.3f}  {reasons.get(row.rollout_id, '')}".rstrip() for row in run.failed]
    more = [f"  … and {len(bad) - _MOST_SHOWN} more"] if len(bad) > _MOST_SHOWN else []
    episodes = ["episodes that failed or ended with an error:", *bad[:_MOST_SHOWN], *more] if bad else []
    return "\n".join([str(run), *episodes, f"the report: {run.page}"])
