"""Options of a reward in task files and at loading, at every sandbox level."""

from __future__ import annotations

import pytest

from reward_kit import Message
from reward_kit.errors import ConfigError
from reward_kit.loading import user_module_name
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.reward_agent.sources import built_in_imports, collect_sources
from reward_kit.runs.inputs import scorer_hash
from reward_kit.runs.tasks import load_task

FILE = """
from reward_kit import EvaluateResult, Message, reward_function

@reward_function
def short(messages: list[Message], *, longest: int = 3, words: tuple[str, ...] = ()) -> EvaluateResult:
    text = messages[-1].text
    return EvaluateResult(score=float(len(text) <= longest and all(word in text for word in words)))
"""
LEVELS = ["in_process", "warm", "isolated"]


def request(text: str, truth: object = None) -> ScoringRequest:
    return ScoringRequest("r", [Message(role="assistant", content=text)], truth)


@pytest.mark.parametrize("level", LEVELS)
async def test_options_apply_at_every_sandbox_level(tmp_path, level):
    (tmp_path / "mine.py").write_text(FILE)
    loaded = load_reward("mine.py:short", tmp_path, SandboxChoice(level), {"longest": 5, "words": ["a"]})
    async with make_scorer(loaded.reward) as scorer:
        for text, wanted in (("abcde", 1.0), ("abcdef", 0.0), ("bcd", 0.0)):
            assert (await scorer.score(request(text))).score == wanted


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("options", "problem"), [({"longset": 5}, "did you mean 'longest'"), ({"longest": "x"}, "expected a whole number")]
)
def test_invalid_option_is_reported_at_loading(tmp_path, level, options, problem):
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(ConfigError, match=problem):
        load_reward("mine.py:short", tmp_path, SandboxChoice(level), options)


def test_option_without_a_json_form_is_rejected_in_the_sandbox(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(ConfigError, match="to the sandbox"):
        load_reward("mine.py:short", tmp_path, SandboxChoice("warm"), {"words": {"a"}})


def test_task_file_sets_reward_options(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    task = tmp_path / "task.yaml"
    text = "name: t\nreward_function_path: mine.py:short\nreward_options: {longest: 7}\ninitial_user_prompt: go\n"
    task.write_text(text)
    assert load_task(task, {"sandbox.level": "in_process"}).reward.options == {"longest": 7}
    task.write_text(text.replace("longest", "longset"))
    with pytest.raises(ConfigError, match=r"task\.yaml:3: reward_options\.longset: "):
        load_task(task)
    task.write_text("name: t\nreward_options: {longest: 7}\ninitial_user_prompt: go\n")
    with pytest.raises(ConfigError, match="reward_options has no effect"):
        load_task(task)


async def test_built_in_reward_runs_in_process_unless_it_parses_model_output():
    exact = load_reward("reward_kit.rewards:exact_answer").reward
    mathematics = load_reward("reward_kit.rewards:math_answer", options={}).reward
    async with make_scorer(exact) as scorer:
        scored = await scorer.score(request("Paris", "Paris"))
        assert (scored.score, scored.sandbox["level"]) == (1.0, "in_process")
    async with make_scorer(mathematics) as scorer:
        scored = await scorer.score(request(r"\boxed{x+1}", "1+x"))
        assert (scored.score, scored.sandbox["level"]) == (1.0, "warm")


def test_imports_of_built_in_rewards_are_preloaded(tmp_path):
    found = built_in_imports("reward_kit.rewards.math_answer")
    assert {"reward_kit.rewards.math_answers", "math_verify"} <= found
    assert built_in_imports("reward_kit.rewards.nothing") == set()
    mine = tmp_path / "mine.py"
    mine.write_text("from reward_kit.rewards import math_answer, weighted\nevaluate = weighted(a=math_answer)\n")
    assert {"reward_kit.rewards.combinators", "math_verify"} <= collect_sources(
        mine, user_module_name(mine), [tmp_path]
    ).imports


def test_scorer_hash_includes_options(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    hashes = {
        scorer_hash(load_reward("mine.py:short", tmp_path, SandboxChoice("warm"), options).reward)
        for options in ({}, {"longest": 5}, {"longest": 6})
    }
    assert len(hashes) == 3


TESTS = {"function": "solve", "tests": [{"args": [2], "expected": 4}]}
ELSEWHERE = [SandboxChoice("warm"), SandboxChoice("isolated")]


class TestNetworkRewards:
    async def test_network_reward_runs_in_process(self):
        loaded = load_reward("reward_kit.rewards:python_code", options={"time_s": 2})
        async with make_scorer(loaded.reward) as scorer:
            scored = await scorer.score(request("```python\ndef solve(x):\n    return x * x\n```", TESTS))
        assert (scored.score, scored.sandbox["level"]) == (1.0, "in_process"), scored

    @pytest.mark.parametrize("choice", ELSEWHERE)
    def test_network_reward_rejects_sandbox_levels(self, choice):
        with pytest.raises(ConfigError, match="calls other services"):
            load_reward("reward_kit.rewards:python_code", choice=choice)

    def test_missing_judge_key_is_reported_at_loading(self, monkeypatch):
        monkeypatch.delenv("NO_SUCH_KEY", raising=False)
        options = {"model": "m", "client": {"api_key_env": "NO_SUCH_KEY"}, "rubric": {"good": "Is it good?"}}
        with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
            load_reward("reward_kit.rewards:llm_judge", options=options)
        monkeypatch.setenv("NO_SUCH_KEY", "k")
        assert load_reward("reward_kit.rewards:llm_judge", options=options).reward.id == "llm_judge"
