"""Test conversations with a simulated user as episodes of two agents."""

from __future__ import annotations

import json

from reward_kit.agent.models import episode_steps
from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.agent.simulated_user import (
    AGENT,
    GREETING,
    NO_ANSWER,
    USER,
    ScriptedUser,
    SimulatedUser,
    build_dialogue,
)
from reward_kit.episodes.multi_agent_episode import MultiAgentEpisode
from reward_kit.episodes.record import episode_from_record, episode_to_record
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from tests.agent.resources import COUNTER, call, task_of, text

SYSTEM = {"role": "system", "content": "You sell shoes."}
ASKED = {"role": "user", "content": "Hello, I want boots."}
TRACKS = ("observations", "infos", "actions", "rewards", "extra_model_outputs", "messages", "assistant_turns", "tokens")


class ScriptedSpeaker(AgentPolicy):
    """A scripted policy with given texts and tokens, which records its observations."""

    is_free = True

    def __init__(self, *said):
        self.said, self.seen = list(said), []

    async def get_action(self, observation, available_tools_specs=None):
        self.seen.append([(message.role, message.text) for message in observation])
        return self.said.pop(0)


def spoken(content, prompt, sampled):
    known = {"prompt_ids": prompt, "token_ids": sampled, "logprobs": [-0.5] * len(sampled), "usage": {"cost": 0.25}}
    return PolicyOutput(text(content), content, known)


async def collected(agent, user, **fields):
    policy = agent if isinstance(agent, AgentPolicy) else ScriptedPolicy(agent)
    worker = RLRolloutWorker(task_of(**{"messages": [SYSTEM, ASKED], **fields}), policy, user=user)
    async with worker.group(Sample("s", {"name": "Ada"})) as group:
        return await worker.collect_episode(group)


def by_step(getter):
    return getter(return_list=True)


async def test_each_side_observes_the_messages_of_the_other() -> None:
    episode = await collected([text("Which size?"), text("Here.")], ScriptedUser(["42", "Thanks. ###STOP###"]))
    dialogue = build_dialogue(episode)
    start = f"{SYSTEM['content']}\n{ASKED['content']}"
    assert by_step(dialogue.get_observations) == [
        {AGENT: start},
        {USER: "Which size?"},
        {AGENT: "42"},
        {USER: "Here."},
        {AGENT: "Thanks.", USER: "Here."},
    ]
    assert by_step(dialogue.get_actions) == [
        {AGENT: text("Which size?")},
        {USER: text("42")},
        {AGENT: text("Here.")},
        {USER: text("Thanks.")},
    ]
    outputs = dialogue.get_extra_model_outputs("raw_policy_output", agent_ids=USER)
    assert outputs == {USER: ["42", "Thanks. ###STOP###"]}
    assert dialogue.id_ == episode.id_ and dialogue.custom_data is episode.custom_data


async def test_agent_part_equals_the_recorded_episode() -> None:
    actions = [call(n=2), text("Which size?"), call(n=1), text("Here.")]
    user = ScriptedUser(["42", "Thanks. ###STOP###"])
    episode = await collected(actions, user, resource_type=COUNTER, max_episode_steps=9)
    assert len(episode) == 4 and episode.is_terminated
    agent = build_dialogue(episode).agent_episodes[AGENT]
    for track in TRACKS:
        assert getattr(agent, track) == getattr(episode, track), track
    assert (agent.id_, agent.is_terminated) == (episode.id_, True)
    assert agent.environment_rewards() == episode.environment_rewards()
    assert len(episode_steps(agent)) == 4
    assert agent.messages is episode.messages


async def test_user_part_holds_the_conversation_shown_to_the_user() -> None:
    thanks = "Thanks. ###STOP###"
    voice = ScriptedSpeaker(*(PolicyOutput(text(said), said) for said in ("Boots!", "42", thanks)))
    user = SimulatedUser(voice, instructions="You are {{ name }}.")
    actions = [call(), text(""), text("Here.")]
    episode = await collected(actions, user, messages=[SYSTEM], resource_type=COUNTER, max_episode_steps=9)
    part = build_dialogue(episode).agent_episodes[USER]
    assert [(message.role, message.text) for message in part.messages] == [
        ("system", "You are Ada."),
        ("user", GREETING),
        ("assistant", "Boots!"),
        ("user", NO_ANSWER),
        ("assistant", "42"),
        ("user", "Here."),
        ("assistant", "Thanks."),
    ]
    assert part.assistant_turns.tolist() == [2, 4, 6]
    for turn, seen in zip(part.assistant_turns, voice.seen, strict=True):
        assert [(message.role, message.text) for message in part.messages[:turn]] == seen
    assert part.get_observations() == [GREETING, NO_ANSWER, "Here.", "Here."]
    assert part.environment_rewards() == [None, None, None]


