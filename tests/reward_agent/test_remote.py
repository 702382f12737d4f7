"""Remote rewards score as the same reward does in process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from reward_kit.environments.base import StateSnapshot
from reward_kit.errors import ConfigError, Failure
from reward_kit.integrations.reward_server.options import Keys, ServerOptions
from reward_kit.integrations.reward_server.server import NamedReward, serving
from reward_kit.integrations.reward_server.wire import make_answer
from reward_kit.models import EvaluateResult, Message, StepOutput
from reward_kit.providers.keys import ORIGINS_VARIABLE
from reward_kit.reward_agent import AsyncRewardAgent, InProcessScorer, Scored, ScoringRequest, load_reward
from reward_kit.reward_agent.loading import SandboxChoice, make_scorer
from reward_kit.reward_agent.remote import (
    KEY_VARIABLE,
    AboutBody,
    RemoteReward,
    check_named_by_file,
    reward_notes,
)
from reward_kit.runs.inputs import scorer_hash
from reward_kit.runs.tasks import load_task
from reward_kit.typed_interface import reward_function, reward_spec
from tests.agent.resources import call, task_of, worker_of
from tests.command_line import call as command
from tests.integrations.reward_server.running_server import KEY, server


def told(*values: Any) -> str:
    """Return values with their types, which JSON alone would lose."""
    return repr(values)


@reward_function
async def sees(messages: list[Message], ground_truth=None, assistant_turns=None, sample=None, **others):
    """Score with a reason that contains all arguments."""
    others.pop("step_data", None), others.pop("state", None)
    chat = [message.to_chat() for message in messages]
    seen = told(chat, ground_truth, assistant_turns, sample, sorted(others.items()))
    return {"score": len(messages) / 100, "reason": seen}


@reward_function
def steps(messages, step_data, assistant_turns):
    outputs = [StepOutput(step_index=i, base_reward=0.25 * i) for i in range(len(assistant_turns))]
    facts = [(s.system_step_index, s.observation_data, s.action_taken, s.is_done, s.step_info) for s in step_data]
    return {"score": 0.5, "reason": told(facts), "step_outputs": outputs, "metrics": {"m": {"score": 1, "reason": "é"}}}


@reward_function
def looks(messages, state):
    if state is None:
        return {"score": 0.0}
    seen = state.query("SELECT * FROM t") if hasattr(state, "query") else dict(state)
    return {"score": 1.0, "reason": told(type(state).__name__, seen)}


@reward_function(mode="batch")
def ranks(rollouts_messages, ground_truths, sample):
    lengths = [len(messages) for messages in rollouts_messages]
    if "fall" in ground_truths:
        raise ValueError(f"the whole group of {len(lengths)} falls")
    results = [{"score": length / 10, "reason": told(sample)} for length in lengths]
    return [
        {"score": 2.0, "metrics": {"m": {"score": 3}}} if n == 3 else one
        for n, one in zip(lengths, results, strict=True)
    ]


@reward_function
def fails(messages, ground_truth):
    match ground_truth:
        case "raise":
            raise KeyError("x\ud800")
        case "none":
            return None
        case "nan":
            return {"score": math.nan}
        case "invalid":
            return {"score": 0.5, "is_score_valid": False, "reason": "not today \ud800"}
        case "wrong step":
            return {"score": 1.0, "step_outputs": [{"step_index": 99, "base_reward": 0.0}]}
        case "exit":
            raise SystemExit(3)
    return {"score": 1.0, "reason": "fine", "query": "asked", "response": "said", "raw_score": 3.5}


ODD = [
    *(None, True, -0.0, 1e-300, 10**30, "é", "\ud800 alone", b"\x00\xff", (1, (2,)), math.inf, math.nan),
    *({"__type__": "tuple"}, {1: 2, "x": [None]}, np.float32(0.1), [[], {}], "", " \x00 "),
]


def odd_request(draw: random.Random, name: str) -> ScoringRequest:
    """Return a rollout with values of every kind."""
    roles = draw.choices(["user", "assistant", "tool"], k=draw.randrange(6))
    contents = ["plain", "\ud800", None, [{"type": "text", "text": "part"}], ""]
    messages = [Message(role=role, content=draw.choice(contents), weight=draw.choice(ODD[:5])) for role in roles]
    return ScoringRequest(
        name,
        messages,
        ground_truth=draw.choice(ODD),
        assistant_turns=[i for i, role in enumerate(roles) if role == "assistant"],
        sample={"row": draw.choice(ODD), "é": draw.choice(ODD)},
        environment_return=draw.choice([None, 0.0, 1.5]),
        stop_reason=draw.choice([None, "max_steps"]),
        extra=draw.choice([{}, {"goal_description": "win"}, {"mine": draw.choice(ODD), "sample": {"of": "extra"}}]),
    )


def timeless(scored: list[Scored]) -> list[Scored]:
    return [replace(one, duration_s=0.0) for one in scored]


async def both(reward: Callable[..., Any], requests: list[ScoringRequest], size: int = 1) -> tuple[list[Scored], ...]:
    """Return the scores of the reward in this process and over HTTP."""
    async with server(reward) as asker:
        remote = await RemoteReward.connect(f"{asker.address}/v1/rewards/{reward_spec(reward).id}", api_key=KEY)
        found = []
        for scorer in (InProcessScorer(reward_spec(reward)), remote):
            async with AsyncRewardAgent(scorer) as agent:
                ticket = await agent.submit(requests, size)
                found.append(timeless((await agent.get(len(requests), ticket=ticket)).extra_infos))
    return tuple(found)


class TestEqualsInProcessScores:
    async def test_arbitrary_requests_score_equally(self) -> None:
        draw = random.Random(7)
        requests = [odd_request(draw, f"r{i}") for i in range(150)]
        here, there = await both(sees, requests)
        assert there == here
        assert len({one.result.reason for one in here if one.result}) > 140

    async def test_step_data_and_step_outputs_score_equally(self) -> None:
        actions = [call("look"), call("add", amount=2), {"type": "text", "content": "done"}]
        episode = await worker_of(actions, name="t").collect_episode()
        requests = [ScoringRequest.from_episode(episode, task_of(name="t")), ScoringRequest("bare", episode.messages)]
        here, there = await both(steps, requests)
        assert there == here
        assert here[0].result is not None and len(here[0].result.step_outputs or ()) == len(episode.assistant_turns) > 1

    async def test_final_states_of_every_kind_score_equally(self) -> None:
        database = sqlite3.connect(":memory:")
        database.execute("CREATE TABLE t AS SELECT 7 AS seven, 'x' AS letter")
        states = [
            None,
            StateSnapshot.from_json({"a": [1, None]}),
            StateSnapshot("sqlite", database.serialize()),
            StateSnapshot("sqlite", b"no database"),
            StateSnapshot("nosuch", b""),
        ]
        database.close()
        requests = [ScoringRequest(f"r{i}", [], final_state=state) for i, state in enumerate(states)]
        here, there = await both(looks, requests)
        assert there == here
        assert [one.score for one in here] == [0.0, 1.0, 1.0, None, None]

    async def test_batch_groups_with_failed_rollouts_score_equally(self) -> None:
        broke = Failure("timeout", "PolicyError", "it broke")
        requests = [
            ScoringRequest(f"r{i}", [Message(role="user")] * (i % 4), "fall" if i == 13 else i, sample={"i": i})
            for i in range(16)
        ]
        requests[1] = replace(requests[1], failure=broke)
        requests[8:12] = [replace(request, failure=broke) for request in requests[8:12]]
        here, there = await both(ranks, requests, 4)
        assert there == here
        assert [one.score for one in there[:4]] == [0.0, None, 0.2, None]
        assert {one.failure.message for one in there[12:] if one.failure} == {
            "reward 'ranks': ValueError: the whole group of 4 falls"
        }

    async def test_every_kind_of_failure_is_equal(self) -> None:
        truths = ["fine", "raise", "none", "nan", "invalid", "wrong step", "exit", None]
        requests = [ScoringRequest(name or "no truth", [], ground_truth=name) for name in truths]
        here, there = await both(fails, requests)
        assert there == here
        assert [one.failure and one.failure.failure_class for one in there] == [
            None,
            "crash",
            *["invalid_result"] * 4,
            *["crash"] * 2,
        ]

    async def test_class_with_post_processing_receives_whole_groups(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text(
            "class Mine:\n"
            "    def compute_score(self, data_source, solution_str, ground_truth, extra_info):\n"
            "        return float(len(solution_str))\n"
            "    def post_process_scores(self, scores):\n"
            "        return [score - min(scores) for score in scores]\n"
        )
        loaded = load_reward("mine.py:Mine", tmp_path, SandboxChoice("in_process"))
        requests = [ScoringRequest(f"r{n}", [Message(role="assistant", content="x" * n)], "") for n in (3, 1, 2)]
        async with serving([NamedReward("mine", loaded.reward)], Keys([KEY]), ServerOptions()) as running:
            remote = await RemoteReward.connect(f"{running.address}/v1/rewards/mine", api_key=KEY)
            async with AsyncRewardAgent(remote) as agent:
                there = await agent.get(3, ticket=await agent.submit(requests, 3))
        async with AsyncRewardAgent(make_scorer(loaded.reward)) as agent:
            here = await agent.get(3, ticket=await agent.submit(requests, 3))
        assert there.rewards == here.rewards == [2.0, 0.0, 1.0]
        assert [one.result.model_dump() for one in there.extra_infos if one.result] == [
            one.result.model_dump() for one in here.extra_infos if one.result
        ]

    async def test_concurrent_pointwise_rollouts_are_sent_in_batches_of_allowed_size(self) -> None:
        async with server(sees, max_batch=4) as asker:
            remote = await RemoteReward.connect(f"{asker.address}/v1/rewards/sees", api_key=KEY)
            requests = [ScoringRequest(f"r{i}", [Message(role="user")] * i) for i in range(11)]
            async with remote:
                scored = await remote.score_group(requests)
            figures = (await asker.get("/metrics")).body.decode()
        assert [one.score for one in scored] == [i / 100 for i in range(11)]
        assert 'requests_total{route="score_batch",status="200"} 3' in figures

    async def test_only_named_parameters_are_sent(self) -> None:
        @reward_function
        async def modest(messages):
            return {"score": 1.0}

        request = ScoringRequest("r", [], ground_truth={1, 2}, sample={"secret": object()}, extra={"mine": object()})
        async with server(modest) as asker:
            remote = await RemoteReward.connect(f"{asker.address}/v1/rewards/modest", api_key=KEY)
            async with remote:
                assert (await remote.score(request)).score == 1.0

    async def test_value_without_a_json_form_fails_only_its_rollout(self) -> None:
        async with server(sees) as asker:
            remote = await RemoteReward.connect(f"{asker.address}/v1/rewards/sees", api_key=KEY)
            async with remote:
                scored = await remote.score(ScoringRequest("r", [], ground_truth={1, 2}))
        assert scored.failure is not None and "a set cannot be converted to JSON" in scored.failure.message


class TestAddress:
    async def test_deadline_covers_the_whole_remote_call(self) -> None:
        @reward_function
        async def sleeps(messages):
            await anyio.sleep_forever()

        async with server(sleeps, shutdown_timeout_s=0.01) as asker:
            remote = await RemoteReward.connect(f"{asker.address}/v1/rewards/sleeps", api_key=KEY)
            async with make_scorer(remote, 0.05) as scorer:
                scored = await scorer.score(ScoringRequest("r", []))
        assert scored.failure is not None and scored.failure.failure_class == "timeout"
        assert "exceeded its deadline of 0.05 s" in scored.failure.message

    async def test_scorer_hash_covers_the_address_and_the_server_digest(self) -> None:
        async with server(sees, ranks) as asker:
            url = f"{asker.address}/v1/rewards/sees"
            remote = await RemoteReward.connect(f"{url}/", api_key=KEY)
            assert remote.url == url and remote.digest == scorer_hash(reward_spec(sees))
        changed = remote.about.model_copy(update={"digest": "another one"})
        elsewhere = [
            RemoteReward(url, changed, api_key=KEY),
            RemoteReward(f"{asker.address}/v1/rewards/other", remote.about, api_key=KEY),
        ]
        hashes = {scorer_hash(one) for one in (remote, RemoteReward(url, remote.about, api_key=KEY), *elsewhere)}
        assert len(hashes) == 3

    @pytest.mark.parametrize(
        ("url", "why"),
        [
            ("http://host/v1/reward/x", "is not the address of a reward"),
            ("http://host/v1/rewards/x?a=1", "is not the address of a reward"),
            ("http://host/v1/rewards/x/score", "is not the address of a reward"),
            ("http://host:99999/v1/rewards/x", "is not the address of a reward"),
            ("http:///v1/rewards/x", "is not the address of a reward"),
            ("ftp://host/v1/rewards/x", "is not the address of a reward"),
            ("https://me:hunter2@host/v1/rewards/x", "must not contain a user name or password"),
            (
                "https://host/v1/rewards/x?api_key=hunter2",
                "'https://host/v1/rewards/x…' is not the address of a reward;",
            ),
            ("https://host/v1/rewards/x#hunter2", "is not the address of a reward; remove everything after its path"),
        ],
    )
    async def test_invalid_reward_address_is_rejected(self, url: str, why: str) -> None:
        with pytest.raises(ConfigError, match=why) as caught:
            await RemoteReward.connect(url, api_key=KEY)
        assert "hunter2" not in str(caught.value)
        if url.startswith("http"):
            with pytest.raises(ConfigError, match=why) as caught:
                load_reward(url, None, SandboxChoice("warm"))
            assert "hunter2" not in str(caught.value)

    def test_unencrypted_connection_to_another_machine_is_noted(self) -> None:
        about = AboutBody(
            name="x", id="x", mode="pointwise", parameters=None, required=[], level="warm", digest="d" * 8,
            deadline_s=None, max_batch=1,
        )  # fmt: skip
        notes = {
            url: bool(reward_notes(RemoteReward(f"{url}/v1/rewards/x", about, api_key=KEY)))
            for url in ("http://10.0.0.1:8700", "https://host", "http://127.0.0.1:1", "http://localhost")
        }
        assert list(notes.values()) == [True, False, False, False]

    @pytest.mark.parametrize(
        ("choice", "options", "named"),
        [
            (SandboxChoice("warm"), {}, "sandbox.level"),
            (SandboxChoice(read_paths=("x",)), {}, "sandbox.read_paths"),
            (SandboxChoice(limits={"memory_mb": 64}), {}, "sandbox.limits"),
            (SandboxChoice(), {"a": 1}, "reward_options"),
        ],
    )
    def test_settings_decided_by_the_server_are_rejected(self, choice: SandboxChoice, options: Any, named: str) -> None:
        with pytest.raises(ConfigError, match=f"{named} has no effect on http://127.0.0.1:1/v1/rewards/x"):
            load_reward("http://127.0.0.1:1/v1/rewards/x", None, choice, options)

    def test_missing_key_error_names_the_variable(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        with pytest.raises(ConfigError, match=f"no key for http://127.0.0.1:1/v1/rewards/x; set {KEY_VARIABLE}"):
            load_reward("http://127.0.0.1:1/v1/rewards/x")
        monkeypatch.setenv(KEY_VARIABLE, "schlüssel-schlüssel")
        with pytest.raises(ConfigError, match="invalid in an HTTP header"):
            load_reward("http://127.0.0.1:1/v1/rewards/x")


FOREIGN = "https://Rewards.example:443/v1/rewards/x"


class TestKeyForTaskFileAddress:
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv(ORIGINS_VARIABLE, raising=False)
        monkeypatch.setenv(KEY_VARIABLE, KEY)

    async def test_key_is_not_sent_to_an_address_from_a_file(self, tmp_path: Path) -> None:
        asked: list[str] = []
        elsewhere = await asyncio.start_server(lambda reader, writer: asked.append("asked"), "0.0.0.0", 0)
        port = elsewhere.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/v1/rewards/x"  # this machine is no exception: a key is a key
        (tmp_path / "task.yaml").write_text(f"name: t\nreward_function_path: {url}\nresource_type: python_state\n")
        origin = f"http://127.0.0.1:{port}"
        expected = f"task.yaml:2: reward_function_path: {KEY_VARIABLE} is not configured for {origin}, and a file"
        with pytest.raises(ConfigError, match=expected) as caught:
            load_task(tmp_path / "task.yaml")
        elsewhere.close()
        assert f'export {ORIGINS_VARIABLE}="{KEY_VARIABLE}={origin}"' in str(caught.value)
        assert KEY not in str(caught.value) and not asked

    def test_key_is_sent_to_typed_and_configured_addresses(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(ORIGINS_VARIABLE, f"{KEY_VARIABLE}=http://127.0.0.1:1")
        (tmp_path / "task.yaml").write_text(
            "name: t\nreward_function_path: http://127.0.0.1:1/v1/rewards/x\nresource_type: python_state\n"
        )
        for overrides in ({}, {"reward_function_path": "http://127.0.0.2:1/v1/rewards/x"}):
            with pytest.raises(ConfigError, match=r"cannot be used: .* cannot be reached"):
                load_task(tmp_path / "task.yaml", overrides)

    @pytest.mark.parametrize(
        ("origins", "may"),
        [
            ("https://rewards.example", True),
            ("https://other.example https://rewards.example:443/", True),
            ("http://rewards.example", False),
            ("https://rewards.example:8443", False),
            ("https://rewards.example.evil", False),
            ("", False),
        ],
    )
    def test_configured_origin_must_match_scheme_host_and_port(
        self, origins: str, may: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(ORIGINS_VARIABLE, ",".join(f"{KEY_VARIABLE}={origin}" for origin in origins.split()))
        if may:
            check_named_by_file(FOREIGN)
        else:
            with pytest.raises(ConfigError, match=f"{KEY_VARIABLE} is not configured for https://rewards.example"):
                check_named_by_file(FOREIGN)

    @pytest.mark.parametrize("origins", ["rewards.example", "https://", "https://x:99999"])
    def test_invalid_configured_origin_is_reported(self, origins: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ORIGINS_VARIABLE, f"{KEY_VARIABLE}={origins}")
        with pytest.raises(ConfigError, match=f"{ORIGINS_VARIABLE}: {KEY_VARIABLE}=… is not a variable with an origin"):
            check_named_by_file(FOREIGN)

    def test_dotenv_cannot_configure_origins(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / ".env"
        file.write_text(f"{ORIGINS_VARIABLE}={KEY_VARIABLE}=https://rewards.example\n{KEY_VARIABLE}={KEY}\n")
        for _ in range(2):
            with pytest.raises(ConfigError, match="a file cannot send it there"):
                check_named_by_file(FOREIGN)
            monkeypatch.delenv(KEY_VARIABLE, raising=False)


def test_oversized_step_index_leaves_its_rollout_unscored() -> None:
    steps = [StepOutput(step_index=10**5000, base_reward=0.0)]
    output = json.loads(json.dumps(make_answer(Scored("r", EvaluateResult(score=1.0, step_outputs=steps)), "plain")))
    assert output["score"] is None and output["error"]["class"] == "invalid_result"
    assert output["error"]["message"] == "step_outputs: a step_index has more than 64 bits"


async def test_command_line_scores_transcripts_with_a_remote_reward(tmp_path: Path) -> None:
    rows = [{"id": f"q{n}", "messages": [{"role": "assistant", "content": "x"}] * n} for n in (1, 2, 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with server(sees) as asker:
        url = f"{asker.address}/v1/rewards/sees"
        env = {KEY_VARIABLE: KEY, "PATH": "/usr/bin:/bin", "NO_COLOR": "1"}

        def score() -> Any:
            return command("score", "rows.jsonl", "--reward", url, "--json", cwd=tmp_path, env=env)

        done = await anyio.to_thread.run_sync(score)
        assert done.returncode == 0, done.stderr
    check_files(tmp_path, url)


def check_files(folder: Path, url: str) -> None:
    (path,) = (folder / "runs").glob("*/scores.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["score"] for line in lines) == [0.01, 0.02, 0.03]
    told = hashlib.sha256(f"{url}\n{scorer_hash(reward_spec(sees))}".encode()).hexdigest()
    assert {(line["sandbox"]["level"], line["scorer"]["id"], line["scorer"]["hash"]) for line in lines} == {
        ("in_process", "sees", told)
    }
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 3 and not [file for file in files if KEY.encode() in file.read_bytes()]
