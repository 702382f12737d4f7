"""Test the record of an episode: the identity comes first, and no field is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reward_kit.episodes.json_codec import compact_json
from reward_kit.episodes.record import (
    Identity,
    SampleFacts,
    StartAndEnd,
    environment_return,
    episode_to_record,
    get_facts,
)
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.runs.scoring import read_transcripts
from tests.agent.resources import COUNTER, call, collected

IDENTITY = ["sample_id", "group_id", "rollout_index", "attempt", "policy", "stop_reason", "failure"]


def read(folder: Path) -> SingleAgentEpisode:
    (folder / "data.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "4"}]}))
    (episode,) = read_transcripts(folder / "data.jsonl")
    return episode


async def test_worker_and_transcript_record_the_same_fields(tmp_path: Path) -> None:
    worked, given = await collected([call(), {"type": "terminate"}], resource_type=COUNTER), read(tmp_path)
    always = Identity.__annotations__.keys() | SampleFacts.__annotations__.keys()
    assert get_facts(given).keys() == always
    assert get_facts(worked).keys() == always | StartAndEnd.__annotations__.keys() | {"timing"}
    for episode in (worked, given):
        assert list(episode_to_record(episode))[: 2 + len(IDENTITY)] == ["schema_version", "rollout_id", *IDENTITY]


async def test_environment_return_is_none_without_rewards(tmp_path: Path) -> None:
    assert environment_return(read(tmp_path)) is None
    assert environment_return(await collected([call("cut")], resource_type=COUNTER)) is None
    assert environment_return(await collected([call(by=0), call("cut")], resource_type=COUNTER)) == 0.0


def test_non_finite_return_is_rejected() -> None:
    episode = SingleAgentEpisode("r-1")
    episode.add_env_reset("")
    for _ in range(2):
        episode.add_env_step("", 0, 1.7e308)
    with pytest.raises(ValueError, match="not JSON compliant"):
        compact_json(episode_to_record(episode))
