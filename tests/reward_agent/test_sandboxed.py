"""Sandboxed rewards give the same results as in process, and their code never runs outside."""

from __future__ import annotations

import asyncio
import sqlite3
import textwrap
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reward_kit.environments.base import StateSnapshot
from reward_kit.errors import ConfigError
from reward_kit.models import Message
from reward_kit.reward_agent import ScoringRequest
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.sandboxed import SandboxedScorer
from reward_kit.sandbox import host
from reward_kit.sandbox.host import Availability, ChildSession
from tests.agent.resources import COUNTER, call, calls, worker_of
from tests.profiles import examples

LEVELS = ("in_process", "warm", "isolated")
CHAT = [Message(role="user", content="2+2?"), Message(role="assistant", content="4")]

HONEST = """
from __future__ import annotations
from reward_kit import EvaluateResult, Message, MetricResult, StepOutput, reward_function
from helpers.text import words

@reward_function
def honest(messages: list[Message], ground_truth, assistant_turns, sample, stop_reason, **others) -> EvaluateResult:
    last = messages[-1]
    if last.text.startswith("!"):
        raise ValueError(f"cannot read {last.text}")
    steps = [StepOutput(step_index=i, base_reward=0.1 * len(words(messages[t]))) for i, t in enumerate(assistant_turns)]
    told = sorted((name, value) for name, value in others.items() if name not in ("step_data", "state"))
    return EvaluateResult(
        score=len(words(last)) / 3 + float(last.text == ground_truth),
        reason=f"{last.to_chat()} {ground_truth!r} {sample!r} {stop_reason} {told}",
        metrics={"m": MetricResult(score=0.5, reason=last.role)},
        step_outputs=steps,
    )
"""


def write(folder: Path, text: str, name: str = "reward.py") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def load(folder: Path, name: str, level: str | None = "warm", file: str = "reward.py", **choice: object):
    return load_reward(f"{file}:{name}", folder, SandboxChoice(level=level, **choice))


async def score_all(reward, *requests):
    async with make_scorer(reward) as scorer:
        return [await scorer.score(request) for request in requests]


async def score(folder: Path, name: str = "reward", level: str = "warm", request=None, **choice: object):
    loaded = await asyncio.to_thread(load, folder, name, level, **choice)
    (scored,) = await score_all(loaded.reward, request or ScoringRequest("r1", CHAT, "4", [1]))
    return scored


@pytest.mark.parametrize("level", LEVELS)
async def test_message_that_is_used_as_a_dict_gets_a_hint(tmp_path, level):
    text = ""
    for name, access in (("item", "['content']"), ("get", ".get('content')")):
        for suffix, annotation in (("", ""), ("_dict", ": list[dict]")):
            text += f"def {name}{suffix}(messages{annotation}):\n    return messages[-1]{access} == '4'\n"
    write(tmp_path, text)
    for name in ("item", "get"):
        message = (await score(tmp_path, name, level=level)).failure.message
        assert "'Message' object" in message and "annotate the parameter as messages: list[dict]" in message
        assert (await score(tmp_path, f"{name}_dict", level=level)).score == 1.0