async def test_tokens_of_both_sides_become_training_rows() -> None:
    agent = ScriptedSpeaker(spoken("Which size?", [1, 2], [3]), spoken("Here.", [1, 2, 3, 4], [5, 6]))
    voice = ScriptedSpeaker(spoken("42", [7, 8], [9]), spoken("Thanks. ###STOP###", [7, 8, 9, 10, 11], [12, 13]))
    episode = await collected(agent, SimulatedUser(voice))
    dialogue = build_dialogue(episode)
    (row,) = dialogue.agent_episodes[USER].tokens.rows()
    assert row.prompt_ids.tolist() == [7, 8]
    assert row.completion_ids.tolist() == [9, 10, 11, 12, 13]
    assert row.action_mask.tolist() == [1, 0, 0, 1, 1]
    assert row.steps.tolist() == [0, -1, -1, 1, 1]
    assert dialogue.agent_episodes[AGENT].tokens is episode.tokens
    assert dialogue.get_extra_model_outputs("usage", agent_ids=USER) == {USER: [{"cost": 0.25}, {"cost": 0.25}]}


class TestHangingActions:
    async def test_user_that_ends_the_task_leaves_no_hanging_action(self):
        dialogue = build_dialogue(await collected([text("a")], ScriptedUser(["###STOP###"])))
        assert dialogue.hanging_actions == {} and dialogue.is_terminated
        assert dialogue.get_terminateds() == {AGENT: True, USER: True, "__all__": True}
        assert dialogue.agent_episodes[USER].get_actions() == [{"type": "terminate"}]

    async def test_unanswered_user_action_hangs_after_a_step_limit(self):
        user = ScriptedUser(["42", "and now?"])
        fields = {"resource_type": COUNTER, "max_episode_steps": 2}
        dialogue = build_dialogue(await collected([text("Which size?"), call()], user, **fields))
        assert dialogue.hanging_actions == {USER: text("42")}
        assert dialogue.get_truncateds() == {AGENT: True, USER: False, "__all__": True}
        assert dialogue.hanging_extra_model_outputs[USER] == {"raw_policy_output": "42"}

    async def test_user_answer_before_a_truncation_hangs(self):
        user = ScriptedUser(["42", "Thanks. ###STOP###"])
        cut = (await collected([text("Which size?"), text("Here.")], user))[:1]
        cut.is_truncated = True
        dialogue = build_dialogue(cut)
        assert dialogue.hanging_actions == {USER: text("42")}
        assert dialogue.get_truncateds() == {AGENT: True, USER: False, "__all__": True}

    async def test_agent_action_before_the_step_limit_does_not_hang(self):
        user = ScriptedUser(["42", "and now?"])
        dialogue = build_dialogue(await collected([text("Which size?"), text("Here.")], user, max_episode_steps=2))
        assert dialogue.hanging_actions == {}
        assert dialogue.get_truncateds() == {AGENT: True, USER: True, "__all__": True}
        assert dialogue.agent_episodes[USER].get_observations() == ["Which size?", "Here."]

    async def test_slice_ends_with_a_hanging_action(self):
        user = ScriptedUser(["42", "Thanks. ###STOP###"])
        dialogue = build_dialogue(await collected([text("Which size?"), text("Here.")], user))
        assert dialogue[:1].hanging_actions == {AGENT: text("Which size?")}
        assert dialogue[:2].hanging_actions == {USER: text("42")}
        first = dialogue[:3]
        first.concat_episode(dialogue[3:])
        assert first == dialogue

    async def test_user_that_stops_first_leaves_an_agent_without_actions(self):
        episode = await collected([], ScriptedUser(["###STOP###"]), messages=[SYSTEM])
        dialogue = build_dialogue(episode)
        assert (len(episode), dialogue.agent_steps(), dialogue.is_terminated) == (0, 1, True)
        assert dialogue.get_terminateds() == {USER: True, AGENT: True, "__all__": True}


async def test_silent_user_is_not_in_the_dialogue() -> None:
    dialogue = build_dialogue(
        await collected([call(), call()], ScriptedUser(["x"]), resource_type=COUNTER, max_episode_steps=2)
    )
    assert dialogue.agent_ids == {AGENT} and len(dialogue) == 2


async def test_dialogue_survives_serialization() -> None:
    user = ScriptedUser(["I am {{ name }}.", "Thanks. ###STOP###"], instructions="Be kind.", opens=True)
    episode = await collected([text("Which size?")], user, messages=[SYSTEM])
    assert episode.get_infos(0)["user"] == {"raw": "I am Ada.", "instructions": "Be kind."}
    read = episode_from_record(json.loads(json.dumps(episode_to_record(episode))))
    dialogue = build_dialogue(episode)
    assert build_dialogue(read) == dialogue
    assert MultiAgentEpisode.from_state(json.loads(json.dumps(dialogue.get_state()))) == dialogue


def test_dialogue_before_reset_is_empty() -> None:
    assert build_dialogue(SingleAgentEpisode("e")) == MultiAgentEpisode(
        "e", agent_module_ids={AGENT: AGENT, USER: USER}
    )
