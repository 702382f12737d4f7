"""Test that the GPU campaign survives kill -9, time limits and incomplete lines, with stages that take no time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_campaign.campaign import STAGES, append_result, parse, read_results

ROOT = Path(__file__).parents[2]
SCRIPT = '''
"""The campaign with these stages instead of its own."""
import os, signal, sys, time
from types import ModuleType
sys.path.insert(0, {root!r})
from benchmarks.gpu_campaign import campaign
from benchmarks.gpu_campaign.context import SkipStageError

def environment(context):
    context.record(cores=2.000001)
    context.skip_part("vllm", "not installed")

def losses(context):
    context.record(error=0.5)
    context.check(False, "the loss | differs")

def engine(context):
    raise SkipStageError("no engine here")

def ppo_step(context):
    context.record(before=1)
    with open({folder!r} + "/started", "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    while os.path.exists({folder!r} + "/wait"):
        time.sleep(0.02)
    context.record(after=2)

def fsdp2(context):
    raise ValueError("broken\\nsecond line")

stages = ModuleType("benchmarks.gpu_campaign.small")
stages.__dict__.update(environment=environment, losses=losses, engine=engine, ppo_step=ppo_step, fsdp2=fsdp2)
sys.modules[stages.__name__] = stages
campaign.STAGES = {{
    name: campaign.Stage("small", 30, {limit}, name) for name in stages.__dict__ if name in campaign.STAGES
}}
campaign.__file__ = __file__
options = campaign.parse()
if options.run:
    campaign.run_in_this_process(options)
else:
    sys.exit(campaign.run(options))
'''


class Campaign:
    """A campaign of five small stages in a folder."""

    def __init__(self, folder: Path, limit: float = 30.0) -> None:
        self.folder, self.out = folder, folder / "out"
        self.script = folder / "small_campaign.py"
        self.script.write_text(SCRIPT.format(root=str(ROOT), folder=str(folder), limit=limit))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.script), "--device", "cpu", "--size", "tiny", "--out", str(self.out)]
        return subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        text, _ = process.communicate(timeout=60)
        return process.returncode, text

    def wait_for_stage(self) -> int:
        """Wait until `ppo_step` runs, and return its process id."""
        started = self.folder / "started"
        until(lambda: started.is_file() and started.read_text().endswith("\n"))
        return int(started.read_text().split()[-1])

    @property
    def verdicts(self) -> dict[str, str]:
        return {one["stage"]: one["verdict"] for one in read_results(self.out)}

    def result(self, stage: str) -> dict[str, Any]:
        return next(one for one in reversed(read_results(self.out)) if one["stage"] == stage)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened within a minute"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


COMPLETE = {"environment": "pass", "losses": "fail", "engine": "skip", "ppo_step": "pass", "fsdp2": "error"}


def test_every_verdict_is_recorded_with_its_reason(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    code, text = campaign.run()
    assert code == 1, text
    assert campaign.verdicts == COMPLETE
    first = campaign.result("environment")
    assert first["figures"] == {"cores": 2.0}
    assert first["skipped"] == ["vllm: not installed"]
    assert {"device": "cpu", "size": "tiny"}.items() <= first.items()
    assert first["commit"] and first["seconds"] > 0
    assert campaign.result("losses")["reason"] == "the loss | differs"
    assert campaign.result("engine")["reason"] == "no engine here"
    assert campaign.result("fsdp2")["reason"].startswith("ValueError: broken")
    assert "| `losses` | fail |" in text
    assert "the loss \\| differs" in text
    assert (campaign.out / "report.md").read_text() in text


def test_rerun_skips_stages_with_a_verdict_unless_they_are_repeated(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    assert campaign.run("--stages", "engine", "ppo_step")[0] == 0
    first = campaign.wait_for_stage()
    assert campaign.run("--stages", "engine", "ppo_step")[0] == 0
    assert campaign.wait_for_stage() == first
    assert campaign.run("--stages", "engine", "ppo_step", "--again", "ppo_step")[0] == 0
    assert campaign.wait_for_stage() != first
    assert [one["stage"] for one in read_results(campaign.out)] == ["engine", "ppo_step", "ppo_step"]


def test_killed_runner_takes_its_stage_along_and_the_next_run_continues(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    (tmp_path / "wait").touch()
    runner = campaign.start()
    stage = campaign.wait_for_stage()
    runner.send_signal(signal.SIGKILL)
    runner.communicate(timeout=60)
    until(lambda: not is_running(stage))
    assert "ppo_step" not in campaign.verdicts
    (tmp_path / "wait").unlink()
    assert campaign.run()[0] == 1
    assert campaign.verdicts == COMPLETE
    assert campaign.wait_for_stage() != stage


def test_killed_stage_is_an_error_with_its_figures_and_later_stages_run(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    (tmp_path / "wait").touch()
    runner = campaign.start()
    os.kill(campaign.wait_for_stage(), signal.SIGKILL)
    runner.communicate(timeout=60)
    assert campaign.verdicts == {**COMPLETE, "ppo_step": "error"}
    killed = campaign.result("ppo_step")
    assert "killed by SIGKILL" in killed["reason"]
    assert killed["figures"] == {"before": 1}


def test_stage_beyond_its_limit_is_a_timeout_with_its_figures(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, limit=3.0)
    (tmp_path / "wait").touch()
    assert campaign.run("--stages", "ppo_step")[0] == 1
    late = campaign.result("ppo_step")
    assert (late["verdict"], late["figures"]) == ("timeout", {"before": 1})
    until(lambda: not is_running(campaign.wait_for_stage()))


def test_stages_beyond_the_budget_are_named_and_have_no_verdict(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    code, text = campaign.run("--budget", "0.001")
    assert code == 1
    assert campaign.verdicts == {}
    assert "not run, because the budget of 0 s is used up: environment, losses, engine, ppo_step, fsdp2" in text


def test_incomplete_last_line_is_ignored_and_replaced(tmp_path: Path) -> None:
    append_result(tmp_path, {"stage": "engine", "verdict": "pass"})
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"stage": "los')
    assert [one["stage"] for one in read_results(tmp_path)] == ["engine"]
    append_result(tmp_path, {"stage": "losses", "verdict": "fail"})
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["stage"] for line in lines] == ["engine", "losses"]


def test_missing_device_stops_the_campaign(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ended = subprocess.run(
        [sys.executable, "benchmarks/gpu_campaign/campaign.py", "--device", "cuda", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 2
    assert "the device 'cuda' cannot be used" in ended.stderr
    (only,) = read_results(tmp_path)
    assert "finds no GPU" in only["reason"]


def test_unknown_stage_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--stages", "engines"])
    assert "invalid choice: 'engines'" in capsys.readouterr().err


def test_every_stage_has_a_function_and_fits_into_one_command() -> None:
    for name, stage in STAGES.items():
        text = (ROOT / "benchmarks" / "gpu_campaign" / f"{stage.module}.py").read_text()
        assert f"\ndef {name}(context: StageContext) -> None:" in text
        assert stage.full_s <= 480