class TestLevels:
    texts = st.one_of(st.sampled_from(["", "!x", "4", "a b"]), st.text(max_size=30))
    tool_call = st.builds(lambda a: {"id": "1", "type": "function", "function": {"name": "f", "arguments": a}}, texts)
    parts = st.lists(st.builds(lambda text: {"type": "text", "text": text, "n": 1}, texts), max_size=3)
    messages = st.builds(
        lambda content, tool_calls, extra: Message(
            role="assistant", content=content, tool_calls=tool_calls or None, **extra
        ),
        st.one_of(st.none(), texts, parts),
        st.lists(tool_call, max_size=2),
        st.sampled_from([{}, {"origin": {"row": 1.5}}, {"reasoning_content": "so"}]),
    )
    plain = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    )

    async def test_reward_gives_the_same_result_at_every_level(self, tmp_path):
        write(tmp_path, HONEST)
        write(tmp_path, "from .inner import split\ndef words(message): return split(message.text)\n", "helpers/text.py")
        write(tmp_path, "def split(text): return text.split()\n", "helpers/inner.py")

        @settings(max_examples=examples(25), deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(self.messages, min_size=1, max_size=4), self.plain, st.dictionaries(st.text(), self.plain))
        def same(messages, truth, sample):
            turns = list(range(len(messages)))
            requests.append(ScoringRequest("r1", messages, truth, turns, sample=sample, stop_reason="answered"))

        requests = [ScoringRequest("r1", [Message(role="assistant", content="!x")], None, [0])]
        same()
        loaded = [await asyncio.to_thread(load, tmp_path, "honest", level) for level in LEVELS]
        scores = [await score_all(one.reward, *requests) for one in loaded]
        for here, warm, isolated in zip(*scores, strict=True):
            assert here.result == warm.result == isolated.result
            assert here.failure == warm.failure == isolated.failure
            assert [scored.sandbox["level"] for scored in (here, warm, isolated)] == list(LEVELS)
        assert {here.failure is None for here in scores[0]} == {True, False}


@pytest.mark.parametrize("level", LEVELS)
class TestArguments:
    async def test_final_states_and_steps_are_passed(self, tmp_path, level):
        write(
            tmp_path,
            """
            from reward_kit import StepData
            def of_steps(messages, step_data: list[StepData], state):
                kinds = [step.action_taken["type"] for step in step_data]
                return {"score": state["total"], "reason": f"{kinds} {len(step_data[-1].resulting_messages_history)}"}
            def of_database(messages, state):
                return {"score": float(state.query("SELECT x FROM t")[0][0]), "reason": str(state.tables())}
            """,
        )
        worker = worker_of([calls(("add", {}), ("add", {})), call("win")], resource_type=COUNTER)
        scored = await score(tmp_path, "of_steps", level, ScoringRequest.from_episode(await worker.collect_episode()))
        assert (scored.score, scored.result.reason) == (2.0, "['tool_calls', 'tool_call'] 6")
        connection = sqlite3.connect(":memory:")
        connection.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (7);")
        state = StateSnapshot("sqlite", connection.serialize())
        connection.close()
        scored = await score(tmp_path, "of_database", level, ScoringRequest("r1", CHAT, final_state=state))
        assert (scored.score, scored.result.reason) == (7.0, "['t']")

    async def test_large_states_are_passed(self, tmp_path, level):
        write(tmp_path, "def reward(messages, state): return {'score': float(len(state['text']))}")
        state = StateSnapshot.from_json({"text": "x" * 5_000_000})
        assert (await score(tmp_path, level=level, request=ScoringRequest("r", CHAT, final_state=state))).score == 5e6

    async def test_async_batch_and_class_rewards_run(self, tmp_path, level):
        write(
            tmp_path,
            """
            import asyncio, pathlib
            from reward_kit import reward_function
            async def waits(messages):
                await asyncio.sleep(0.001)
                return {"score": 1.0}
            @reward_function(mode="batch")
            def batch(rollouts_messages: list[list[dict]], ground_truths):
                pairs = zip(rollouts_messages, ground_truths)
                return [{"score": float(messages[-1]["content"] == truth)} for messages, truth in pairs]
            @reward_function
            class Counts:
                def __init__(self): self.calls = 0
                async def setup(self): self.calls += 10
                def score(self, messages, limit=pathlib.Path("x")):
                    self.calls += 1
                    return {"score": float(self.calls)}
            """,
        )
        for name in ("waits", "batch"):
            assert (await score(tmp_path, name, level)).score == 1.0
        reward = (await asyncio.to_thread(load, tmp_path, "Counts", level)).reward
        request = ScoringRequest("r1", CHAT)
        scores = [scored.score for scored in await score_all(reward, request, request)]
        assert scores == ([11.0, 11.0] if level == "isolated" else [11.0, 12.0])

    async def test_resources_are_opened_once_per_worker_and_closed(self, tmp_path, level):
        log = tmp_path / "log"
        write(
            tmp_path,
            f"""
            import contextlib
            from reward_kit import reward_function
            opened = []
            @contextlib.contextmanager
            def judge():
                opened.append("judge")
                yield "a judge"
                note("judge closed")
            def note(text):
                with contextlib.suppress(OSError), open({str(log)!r}, "a") as file:
                    file.write(text + "\\n")
            @reward_function(resources={{"judge": judge, "plain": [1], "table": "tables.py:Table"}})
            def reward(messages, judge, plain, table):
                return {{"score": float(len(opened)), "reason": f"{{judge}} {{plain}} {{table.rows}}"}}
            """,
        )
        write(tmp_path, "class Table:\n    rows = 3\n    def close(self): print('table closed')\n", "tables.py")
        reward = (await asyncio.to_thread(load, tmp_path, "reward", level)).reward
        request = ScoringRequest("r1", CHAT)
        found = await score_all(reward, request, request)
        assert [(scored.score, scored.result.reason) for scored in found] == [(1.0, "a judge [1] 3")] * 2
        assert log.exists() == (level == "in_process")
        if level == "isolated":
            assert found[0].stdout == "table closed\n"


