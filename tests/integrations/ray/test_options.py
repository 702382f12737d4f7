"""Test validation of engine options and the payload of workers; does not need Ray."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest

from reward_kit.agent.limits import ActionUsage
from reward_kit.cli.main import program
from reward_kit.errors import ConfigError
from reward_kit.integrations.ray.actors import ActorBudget, EpisodesUsage, RunUsage
from reward_kit.integrations.ray.engine import TaskWorkers, divide_rates, environment_for, max_processes, moved
from reward_kit.integrations.ray.options import RayOptions
from reward_kit.task_parts import RunLimitsModel
from tests.integrations.ray.counting_task import CountingTask


def refused(*arguments: str) -> str:
    with pytest.raises((ConfigError, click.UsageError)) as caught:
        program(arguments, prog_name="reward-kit", auto_envvar_prefix="REWARD_KIT", standalone_mode=False)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.fixture
def task(tmp_path: Path) -> str:
    CountingTask(tmp_path)
    return str(tmp_path / "task.yaml")


class TestFlags:
    @pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
    def test_missing_ray_is_reported_with_the_extra(self, task: str) -> None:
        message = refused("run", task, "--engine", "ray")
        assert "No module named 'ray'" in message and "/reward-kit[ray]'" in message

    @pytest.mark.parametrize(
        ("flags", "expected"),
        [
            (["--address", "auto"], "--address requires --engine ray"),
            (["-E", "workers=2"], "-E requires --engine ray"),
            (["--engine", "ray", "--record", "r"], "--record requires --engine local"),
            (["--engine", "ray", "--replay", "r"], "--replay requires --engine local"),
            (["--engine", "ray", "-E", "worker=2"], "-E worker: unknown key; did you mean 'workers'?"),
            (["--engine", "ray", "-E", "workers=0"], "-E workers: must be 1 or more (got 0)"),
            (["--engine", "ray", "-E", "cpus=none"], "-E cpus: expected a number"),
            (["--engine", "ray", "-E", "address=auto"], "-E address: use --address"),
            (["--engine", "ray", "-E", "workers"], "-E 'workers': write key=value"),
            (["--engine", "ray", "--policy", "human"], "a cluster cannot prompt the person at this terminal"),
        ],
    )
    def test_ineffective_and_invalid_engine_options_are_rejected(
        self, task: str, flags: list[str], expected: str
    ) -> None:
        assert expected in refused("run", task, *flags)

    def test_engine_options_can_be_set_by_environment_variables(
        self, task: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("REWARD_KIT_RUN_ENGINE", "ray")
        monkeypatch.setenv("REWARD_KIT_RUN_ENGINE_OPTION", "gpu=1")
        assert "-E gpu: unknown key; did you mean 'gpus'?" in refused("run", task)

    def test_env_option_accepts_a_name_or_a_list(self) -> None:
        assert RayOptions.of({"env": "A"}).env == ("A",)
        assert RayOptions.of({"env": ["A", "B"]}, "auto").env == ("A", "B")


class TestRates:
    LIMITED = {"type": "openai", "model": "m", "requests_per_minute": 60, "max_connections": 9}  # noqa: RUF012

    def definition(self, tmp_path: Path, **keys: Any) -> Any:
        return CountingTask(tmp_path, policy=self.LIMITED, **keys).loaded().definition

    def test_rates_are_divided_among_processes(self, tmp_path: Path) -> None:
        shared = divide_rates(self.definition(tmp_path), 4).policy
        assert shared is not None
        assert shared.options() == {"model": "m", "requests_per_minute": 15.0, "max_connections": 2}

    def test_more_workers_than_connections_are_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"policy\.max_connections 9 cannot be shared by 10 workers.*-E workers=9"
        ):
            divide_rates(self.definition(tmp_path), 10)

    def test_definition_without_rates_is_unchanged(self, tmp_path: Path) -> None:
        definition = CountingTask(tmp_path).loaded().definition
        assert divide_rates(definition, 4) is definition

    def test_default_workers_do_not_exceed_connections(self, tmp_path: Path) -> None:
        user = {"type": "openai", "model": "u", "instructions": "ask", "max_connections": 3}
        assert max_processes(self.definition(tmp_path)) == 9
        assert max_processes(self.definition(tmp_path, user=user)) == 3
        assert max_processes(CountingTask(tmp_path).loaded().definition) > 10**9


class TestBudget:
    LIMITS = RunLimitsModel(total_tokens=100, wall_time_s=1000)

    def test_budget_counts_own_usage_at_once_and_others_when_reported(self) -> None:
        budget = ActorBudget(self.LIMITS)
        budget.spend(ActionUsage(30, 0.5), steps=1)
        budget.hear(RunUsage(EpisodesUsage(60, 1.0, 7), 5.0))
        assert (budget.tokens, budget.cost, budget.steps) == (90, 1.5, 8)
        assert budget.own == EpisodesUsage(30, 0.5, 1)
        assert budget.exhausted() is None
        budget.hear(RunUsage(EpisodesUsage(60, 1.0, 7), 5.0))  # told once more, it is not counted twice
        assert budget.tokens == 90
        budget.spend(ActionUsage(10), steps=1)
        assert (exhausted := budget.exhausted()) is not None and exhausted.key == "total_tokens"

    def test_budget_uses_the_clock_of_the_run(self) -> None:
        budget = ActorBudget(self.LIMITS)
        budget.hear(RunUsage(EpisodesUsage(), 999.0))
        assert budget.exhausted() is None
        budget.hear(RunUsage(EpisodesUsage(), 1000.0))
        assert (exhausted := budget.exhausted()) is not None and exhausted.key == "wall_time_s"
        assert 1000.0 <= budget.seconds <= 1000.0 + time.monotonic()


class TestWorkerPayload:
    def test_shipped_task_refers_to_its_new_folder(self, tmp_path: Path) -> None:
        task = CountingTask(tmp_path / "old").loaded()
        there = moved(task, tmp_path / "new")
        assert there.path == tmp_path / "new" / "task.yaml" and there.folder == tmp_path / "new"
        assert there.definition.resource_type == f"{tmp_path / 'new' / 'world.py'}:Tally"
        assert there.inputs["policy"] == tmp_path / "new" / "mine.py"
        assert task.definition.resource_type == f"{tmp_path / 'old' / 'world.py'}:Tally", "the original is untouched"

    def test_worker_payload_omits_samples_and_reward(self, tmp_path: Path) -> None:
        counting = CountingTask(tmp_path)
        build = TaskWorkers.of(counting.loaded(), counting.request(), 2)
        assert (build.task.samples, build.task.reward, build.task.tools) == ((), None, None)

    def test_a_missing_folder_is_reported_with_the_fix(self, tmp_path: Path) -> None:
        counting = CountingTask(tmp_path / "here")
        build = TaskWorkers.of(moved(counting.loaded(), tmp_path / "nowhere"), counting.request(), 1)
        with pytest.raises(ConfigError, match=r"nowhere does not exist on .*ship it with -E ship=true"):
            build(None, None)  # type: ignore[arg-type]

    def test_worker_environment_contains_endpoint_task_and_requested_variables(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy = {"type": "openai", "model": "m", "api_key_env": "MY_KEY"}
        definition = CountingTask(tmp_path, policy=policy).loaded().definition
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("ANTHROPIC_API_KEY", "a")
        of_provider = CountingTask(tmp_path, policy={"type": "anthropic", "model": "m"}).loaded().definition
        assert environment_for(of_provider, []).get("ANTHROPIC_API_KEY") == "a"
        (tmp_path / ".env").write_text("MY_KEY=from-a-file\nOTHER=unasked\n")
        for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OTHER", "MY_KEY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_TOKEN", "h")
        assert environment_for(definition, ["HF_TOKEN"]) == {"MY_KEY": "from-a-file", "HF_TOKEN": "h"}
        with pytest.raises(ConfigError, match="-E env: the variable NOT_SET_ANYWHERE is not set here"):
            environment_for(definition, ["NOT_SET_ANYWHERE"])

    def test_worker_environment_keeps_key_origin_rules(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        definition = CountingTask(tmp_path, policy={"type": "openai", "model": "m"}).loaded().definition
        monkeypatch.chdir(tmp_path)
        url = "http://127.0.0.1:9/v1"
        (tmp_path / ".env").write_text(f"OPENAI_BASE_URL={url}\nREWARD_KIT_KEY_ORIGINS=OPENAI_API_KEY={url}\n")
        monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
        monkeypatch.delenv("REWARD_KIT_KEY_ORIGINS", raising=False)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        assert environment_for(definition, []) == {"OPENAI_BASE_URL": url}
        with (tmp_path / ".env").open("a") as file:
            file.write("OPENAI_API_KEY=its-own\n")
        assert environment_for(definition, []) == {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "its-own"}
        monkeypatch.setenv("REWARD_KIT_KEY_ORIGINS", f"OPENAI_API_KEY={url}")
        assert environment_for(definition, [])["OPENAI_API_KEY"] == "k"
