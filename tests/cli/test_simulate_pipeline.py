"""`reward-kit simulate-pipeline` as a user meets it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from reward_kit.cli.main import VERBS
from reward_kit.cli.simulate_pipeline import command
from reward_kit.errors import RewardKitError

SMALL = ("--batch", "8", "--group", "2", "--minibatch", "2", "--max-concurrency", "4", "--latency", "constant:3")
STAGES = ("--rollout", "8", "--update", "2", "--steps", "4")


class Done(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


def call(*arguments: str, **environment: str) -> Done:
    """The verb in this process; an error of ours as `main` shows it."""
    done = CliRunner(env=environment).invoke(command, arguments, auto_envvar_prefix="REWARD_KIT_SIMULATE_PIPELINE")
    if isinstance(done.exception, RewardKitError):
        return Done(done.exception.exit_code, done.stdout, f"error: {done.exception}")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Done(done.exit_code, done.stdout, done.stderr)


def rows(text: str) -> dict[str, list[str]]:
    """The cells of the table, by schedule."""
    found = (line.split() for line in text.splitlines() if re.match(r"  (sync|minibatch|one_step_off|both) +\d", line))
    return {cells[0]: [cell for cell in cells[1:] if cell != "s"] for cells in found}


def test_the_table_says_what_each_schedule_saves_and_costs() -> None:
    done = call(*SMALL, *STAGES)
    assert (done.exit_code, done.stderr) == (0, "")
    # Seconds a step, cut, idle, waits for rewards, age of the weights, how far slow groups come last.
    assert rows(done.stdout) == {
        "sync": ["28.0", "42.9%", "12.0", "0", "–"],
        "minibatch": ["22.0", "21.4%", "27.3%", "6.0", "0", "–"],
        "one_step_off": ["18.0", "35.7%", "11.1%", "2.0", "1", "–"],
        "both": ["16.0", "42.9%", "0.0%", "0.0", "1", "–"],
    }
    assert "no less than 16.0 s a step" in done.stdout
    assert "16 calls a step, 4 in flight, constant:3 (seed 0): mean 3.0 s" in done.stdout


def test_the_timeline_stands_below_with_its_legend() -> None:
    lines = call(*SMALL, *STAGES).stdout.splitlines()
    start = lines.index("steps 2 to 3, 0.514 s a character")
    machines = [line for line in lines[start:] if line.startswith("  machine  ")]
    assert len(machines) == 4 and max(map(len, machines)) == 120
    assert "·" in machines[0] and "·" not in machines[3]
    assert lines[-2].startswith("R rollout") and "█ all of max_concurrency" in lines[-1]


def test_a_machine_for_rollouts_has_its_column_and_its_row() -> None:
    done = call(*SMALL, *STAGES, "--separate-rollouts")
    assert rows(done.stdout)["sync"] == ["28.0", "71.4%", "12.0", "8.0", "0", "–"]
    assert "  rollouts RRRR" in done.stdout and "  rollouts " not in call(*SMALL, *STAGES).stdout


def test_json_holds_all_figures_and_what_gave_them() -> None:
    found = json.loads(call(*SMALL, *STAGES, "--seed", "7", "--json").stdout)
    assert found["settings"]["minibatch_size"] == 2 and found["settings"]["rollout_s"] == 8.0
    constant = dict.fromkeys(("mean_s", "p50_s", "p95_s", "max_s"), 3.0)
    assert found["latency"] == {"drawn_from": "constant:3", "seed": 7, **constant}
    assert found["lower_bound_s"] == 64.0
    assert list(found["schedules"]) == ["sync", "minibatch", "one_step_off", "both"]
    one_step_off = found["schedules"]["one_step_off"]
    assert one_step_off.pop("cut") == pytest.approx(1 - 72 / 112)
    assert one_step_off.pop("utilisation") == pytest.approx(64 / 72)
    assert one_step_off.pop("order_kept") == pytest.approx(1.0)
    assert one_step_off == {
        "makespan_s": 72.0,
        "step_s": 18.0,
        "idle_s": 8.0,
        "waits_for_rewards_s": 8.0,
        "waits_for_rollouts_s": 0.0,
        "staleness": 1,
        "latency_bias": None,
        "step_ends_s": [28.0, 44.0, 60.0, 72.0],
    }


def test_equal_seeds_show_equal_figures() -> None:
    first, again, other = (call("--steps", "4", "--seed", seed, "--json").stdout for seed in ("1", "1", "2"))
    assert first == again and json.loads(first)["schedules"] != json.loads(other)["schedules"]


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (("--publish", "5"), ["sync", "minibatch", "one_step_off", "both"]),
        (("--handling", "5"), ["sync", "minibatch", "one_step_off", "both"]),
        (("--log-probs", "5"), ["sync", "one_step_off", "both"]),  # in minibatch they hide behind the first rewards
        (("--log-probs", "2", "--log-probs-while-scoring"), ["one_step_off", "both"]),
        (("--rollout", "1", "--one-batch-at-a-time"), ["sync", "minibatch", "one_step_off", "both"]),
    ],
)
def test_each_option_reaches_the_simulation(flags: tuple[str, ...], changed: list[str]) -> None:
    before, after = (json.loads(call(*SMALL, *STAGES, *more, "--json").stdout)["schedules"] for more in ((), flags))
    assert [name for name in before if before[name]["makespan_s"] != after[name]["makespan_s"]] == changed


def test_latencies_come_from_the_scores_of_a_run(tmp_path: Path) -> None:
    lines = [{"rollout_id": f"r{n}", "timing": {"duration_s": 2.5}} for n in range(3)]
    (tmp_path / "scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = call(*STAGES, "--latency", f"file:{tmp_path / 'scores.jsonl'}")
    assert "empirical, from 3 measured calls (seed 0): mean 2.5 s" in done.stdout


def test_options_come_from_the_environment_too() -> None:
    found = json.loads(call("--json", REWARD_KIT_SIMULATE_PIPELINE_STEPS="3").stdout)
    assert found["settings"]["steps"] == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--rolout", "3"), "No such option.*--rolout.*--rollout"),
        (("--rollout", "-3"), "-3.0 is not in the range x>=0"),
        (("--rollout", "much"), "'much' is not a valid number"),
        (("--update", "nan"), "'nan' is not a finite number"),
        (("--max-concurrency", "0"), "0 is not in the range x>=1"),
        (("--minibatch", "10"), "a batch of 64 samples cannot be cut into mini-batches of 10"),
        (("--latency", "gauss:1:2"), "latency 'gauss:1:2': no kind 'gauss'; known: constant, exponential, file"),
        (("--latency", "uniform:9"), "latency uniform is written uniform:LOW:HIGH"),
        (("--latency", "file:nowhere.jsonl"), "nowhere.jsonl: No such file"),
        (("--steps", "1000000"), "give fewer steps"),
    ],
)
def test_what_cannot_be_is_answered_with_one_clear_error(arguments: tuple[str, ...], told: str) -> None:
    done = call(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if line.lower().startswith("error: ")]
    assert re.search(told.replace("(", r"\("), line)


def shown_on_terminal(columns: int, *arguments: str) -> str:
    """What the program writes on a terminal of this width, without its colours."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (50, columns))
    program = [sys.executable, "-m", "reward_kit.cli.main", "simulate-pipeline", *arguments]
    given = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(program, stdin=its, stdout=its, env={**given, "TERM": "xterm", "PYTHONUTF8": "1"}) as running:
        os.close(its)
        written = b""
        with contextlib.suppress(OSError):  # how a terminal whose other end is closed says so
            while read := os.read(ours, 65536):
                written += read
    os.close(ours)
    assert running.returncode == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", written.decode()).replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [100, 40, 15])
def test_a_narrow_terminal_is_given_lines_in_place_of_a_table(columns: int) -> None:
    text = shown_on_terminal(columns, *SMALL, *STAGES)
    drawn = text[text.index("steps 2 to 3") : text.index("R rollout")]
    assert max(map(len, drawn.splitlines()[1:])) == max(columns, 21)
    assert bool(rows(text)) == (columns == 100)
    told = " ".join(text.split())
    assert ("one_step_off: 18.0 s a step, 35.7% less than sync, idle 11.1%, weights' age 1" in told) == (columns < 84)


def test_the_verb_is_listed() -> None:
    assert "simulate-pipeline" in VERBS
