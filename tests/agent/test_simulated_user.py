"""Test the simulated user: turns, views of each side, ends and records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from reward_kit.agent.models import StopReason
from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample, derive_seed
from reward_kit.agent.simulated_user import GREETING, NO_ANSWER, ScriptedUser, SimulatedUser
from reward_kit.episodes.record import episode_from_record, episode_to_record
from reward_kit.errors import ConfigError
from reward_kit.runs.plan import NamedPolicy, RunPlan, make_user
from reward_kit.runs.run_folder import RunFolder, RunHeader, read_episodes
from reward_kit.runs.runner import Run
from reward_kit.runs.tasks import load_task
from tests.agent.resources import COUNTER, call, failure, reason, task_of, text
from tests.chat_server import ChatServer, answer, status

SYSTEM = {"role": "system", "content": "You sell shoes."}
ASKED = {"role": "user", "content": "Hello, I want boots."}


class Recorder(AgentPolicy):
    """A scripted policy that records its observations, its episode context, and whether it was closed."""

    is_free = True

    def __init__(self, *texts: Any) -> None:
        self.texts, self.seen, self.contexts, self.closed = list(texts), [], [], 0
        self.messages = []

    async def open(self, context):
        self.contexts.append(context)
        return self

    async def get_action(self, observation, available_tools_specs=None):
        self.seen.append([(message.role, message.text) for message in observation])
        self.tools = available_tools_specs
        self.messages.append(list(observation))
        said = self.texts.pop(0)
        return said if isinstance(said, PolicyOutput) else PolicyOutput(text(said), said)

    async def close(self):
        self.closed += 1


async def dialogue(agent, user, *, sample=None, seed=0, rollout_index=0, **fields):
    """Run an episode of scripted actions with a user, given as a policy or by their texts."""
    policy = user if isinstance(user, AgentPolicy) else Recorder(*user) if isinstance(user, list) else None
    fields = {"messages": [SYSTEM, ASKED], **fields}
    simulated = SimulatedUser(policy) if policy is not None else user
    acting = agent if isinstance(agent, AgentPolicy) else ScriptedPolicy(agent)
    worker = RLRolloutWorker(task_of(**fields), acting, user=simulated)
    async with worker.group(sample or Sample("s"), seed) as group:
        return await worker.collect_episode(group, rollout_index)


def said(episode):
    return [(message.role, message.text) for message in episode.messages]


async def test_user_answers_every_text_until_the_stop_phrase() -> None:
    episode = await dialogue([text("Which size?"), text("Here.")], ["42", "Thanks. ###STOP###"])
    assert said(episode)[2:] == [
        ("assistant", "Which size?"),
        ("user", "42"),
        ("assistant", "Here."),
        ("user", "Thanks."),
    ]
    assert (reason(episode), episode.is_terminated, len(episode)) == ("user_stopped", True, 2)


async def test_user_sees_only_the_dialogue_with_swapped_roles() -> None:
    user = Recorder("and now?", "bye ###STOP###")
    silent = {"type": "tool_calls", "calls": [{"name": "add", "arguments": {}}], "content": "thinking aloud"}
    actions = [call(), silent, text(""), text("Done.")]
    await dialogue(actions, user, resource_type=COUNTER, max_episode_steps=9)
    before = [("assistant", "Hello, I want boots."), ("user", NO_ANSWER)]
    assert user.seen == [before, [*before, ("assistant", "and now?"), ("user", "Done.")]]
    assert user.tools is None and user.contexts[0].resource is None


async def test_user_messages_keep_their_identity_between_turns() -> None:
    user = Recorder(" as it is ", "bye ###STOP###")
    episode = await dialogue([text("a"), text("b")], user)
    first, second = user.messages
    assert all(old is new for old, new in zip(first, second, strict=False)) and len(second) == len(first) + 2
    assert ("user", " as it is ") in said(episode)


async def test_observation_of_the_environment_is_not_a_user_message() -> None:
    user = Recorder("I need help.", "###STOP###")
    fields = {"messages": [SYSTEM], "resource_type": COUNTER, "max_episode_steps": 3}
    episode = await dialogue([text("Yes?")], user, **fields)
    assert said(episode)[1:3] == [("user", "the count is 0"), ("user", "I need help.")]
    assert user.seen[1] == [("user", GREETING), ("assistant", "I need help."), ("user", "Yes?")]


class TestOpening:
    async def test_user_opens_without_a_user_message_in_the_task(self):
        user = Recorder("I want boots.", "bye ###STOP###")
        episode = await dialogue([text("Which size?")], user, messages=[SYSTEM])
        assert user.seen[0] == [("user", GREETING)]
        assert said(episode)[:3] == [
            ("system", SYSTEM["content"]),
            ("user", "I want boots."),
            ("assistant", "Which size?"),
        ]
        assert episode.get_infos(0)["user"] == {"raw": "I want boots."}

    async def test_time_limit_of_the_episode_ends_it_while_the_user_opens(self):
        class Slow(Recorder):
            async def get_action(self, observation, available_tools_specs=None):
                await anyio.sleep(60)

        episode = await dialogue([text("Which size?")], Slow(), messages=[SYSTEM], limits={"wall_time_s": 0.05})
        assert (failure(episode), reason(episode)) == (None, StopReason.WALL_TIME_LIMIT)
        assert said(episode) == [("system", SYSTEM["content"])]

    async def test_agent_opens_if_the_task_has_a_user_message(self):
        user = Recorder("bye ###STOP###")
        await dialogue([text("Which size?")], user)
        assert user.seen == [[("assistant", ASKED["content"]), ("user", "Which size?")]]

    @pytest.mark.parametrize(("opens", "messages"), [(True, [SYSTEM, ASKED]), (False, [SYSTEM])])
    async def test_opens_option_decides_the_first_speaker(self, opens, messages):
        user = SimulatedUser(Recorder("first", "bye ###STOP###"), opens=opens)
        episode = await dialogue([text("Hm."), text("Ho.")], user, messages=messages)
        assert said(episode)[len(messages)][0] == ("user" if opens else "assistant")

    async def test_user_may_stop_before_the_first_agent_turn(self):
        episode = await dialogue([text("Hm.")], ["###STOP###"], messages=[SYSTEM])
        assert (reason(episode), len(episode), said(episode)) == ("user_stopped", 0, [("system", SYSTEM["content"])])
        assert episode_from_record(episode_to_record(episode)) == episode


class TestEnds:
    async def test_user_terminate_adds_no_message(self):
        episode = await dialogue([text("Which size?")], [PolicyOutput({"type": "terminate"})])
        assert (reason(episode), said(episode)[-1]) == ("user_stopped", ("assistant", "Which size?"))

    async def test_custom_stop_phrase_ends_the_dialogue(self):
        user = SimulatedUser(Recorder("###STOP### is no word", "goodbye"), stop_phrase="goodbye")
        episode = await dialogue([text("a"), text("b")], user)
        assert said(episode)[-2:] == [("user", "###STOP### is no word"), ("assistant", "b")]

    @pytest.mark.parametrize(
        ("raw", "read"),
        [
            ("thanks ###STOP### bye", "thanks bye"),
            ("thanks\n\n###STOP###\nbye", "thanks\nbye"),
            ("a ###STOP### ###STOP### b", "a b"),
            ("so###STOP###.", "so."),
            ("two  blanks ###STOP###", "two  blanks"),
        ],
    )
    async def test_stop_phrase_is_removed_without_a_gap(self, raw, read):
        episode = await dialogue([text("a")], [raw])
        assert said(episode)[-1] == ("user", read)

    async def test_agent_stop_phrase_ends_before_the_user_answers(self):
        user = Recorder()
        episode = await dialogue([text("DONE")], user, stop_phrases=["DONE"])
        assert (reason(episode), user.seen) == ("stop_phrase", [])

    async def test_step_limit_counts_agent_turns(self):
        episode = await dialogue([text(str(n)) for n in range(5)], ["x"] * 5, max_episode_steps=3)
        assert (reason(episode), len(episode), said(episode)[-1]) == ("max_steps", 3, ("assistant", "2"))

    async def test_tool_call_of_the_user_fails_the_episode(self):
        episode = await dialogue([text("a")], [PolicyOutput(call())])
        assert failure(episode)["where"] == "PolicyError" and "but it has no tools" in failure(episode)["message"]
        assert said(episode)[-1] == ("assistant", "a")

    async def test_slow_user_times_out(self):
        async def never(messages, row):
            await anyio.sleep_forever()

        slow = ScriptedUser(never)
        episode = await dialogue([text("a")], slow, limits={"policy_time_s": 0.05})
        assert (reason(episode), failure(episode)["class"], len(episode)) == ("error", "timeout", 1)
        episode = await dialogue([text("a")], slow, limits={"wall_time_s": 0.05})
        assert (reason(episode), failure(episode), len(episode)) == ("wall_time_limit", None, 1)

    async def test_closing_the_user_closes_its_policy(self):
        user = Recorder("###STOP###")
        await dialogue([text("a")], user)
        assert user.closed == 0
        await SimulatedUser(user).close()
        assert user.closed == 1


class TestRecord:
    async def test_both_sides_survive_serialization(self):
        facts = {"usage": {"prompt_tokens": 3, "completion_tokens": 2, "cost": 0.5}, "token_ids": [7, 8]}
        last = PolicyOutput(text("bye ###STOP###"), "bye ###STOP###", {**facts, "logprobs": [-0.5, -1.0]})
        episode = await dialogue([text("Which size?")], ["Boots.", last], messages=[SYSTEM])
        read = episode_from_record(json.loads(json.dumps(episode_to_record(episode))))
        assert read == episode
        assert read.get_infos(0)["user"] == {"raw": "Boots."}
        assert read.get_infos(1)["user"] == {"raw": "bye ###STOP###", **facts, "logprobs": [-0.5, -1.0]}
        assert read.custom_data["user_usage"] == facts["usage"] and not read.custom_data["usage"]

    async def test_user_seed_is_separate_and_equal_for_every_agent(self):
        user = Recorder("###STOP###", "###STOP###")
        for agent in (ScriptedPolicy([text("a")]), Recorder("a")):
            episode = await dialogue(agent, user, seed=5, rollout_index=2)
        seeds = {context.seed for context in user.contexts}
        assert seeds == {derive_seed("user", 5, "s", 2)} and not seeds & set(episode.custom_data["seeds"].values())

    async def test_user_messages_are_masked_in_token_rows(self):
        def spoken(prompt, sampled, content):
            known = {"prompt_ids": prompt, "token_ids": sampled, "logprobs": [-1.0] * len(sampled)}
            return PolicyOutput(text(content), content, known)

        agent = Recorder(spoken([1, 2], [3], "Which size?"), spoken([1, 2, 3, 40, 41], [5, 6], "Here."))
        episode = await dialogue(agent, ["42", "Thanks. ###STOP###"])
        (row,) = episode.tokens.rows()
        assert row.completion_ids.tolist() == [3, 40, 41, 5, 6]
        assert row.action_mask.tolist() == [1, 0, 0, 1, 1]


class TestCost:
    async def test_user_cost_counts_toward_the_limit(self):
        paid = PolicyOutput(text("go on"), None, {"usage": {"cost": 0.6}})
        episode = await dialogue([text("a")] * 5, [paid] * 5, limits={"cost": 1.0})
        assert (reason(episode), len(episode)) == ("cost_limit", 3)

    async def test_user_of_unknown_cost_fails_under_a_cost_limit(self):
        class Paid(Recorder):
            is_free = False

        user = Paid("go on")
        assert not SimulatedUser(user).knows_cost and SimulatedUser(Recorder()).is_free
        episode = await dialogue([text("a")], user, limits={"cost": 1.0})
        assert "the simulated user did not report the cost of this action" in failure(episode)["message"]


class TestScripted:
    async def test_replies_are_templates_over_the_row(self):
        user = ScriptedUser(["I am {{ name }}.", "Bye."])
        episode = await dialogue([text(str(n)) for n in range(4)], user, sample=Sample("s", {"name": "Ada"}))
        assert [content for role, content in said(episode)[2:] if role == "user"] == ["I am Ada.", "Bye."]
        assert (reason(episode), len(episode)) == ("user_stopped", 3)

    async def test_replies_of_the_row_are_used_verbatim(self):
        episode = await dialogue([text("a")] * 3, ScriptedUser(), sample=Sample("s", {"replies": ["{{ x }}"]}))
        assert ("user", "{{ x }}") in said(episode)

    async def test_replies_may_come_from_a_function(self):
        def speak(conversation, row):
            return f"{row['name']} heard {conversation[-1].text} ({conversation[0].text})"

        user = ScriptedUser(speak, instructions="You are {{ name }}.")
        episode = await dialogue([text("a")] * 2, user, sample=Sample("s", {"name": "Ada"}))
        assert said(episode)[3] == ("user", "Ada heard a (You are Ada.)")

    async def test_function_that_returns_no_text_fails_the_episode(self):
        episode = await dialogue([text("a")], ScriptedUser(lambda conversation, row: 7))
        message = failure(episode)["message"]
        assert message.startswith("the simulated user: the function of") and "must return a string, got 7" in message

    @pytest.mark.parametrize(
        ("make", "problem"),
        [
            (lambda: ScriptedUser("hi").check(Sample("s")), "replies must be a list of strings, got 'hi'"),
            (lambda: ScriptedUser(["{{ nope }}"]).check(Sample("s")), "'nope' is undefined"),
            (lambda: ScriptedUser(["{{ observation }}"]).check(Sample("s")), "does not see the environment"),
            (lambda: ScriptedUser().check(Sample("s")), "sample 's' has no 'replies'"),
            (lambda: ScriptedUser().check(Sample("s", {"replies": [1]})), "sample 's': replies must be a list"),
            (lambda: ScriptedUser(["{{ x"]), "message template"),
        ],
    )
    def test_invalid_user_is_rejected_before_a_run(self, make, problem):
        with pytest.raises(ConfigError, match=problem):
            make()


async def test_user_endpoint_failure_is_attributed_to_the_user() -> None:
    async with ChatServer([status(400)]) as users:
        user = SimulatedUser(OpenAIAgentPolicy("u", base_url=users.base_url, api_key="x"))
        try:
            episode = await dialogue([text("a")], user)
        finally:
            await user.close()
    assert failure(episode)["message"].startswith("the simulated user: http://")
    assert failure(episode)["where"] == "ProviderError"


async def test_dialogue_between_two_model_endpoints() -> None:
    async with (
        ChatServer([answer("Which size?"), answer("Here.")]) as agents,
        ChatServer([answer("Boots!"), answer("42"), answer("Thanks ###STOP###")]) as users,
    ):
        agent = OpenAIAgentPolicy("a", base_url=agents.base_url, api_key="x")
        user = SimulatedUser(
            OpenAIAgentPolicy("u", base_url=users.base_url, api_key="x"), instructions="Be {{ mood }}."
        )
        try:
            episode = await dialogue(agent, user, messages=[SYSTEM], sample=Sample("s", {"mood": "kind"}))
        finally:
            await agent.close()
            await user.close()
    assert reason(episode) == "user_stopped"
    heard = [(message["role"], message["content"]) for message in users.bodies[1]["messages"]]
    assert heard == [("system", "Be kind."), ("user", GREETING), ("assistant", "Boots!"), ("user", "Which size?")]
    assert "tools" not in users.bodies[0] and users.bodies[0]["seed"] != agents.bodies[0]["seed"]
    assert episode.get_infos(1)["user"]["finish_reason"] == "stop"
    assert episode.custom_data["user_usage"]["prompt_tokens"] == 33


async def test_rejecting_user_endpoint_fails_the_episode_as_provider_error() -> None:
    async with ChatServer([status(400)]) as users:
        policy = OpenAIAgentPolicy("u", base_url=users.base_url, api_key="x")
        episode = await dialogue([text("Which size?")], policy)
        await policy.close()
    assert (failure(episode)["class"], len(episode)) == ("provider_error", 1)


async def test_run_shares_one_user_and_closes_it(tmp_path: Path) -> None:
    user = Recorder(*["bye ###STOP###"] * 2)
    definition = task_of(messages=[SYSTEM, ASKED])
    samples = (Sample("a"), Sample("b"))
    policies = [NamedPolicy("agent", ScriptedPolicy([text("a")]))]
    plan = RunPlan(definition, policies=policies, samples=samples, rollouts=1, user=SimulatedUser(user))
    with RunFolder.create(tmp_path / "run", RunHeader(task_name="t")) as store:
        await Run(plan, store).execute()
    assert [record["stop_reason"] for record in read_episodes(tmp_path / "run")] == ["user_stopped"] * 2
    assert user.closed == 1


class TestTaskFile:
    def load(self, folder: Path, user: Any, **fields: Any) -> SimulatedUser | None:
        (folder / "tools.py").write_text("from reward_kit import ToolRegistry\nregistry = ToolRegistry('none')\n")
        task = {"name": "t", "messages": [SYSTEM], "tools_module_path": "tools.py"}
        (folder / "task.yaml").write_text(yaml.safe_dump({**task, **fields, "user": user}, sort_keys=False))
        return make_user(load_task(folder / "task.yaml"))

    def test_every_kind_of_user_loads(self, tmp_path):
        (tmp_path / "people.py").write_text("def speak(conversation, row):\n    return 'hi'\n")
        model = {"type": "openai", "model": "m", "api_key": "x", "instructions": "Be kind.", "temperature": 0.5}
        for block in (
            model,
            "human",
            {"type": "scripted", "replies": ["a"]},
            {"type": "scripted", "replies": "people.py:speak"},
        ):
            assert isinstance(self.load(tmp_path, block), SimulatedUser)

    def test_task_without_a_user_loads_none(self, tmp_path):
        assert self.load(tmp_path, None) is None

    @pytest.mark.parametrize(
        ("block", "problem"),
        [
            (
                {"type": "openai", "modle": "m", "instructions": "x"},
                r"task.yaml:8: user.modle: unknown key.*'model'",
            ),
            (
                {"type": "scripted", "stop_frase": "END"},
                r"task.yaml:8: user.stop_frase: unknown key for a user of type 'scripted'; .*'stop_phrase'\?",
            ),
            ({"type": "scripted", "xyz": 1}, "known: instructions, opens, replies, stop_phrase, type"),
            ({"type": "openai", "model": "m", "instuctions": "x"}, "unknown key.*did you mean 'instructions'"),
            ({"type": "openai", "model": "m"}, r"task.yaml:6: user: .*set user.instructions"),
            ({"type": "scripted", "reply": ["a"]}, "user.reply: unknown key"),
            ({"type": "scripted"}, "sample 't' has no 'replies'"),
            ({"type": "scripted", "replies": ["a"], "instructions": "{{ nope }}"}, "'nope' is undefined"),
            ({"type": "scripted", "replies": "tools.py:registry"}, "is a ToolRegistry, not a function"),
            ("expert", "the policy 'expert' cannot be a user: it queries the environment"),
            ("opnai", "unknown policy 'opnai'; did you mean 'openai'"),
            ({"type": "human", "stop_phrase": ""}, "user.stop_phrase"),
        ],
    )
    def test_invalid_user_block_is_rejected(self, tmp_path, block, problem):
        with pytest.raises(ConfigError, match=problem):
            self.load(tmp_path, block)

    def test_options_without_effect_beside_a_user_are_rejected(self, tmp_path):
        with pytest.raises(ConfigError, match=r"task.yaml:\d+: user: with on_text: end, the episode would end"):
            self.load(tmp_path, "human", on_text="end")
        with pytest.raises(ConfigError, match="nudge has no effect: the simulated user answers"):
            self.load(tmp_path, "human", nudge="Go on.")

    def test_messages_may_be_empty_only_if_the_user_opens(self, tmp_path):
        assert self.load(tmp_path, "human", messages=[]) is not None
        with pytest.raises(ConfigError, match="no first message"):
            self.load(tmp_path, {"type": "human", "opens": False}, messages=[])
