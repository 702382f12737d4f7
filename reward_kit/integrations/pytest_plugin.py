"""Tasks and reward functions as tests of pytest: a threshold, a number of episodes, the report where a test fails.

It is loaded by who asks for it, `pytest -p reward_kit.integrations.pytest_plugin` or `pytest_plugins` in a
`conftest.py`, and costs other runs nothing. A test that is marked gets its run before its body, and is held to its
threshold after it:

    @pytest.mark.reward_kit("task.yaml", policies="expert", threshold=0.9, rollouts=4)
    def test_the_expert(reward_kit_run): ...
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from reward_kit.runs.finished import FinishedRun

MARK = "reward_kit"
_GATES: Mapping[str, Any] = {"threshold": None, "lower_bound": False, "max_errors": 0}
_OF_TASKS = (
    *("models", "policies", "rollouts", "limit", "sample_ids", "seed", "max_concurrency", "overrides", "base_url"),
)
_OF_REWARDS = ("data", "options", "overrides", "pass_threshold")
_MOST_SHOWN = 10  # episodes
_RUN = pytest.StashKey["FinishedRun"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("reward-kit")
    group.addoption(
        "--reward-kit-log-dir", metavar="DIR", help="where runs are kept; default: pytest's own temporary folder"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARK}(task, *, threshold, lower_bound, max_errors, …): run a task file before the test and hold its mean "
        "score to a threshold after it; with reward= and data= in place of a task, score transcripts",
    )


@pytest.fixture
def reward_kit_run(request: pytest.FixtureRequest) -> FinishedRun:
    """The run that the test's mark asks for, finished."""
    mark = request.node.get_closest_marker(MARK)
    if mark is None:
        pytest.fail(f"reward_kit_run is for tests with @pytest.mark.{MARK}(…)", pytrace=False)
    _check_gates(mark)
    run = _run_of(mark, request.path.parent, _log_dir(request))
    request.node.stash[_RUN] = run
    request.node.user_properties += [("reward_kit_run", str(run.path)), ("reward_kit_page", str(run.page))]
    return run


