"""Rewards that run elsewhere: described there, called there, recorded so; and no wall is needed on this machine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.models import Message
from reward_kit.reward_agent.levels import SandboxChoice, load_reward, scorer_of
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.sandbox import availability
from tests.sandbox.behind_walls import AVAILABLE
from tests.sandbox.places import write_engine, write_ssh

CHAT = (Message(role="user", content="2 + 2?"), Message(role="assistant", content="4"))
SSH = f"ssh:here:{Path(sys.executable).parent}/reward-kit"
REWARD = """
import os
from reward_kit import reward_function

@reward_function
def right(messages, ground_truth):
    return {"score": float(messages[-1].text == ground_truth), "reason": os.environ.get("USER", "")}

@reward_function(requirements=["nothing-like-it>=1"])
def needs(messages):
    return {"score": 1.0}

@reward_function
def reads(messages, path=None):
    return {"score": 1.0, "reason": open("DATA").read()}
"""
pytestmark = pytest.mark.skipif(
    not any(found.is_available for name, found in AVAILABLE.items() if name != "process"),
    reason="nothing confines here",
)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """With a reward, and an `ssh` that runs its command on this machine."""
    monkeypatch.setenv("REWARD_KIT_SSH", write_ssh(tmp_path))
    (tmp_path / "data.txt").write_text("from the file")
    (tmp_path / "data.txt").chmod(0o644)
    (tmp_path / "reward.py").write_text(REWARD.replace("DATA", str(tmp_path / "data.txt")))
    return tmp_path


def load(folder, name="right", back_end=SSH, **choice):
    return load_reward(f"reward.py:{name}", folder, SandboxChoice(back_end=back_end, **choice)).reward


async def score(reward, number=1):
    async with scorer_of(reward) as scorer:
        return await asyncio.gather(
            *(scorer.score(ScoringRequest(f"r{one}", CHAT, str(one), [1])) for one in range(number, number + 5))
        )


async def test_a_reward_is_scored_there_and_the_result_says_so(folder):
    reward = await asyncio.to_thread(load, folder)
    assert (reward.id, reward.level, reward.back_end) == ("right", "warm", SSH)
    scored = await score(reward)
    assert [one.result.score for one in scored] == [0.0, 0.0, 0.0, 1.0, 0.0]
    for one in scored:
        assert {**one.sandbox, "strength": ""} == {"level": "warm", "strength": "", "back_end": SSH}
        assert one.sandbox["strength"] in ("namespaces", "landlock")
        assert one.result.reason == "sandbox"


async def test_this_machine_needs_no_walls_then(folder, monkeypatch):
    for name in ("namespaces", "landlock"):
        monkeypatch.setitem(availability._known, name, availability.Availability(name, False, "taken away"))
    with pytest.raises(ConfigError, match="is to run isolated, and this machine cannot confine code"):
        await asyncio.to_thread(load, folder, back_end=None, level="isolated")
    scored = await score(await asyncio.to_thread(load, folder, level="isolated"))
    assert scored[3].result.score == 1.0


async def test_a_container_is_the_wall_where_it_has_no_other(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_KIT_CONTAINER_ENGINE", write_engine(tmp_path))
    scored = await score(await asyncio.to_thread(load, folder, back_end="docker:image"), number=3)
    assert scored[1].result.score == 1.0
    assert scored[1].sandbox == {"level": "warm", "strength": "container", "back_end": "docker:image"}


async def test_it_reads_what_it_was_shown_there(folder):
    shown = str(folder / "data.txt")
    reward = await asyncio.to_thread(load, folder, "reads", read_paths=(shown,))
    assert {one.result.reason for one in await score(reward)} == {"from the file"}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"level": "in_process"}, "has no effect at the level in_process"),
        ({"back_end": "moon:1"}, "'moon:1' is no back end"),
        ({"read_paths": ("data.txt",)}, "'data.txt' is a path in ssh:here.*must be absolute"),
        ({"read_paths": ("/not/there",)}, "/not/there, which the program is to read, is not there"),
        ({"install_requirements": True}, "requirements are installed on this machine only"),
        ({"name": "needs"}, "reward 'needs' in ssh:here.*nothing-like-it"),
        ({"name": "missing"}, "missing"),
    ],
)
def test_what_cannot_be_is_told_when_it_is_loaded(folder, choice, message):
    with pytest.raises(ConfigError, match=message):
        load(folder, **choice)