async def test_warm_worker_is_closed_after_its_last_call(tmp_path, monkeypatch):
    write(
        tmp_path,
        """
        class Reward:
            def score(self, messages): return {"score": 1.0}
            def close(self): print("closed")
        """,
    )
    loaded = await asyncio.to_thread(load, tmp_path, "Reward")
    outcomes = []
    call = ChildSession.call

    async def watched(self, *arguments):
        outcomes.append(await call(self, *arguments))
        return outcomes[-1]

    monkeypatch.setattr(ChildSession, "call", watched)
    await score_all(loaded.reward, ScoringRequest("r1", CHAT), ScoringRequest("r2", CHAT))
    assert [outcome.stdout for outcome in outcomes] == ["", "", "closed\n"]


class TestLoading:
    def test_loading_does_not_execute_the_file_in_process(self, tmp_path):
        marker = tmp_path / "marker"
        write(tmp_path, f"open({str(marker)!r}, 'w').close()\ndef reward(messages): return None\n")
        with pytest.raises(ConfigError, match=r"cannot be imported: (FileNotFound|Permission|OS)Error"):
            load(tmp_path, "reward", None)
        assert not marker.exists()
        load(tmp_path, "reward", "in_process")
        assert marker.exists()

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("x = 1\nraise ValueError('odd')\n", r"ValueError: odd\n  .*reward\.py:2 in <module>"),
            ("def reward(messages:\n", r"SyntaxError"),
            ("def rewards(messages): pass\n", r"has no 'reward'; did you mean 'rewards'\?"),
            ("def reward(message): pass\n", r"a pointwise reward needs the parameter 'messages'"),
            ("import os\nos._exit(3)\n", r"cannot be loaded in the sandbox: the process exited with status 3"),
            ("from elsewhere import x\n", r"No module named 'elsewhere'"),
        ],
    )
    def test_loading_error_reports_the_reason(self, tmp_path, source, message):
        write(tmp_path, source)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, "reward")

    def test_code_can_raise_but_not_lower_its_sandbox_level(self, tmp_path):
        text = "from reward_kit import reward_function\n@reward_function(sandbox={!r})\ndef reward(messages): pass\n"
        write(tmp_path, text.format("isolated"))
        assert load(tmp_path, "reward", None).reward.level == "isolated"
        assert load(tmp_path, "reward", "warm").reward.level == "warm"
        write(tmp_path, text.format("in_process"))
        loaded = load(tmp_path, "reward", None)
        assert loaded.reward.level == "warm"
        assert "code cannot lower its own sandbox level" in loaded.notes[0]

    async def test_declared_paths_are_readable_and_import_output_is_not_in_calls(self, tmp_path):
        data = write(tmp_path, "7", "data.json")
        text = "import json, pathlib\nprint('loading')\n"
        text += "X = json.loads((pathlib.Path(__file__).parent / 'data.json').read_text())\n"
        write(tmp_path, text + "def reward(messages): print('called'); return {'score': X}\n")
        with pytest.raises(ConfigError, match=r"hidden in the sandbox; add the file to sandbox.read_paths|Permission"):
            await asyncio.to_thread(load, tmp_path, "reward")
        loaded = await asyncio.to_thread(load, tmp_path, "reward", "warm", read_paths=(data.name,))
        assert loaded.notes == ("loading",)
        (scored,) = await score_all(loaded.reward, ScoringRequest("r1", CHAT))
        assert (scored.score, scored.stdout) == (7.0, "called\n")

    def test_user_module_is_found_without_importing_it(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(tmp_path)
        write(tmp_path, "raise SystemExit('imported here')\n", "my_rewards/__init__.py")
        write(tmp_path, "def reward(messages): return {'score': 1.0}\n", "my_rewards/one.py")
        with pytest.raises(ConfigError, match="SystemExit: imported here"):
            load_reward("my_rewards.one:reward", tmp_path)
        write(tmp_path, "", "my_rewards/__init__.py")
        assert load_reward("my_rewards.one:reward", tmp_path).reward.origin.file == tmp_path / "my_rewards/one.py"

    def test_symlinks_and_names_cannot_reach_files_outside_the_folder(self, tmp_path):
        write(tmp_path, "KEY = 'secret'\n", "private.py")
        write(tmp_path, "import linked\ndef reward(messages): pass\n", "theirs/reward.py")
        (tmp_path / "theirs" / "linked.py").symlink_to(tmp_path / "private.py")
        with pytest.raises(ConfigError, match="No module named 'linked'"):
            load(tmp_path / "theirs", "reward")
        write(
            tmp_path,
            "from reward_kit import reward_function\n@reward_function(resources={'key': '../private.py:KEY'})\n"
            "def reward(messages, key): return {'score': 1.0, 'reason': key}\n",
            "theirs/reward.py",
        )
        assert "secret" not in load(tmp_path / "theirs", "reward").reward.program.source

    @pytest.mark.parametrize("level", [None, "warm"])
    def test_machine_without_a_sandbox_runs_rewards_in_process_with_a_note(self, tmp_path, monkeypatch, level):
        none = {s: Availability(s, False, "there are none") for s in host.STRENGTHS}
        monkeypatch.setattr(host, "_known", none)
        write(tmp_path, "def reward(messages): return {'score': 1.0}\n")
        loaded = load(tmp_path, "reward", level)
        assert len(loaded.notes) == 1 and "runs in_process, without a sandbox" in loaded.notes[0]
        (scored,) = asyncio.run(score_all(loaded.reward, ScoringRequest("r1", CHAT)))
        assert (scored.score, scored.sandbox) == (1.0, {"level": "in_process", "asked": "warm"})
        with pytest.raises(ConfigError, match=r"there are none.*reward-kit doctor"):
            load(tmp_path, "reward", "isolated")


async def test_cancelled_call_leaves_no_worker(tmp_path):
    write(tmp_path, "import time\ndef reward(messages): time.sleep(60)\n")
    loaded = await asyncio.to_thread(load, tmp_path, "reward")
    async with SandboxedScorer(loaded.reward) as scorer:
        with anyio.move_on_after(0.3) as scope:
            await scorer.score(ScoringRequest("r1", CHAT))
        assert scope.cancelled_caught
        assert not scorer._sandbox._warm
