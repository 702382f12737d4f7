"""Test the HTML representation of an episode in notebooks."""

from __future__ import annotations

import numpy as np

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import Message
from tests.test_notebook_html import HOSTILE, harmless


def talked(steps: int, text: str = "go") -> SingleAgentEpisode:
    episode = SingleAgentEpisode(f"e{text}")
    episode.add_messages([Message(role="system", content=text), Message(role="user", content=text, name=text)])
    episode.add_env_reset(text)
    for t in range(steps):
        calls = [{"id": f"c{t}", "function": {"name": text, "arguments": text}}] * 7
        said = {"role": "assistant", "content": text, "tool_calls": calls, "reasoning_content": text}
        episode.add_assistant_message(Message.model_validate(said))
        episode.add_env_step(text, {"type": "text", "content": text}, 0.5 if t % 2 else None, terminated=t == steps - 1)
        episode.add_messages([Message(role="tool", content=[{"type": "text", "text": text}, {"type": "image_url"}])])
    return episode


def test_html_shows_the_end_and_the_reward_of_each_step() -> None:
    episode = talked(3)
    episode.custom_data["stop_reason"] = "answered"
    seen = harmless(episode._repr_html_())
    for told in ("Episode ego", "3 steps", "environment return 0.5", "terminated (answered)", "8 messages"):
        assert told in seen.text, told
    assert "step 1 · reward 0.5" in seen.text and "step 0 · reward" not in seen.text
    assert "go(go)" in seen.text and "and 2 more calls" in seen.text and "[image_url]" in seen.text


def test_hostile_text_is_escaped_and_failures_shown() -> None:
    episode = talked(2, HOSTILE)
    episode.custom_data |= {"failure": {"class": "crash", "message": HOSTILE}, "stop_reason": HOSTILE}
    assert "broke: crash" in harmless(episode._repr_html_()).text


def test_long_episode_shows_its_beginning_and_end() -> None:
    html = talked(2_000, "<&" * 5_000)._repr_html_()
    seen = harmless(html)
    assert len(html) < 900_000 and "3,982 messages omitted" in seen.text and "step 1999" in seen.text


def test_episode_without_a_conversation_shows_its_steps() -> None:
    episode = SingleAgentEpisode(observations=[np.zeros(2)] * 4, actions=[0, {"a": "<b>"}, 2], rewards=[1.0, 2.0, 3.0],
                                 len_lookback_buffer=0)  # fmt: skip
    seen = harmless(episode.to_numpy()._repr_html_())
    assert '{"a": "<b>"}' in seen.text and "environment return 6" in seen.text and "not over" in seen.text
    assert "0 steps" in harmless(SingleAgentEpisode("new")._repr_html_()).text


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_unprintable_value_affects_only_its_cell() -> None:
    nested: list[object] = []
    for _ in range(5_000):
        nested = [nested]
    episode = SingleAgentEpisode(observations=["start", nested], actions=[Unspeakable()], rewards=[1.0],
                                 len_lookback_buffer=0)  # fmt: skip
    assert "Unspeakable whose __str__ raised RuntimeError" in harmless(episode._repr_html_()).text
    actions = SingleAgentEpisode(observations=["start", "end"], actions=[nested], rewards=[1.0], len_lookback_buffer=0)
    assert "list whose __str__ raised RecursionError" in harmless(actions._repr_html_()).text


def test_chunk_shows_its_own_steps() -> None:
    whole = talked(6)
    chunk = whole[2:4]
    assert "2 steps" in harmless(chunk._repr_html_()).text
