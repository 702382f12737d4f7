"""Test `reward-kit serve`: output, validation, shutdown, and scores equal to the command line's."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from reward_kit.cli.main import program
from reward_kit.errors import ConfigError
from reward_kit.integrations.reward_server.server import load_named_rewards
from reward_kit.models import Message
from reward_kit.reward_agent import AsyncRewardAgent, ScoringRequest, load_reward
from reward_kit.reward_agent.loading import SandboxChoice, make_scorer
from reward_kit.reward_agent.remote import KEY_VARIABLE
from tests.integrations.reward_server.running_server import KEY, ROLLOUT
from tests.integrations.reward_server.serve_process import REWARDS, environment, serve
from tests.integrations.reward_server.test_hostile_rewards import CANNOT


def refused(*arguments: str) -> str:
    """Return the error message before the command exits with 2."""
    with pytest.raises((ConfigError, click.UsageError)) as caught:
        program(("serve", *arguments), prog_name="reward-kit", auto_envvar_prefix="REWARD_KIT", standalone_mode=False)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.skipif(CANNOT != "", reason=CANNOT)
def test_served_rewards_are_sandboxed_and_score_as_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with serve(tmp_path, "rewards.py:exact", "group=rewards.py:longest") as running:
        url = f"{running.asker.address}/v1/rewards"
        requests = [
            ScoringRequest(f"r{n}", [Message(role="assistant", content="x" * n)], ground_truth="xx") for n in range(4)
        ]

        async def scored(reference: str, size: int) -> list[object]:
            reward = load_reward(reference, tmp_path).reward
            async with AsyncRewardAgent(make_scorer(reward)) as agent:
                infos = (await agent.get(4, ticket=await agent.submit(requests, size))).extra_infos
            return [(one.rollout_id, one.result, one.failure, one.sandbox) for one in infos]

        for name, reference, size in (("exact", "rewards.py:exact", 1), ("group", "rewards.py:longest", 2)):
            there, here = (asyncio.run(scored(one, size)) for one in (f"{url}/{name}", reference))
            assert there == here
            assert {dict(one[3])["level"] for one in here} == {"warm"}  # type: ignore[index]
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=60) == 0
        output = running.said.read_text()
    assert "exact: pointwise, POST http://127.0.0.1:" in output and "group: batch, POST" in output
    assert f'-H "Authorization: Bearer ${KEY_VARIABLE}"' in output
    assert KEY not in output and "warning" not in output and "Traceback" not in output


def test_generated_key_and_printed_example_work(tmp_path: Path) -> None:
    arguments = ("rewards.py:exact", "--sandbox", "in_process", "--host", "0.0.0.0", "-vv")
    with serve(tmp_path, *arguments, REWARD_KIT_SERVE_API_KEY="") as running:
        (key,) = re.findall(rf"export {KEY_VARIABLE}=(\S+)", running.said.read_text())
        (body,) = re.findall(r"-d '(\{.*\})'", running.said.read_text())

        async def ask() -> tuple[object, int]:
            path = "/v1/rewards/exact/score"
            answer = await running.asker.post(path, json.loads(body), key)
            return answer.json()["score"], (await running.asker.post(path, ROLLOUT)).status

        assert asyncio.run(ask()) == (1.0, 401)
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=60) == 0
        output = running.said.read_text()
    assert len(key) >= 43 and output.count(key) == 1  # where it is shown, and in no line of the log
    assert "POST route=score reward=exact status=200 key=1" in output
    assert "warning: 0.0.0.0 can be reached from other machines, and HTTP is not encrypted" in output


def test_lowered_limit_lowers_dependent_limits(tmp_path: Path) -> None:
    limits = ("--max-pending", "2", "--max-held-mb", "0.5", "--head-timeout", "0.2")
    with serve(tmp_path, "rewards.py:exact", "--sandbox", "in_process", *limits) as running:

        async def ask() -> tuple[int, str, str, bytes]:
            about = (await running.asker.get("/v1/rewards/exact")).json()
            batch = await running.asker.post("/v1/rewards/exact/score_batch", {"rollouts": [ROLLOUT] * 3})
            large = await running.asker.score("exact", {"messages": [], "sample": {"x": "x" * 600_000}})
            reader, writer = await asyncio.open_connection("127.0.0.1", running.asker.port)
            said = await reader.read()  # it hangs up on who says nothing
            writer.close()
            return about["max_batch"], batch.message, large.message, said

        most, batch, large, said = asyncio.run(ask())
    assert (most, said) == (2, b"")
    assert batch == "rollouts: the request has 3 rollouts; the maximum is 2 (max_batch)"
    assert large == "the body exceeds the limit of 0.5 MiB (max_body_mb)"


def test_every_key_of_the_file_is_accepted_and_readable_files_warn(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("# for the trainer\nthe-key-of-the-trainer\n\nthe-key-of-the-checker\n")
    file.chmod(0o640)
    arguments = ("rewards.py:exact", "--sandbox", "in_process", "--api-key-file", "keys.txt")
    with serve(tmp_path, *arguments) as running:
        keys = ("the-key-of-the-trainer", "the-key-of-the-checker", KEY, "# for the trainer")
        statuses = [asyncio.run(running.asker.get("/v1/rewards", key)).status for key in keys]
        assert statuses == [200, 200, 401, 401]
        assert (
            "warning: keys.txt can be read by other users of this machine; run chmod 600 keys.txt"
            in running.said.read_text()
        )


class TestRejected:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("REWARD_KIT_SERVE_API_KEY", KEY)
        (tmp_path / "rewards.py").write_text(REWARDS)

    def test_invalid_keys_are_rejected(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "keys.txt").write_text("good-enough-to-be-a-key\nshort\n")
        message = refused("rewards.py:exact", "--api-key-file", "keys.txt")
        assert message.startswith("--api-key-file keys.txt:2: the key has 5 characters")
        (tmp_path / "keys.txt").write_text("# none\n")
        assert "contains no key" in refused("rewards.py:exact", "--api-key-file", "keys.txt")
        assert "No such file" in refused("rewards.py:exact", "--api-key-file", "nosuch.txt")
        monkeypatch.setenv("REWARD_KIT_SERVE_API_KEY", "hunter2")
        message = refused("rewards.py:exact")
        assert message.startswith("REWARD_KIT_SERVE_API_KEY has 7 characters") and "hunter2" not in message

    def test_invalid_rewards_are_rejected(self) -> None:
        here = ("--sandbox", "in_process")
        assert "two rewards are named 'exact'; pass NAME=" in refused("rewards.py:exact", "rewards.py:exact", *here)
        assert "is already served" in refused("http://127.0.0.1:1/v1/rewards/x")
        assert "rewards.py has no 'exakt'; did you mean 'exact'?" in refused("rewards.py:exakt", *here)
        assert refused() == "Missing parameter: rewards"

    def test_invalid_limits_are_rejected(self) -> None:
        message = refused("rewards.py:exact", "--max-batch", "9999")
        assert message == "--max-batch must be at most --max-pending (4096); increase both limits"
        message = refused("rewards.py:exact", "--max-held-mb", "1", "--max-body-mb", "2")
        assert message == "--max-body-mb must be at most --max-held-mb (1); increase both limits"
        assert "'nan' is not a finite number" in refused("rewards.py:exact", "--deadline", "nan")

    def test_option_of_no_served_reward_is_rejected(self) -> None:
        here = ("rewards.py:scaled", "again=rewards.py:scaled", "--sandbox", "in_process")
        message = refused(*here, "-O", "factor=2")
        assert message == (
            "-O factor: if there are multiple rewards, "
            "prefix each option with the name of its reward: scaled. or again."
        )
        assert "has no option 'factr'; did you mean 'factor'?" in refused(here[0], *here[2:], "-O", "factr=2")

    def test_option_applies_to_the_named_reward(self, tmp_path: Path) -> None:
        options = {"scaled.factor": 0.25, "again.factor": 0.5}
        references = ["rewards.py:scaled", "again=rewards.py:scaled"]
        named = load_named_rewards(references, tmp_path, SandboxChoice("in_process"), options)
        assert {one.name: dict(one.reward.options) for one in named} == {
            "scaled": {"factor": 0.25},
            "again": {"factor": 0.5},
        }


def test_remote_reward_is_checked_on_its_server() -> None:
    with pytest.raises(ConfigError, match="is served over HTTP; check"):
        program(("check", "http://127.0.0.1:1/v1/rewards/x"), prog_name="reward-kit", standalone_mode=False)


def test_example_prints_the_documented_output(tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / "examples" / "reward_server"
    rewards = [f"{folder / 'reward.py'}:{name}" for name in ("last_number", "brevity")]
    with serve(tmp_path, *rewards, "--sandbox", "in_process") as running:
        done = subprocess.run(
            [sys.executable, str(folder / "ask.py"), running.asker.address],
            env=environment({KEY_VARIABLE: KEY}),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    (shown,) = re.findall(r"\$ python ask.py \S+\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert done.stdout == shown