@pytest.fixture(autouse=True)
def _run_where_marked(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker(MARK) is not None:
        request.getfixturevalue("reward_kit_run")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    mark = item.get_closest_marker(MARK)
    if mark is not None and (run := item.stash.get(_RUN, None)) is not None:
        gates = {**_GATES, **mark.kwargs}
        if missed := list(_missed(run, gates["threshold"], gates["lower_bound"], gates["max_errors"])):
            pytest.fail(_printable("\n".join(missed)), pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.failed and (run := item.stash.get(_RUN, None)) is not None:
        report.sections.append(("reward-kit", _printable(_told(run))))
    return report


def _printable(text: str) -> str:
    from reward_kit.display_text import printable

    return printable(text)


def _log_dir(request: pytest.FixtureRequest) -> Path:
    asked = request.config.getoption("--reward-kit-log-dir")
    if asked is not None:
        return Path(request.config.invocation_params.dir, asked)
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    return factory.mktemp("reward_kit_runs")


def _check_gates(mark: pytest.Mark) -> None:
    """What is wrong with a gate is told before a run that may cost money."""
    gates = {**_GATES, **mark.kwargs}
    for name in ("threshold", "max_errors"):
        value = gates[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number and (name == "max_errors" or value is not None):
            pytest.fail(f"{MARK}({name}={value!r}): a finite number is asked for", pytrace=False)
    if gates["max_errors"] < 0:
        pytest.fail(f"{MARK}(max_errors={gates['max_errors']!r}): at least 0", pytrace=False)
    if not isinstance(gates["lower_bound"], bool):
        pytest.fail(f"{MARK}(lower_bound={gates['lower_bound']!r}): True or False", pytrace=False)
    if gates["lower_bound"] and gates["threshold"] is None:
        pytest.fail(f"{MARK}(lower_bound=True) has no effect without a threshold", pytrace=False)


def _run_of(mark: pytest.Mark, folder: Path, log_dir: Path) -> FinishedRun:
    """The run of a mark; paths are relative to the folder of the test."""
    from reward_kit.errors import RewardKitError

    try:
        given = _arguments(mark)
        if "task" in given:
            from reward_kit.runs.evaluation import evaluate

            return evaluate(folder / given.pop("task"), log_dir=log_dir, **given)
        from reward_kit.runs.evaluation import score_transcripts

        return score_transcripts(folder / given.pop("data"), folder=folder, log_dir=log_dir, **given)
    except RewardKitError as error:
        problem = _printable(str(error))
    pytest.fail(f"{MARK}: {problem}", pytrace=False)  # out here, so that the error is not told twice


def _arguments(mark: pytest.Mark) -> dict[str, Any]:
    """What a mark asks for, without its gates."""
    from reward_kit.errors import ConfigError, did_you_mean

    given = {name: value for name, value in mark.kwargs.items() if name not in _GATES}
    if len(mark.args) > 1 or (mark.args and "task" in given):
        raise ConfigError("one task file, and everything else by name")
    given |= {"task": mark.args[0]} if mark.args else {}
    if "task" in given and "reward" in given:
        raise ConfigError("name a task file, or reward= with data=, and not both")
    if "task" not in given and "reward" not in given:
        raise ConfigError('name a task file, or reward="file.py:function" and data="transcripts.jsonl"')
    known = ("task", *_OF_TASKS) if "task" in given else ("reward", *_OF_REWARDS)
    for name in given:
        if name not in known:
            raise ConfigError(f"no option {name!r}{did_you_mean(name, (*known, *_GATES))}")
    if "reward" in given and "data" not in given:
        raise ConfigError("reward= needs data=, a file whose rows have `messages`")
    return given


def _missed(run: FinishedRun, threshold: float | None, lower_bound: bool, max_errors: float) -> Iterator[str]:
    """The gates that a run does not pass, in words."""
    if run.why_stopped:
        yield f"the run stopped: {run.why_stopped}"
    if len(run.broken) > max_errors:
        yield f"{len(run.broken)} of {len(run.rows)} episodes broke and have no score; max_errors is {max_errors:g}"
    if threshold is None:
        return
    for policy in run.policies:
        interval = policy.score
        value = None if interval is None else interval.low if lower_bound else interval.mean
        what = "the lower bound of the mean score" if lower_bound else "the mean score"
        if value is None:
            yield f"{policy.policy}: {what} is not known, and threshold is {threshold:g}"
        elif value < threshold:
            yield f"{policy.policy}: {what} is {value:.3f}, below the threshold {threshold:g}"


def _told(run: FinishedRun) -> str:
    """What stands below a test that failed."""
    bad = [f"  {row.rollout_id}  broke: {row.score_error or row.error_class}" for row in run.broken]
    reasons = _reasons(run, {row.rollout_id for row in run.failed[:_MOST_SHOWN]})
    bad += [f"  {row.rollout_id}  {row.score:.3f}  {reasons.get(row.rollout_id, '')}".rstrip() for row in run.failed]
    more = [f"  … and {len(bad) - _MOST_SHOWN} more"] if len(bad) > _MOST_SHOWN else []
    episodes = ["episodes that broke or did not pass:", *bad[:_MOST_SHOWN], *more] if bad else []
    return "\n".join([str(run), *episodes, f"the report: {run.page}"])


def _reasons(run: FinishedRun, rollout_ids: set[str]) -> dict[str, str]:
    """What the reward said of these episodes."""
    told = {}
    for result in run.results():
        name, said = result.episode["rollout_id"], (result.score or {}).get("result") or {}
        if name in rollout_ids and said.get("reason"):
            told[name] = " ".join(str(said["reason"]).split())[:200]
    return told
