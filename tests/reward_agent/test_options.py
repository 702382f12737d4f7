"""Options of a reward where they are given: in a task file or at loading, at every level, built-in rewards included."""

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
async def test_options_hold_at_every_level(tmp_path, level):
    (tmp_path / "mine.py").write_text(FILE)
    loaded = load_reward("mine.py:short", tmp_path, SandboxChoice(level), {"longest": 5, "words": ["a"]})
    async with make_scorer(loaded.reward) as scorer:
        for text, wanted in (("abcde", 1.0), ("abcdef", 0.0), ("bcd", 0.0)):
            assert (await scorer.score(request(text))).score == wanted


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("options", "problem"), [({"longset": 5}, "did you mean 'longest'"), ({"longest": "x"}, "expected a whole number")]
)
def test_an_option_that_does_not_fit_is_told_when_the_reward_is_loaded(tmp_path, level, options, problem):
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(ConfigError, match=problem):
        load_reward("mine.py:short", tmp_path, SandboxChoice(level), options)


def test_an_option_that_has_no_json_form_cannot_pass_the_walls(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(ConfigError, match="to the sandbox"):
        load_reward("mine.py:short", tmp_path, SandboxChoice("warm"), {"words": {"a"}})


def test_a_task_file_gives_options(tmp_path):
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


async def test_a_built_in_reward_runs_here_unless_it_parses_what_a_model_wrote():
    exact = load_reward("reward_kit.rewards:exact_answer").reward
    mathematics = load_reward("reward_kit.rewards:math_answer", options={}).reward
    async with make_scorer(exact) as scorer:
        scored = await scorer.score(request("Paris", "Paris"))
        assert (scored.score, scored.sandbox["level"]) == (1.0, "in_process")
    async with make_scorer(mathematics) as scorer:
        scored = await scorer.score(request(r"\boxed{x+1}", "1+x"))
        assert (scored.score, scored.sandbox["level"]) == (1.0, "warm")


def test_what_a_built_in_reward_needs_is_imported_once(tmp_path):
    found = built_in_imports("reward_kit.rewards.math_answer")
    assert {"reward_kit.rewards.math_answers", "math_verify"} <= found
    assert built_in_imports("reward_kit.rewards.nothing") == set()
    mine = tmp_path / "mine.py"
    mine.write_text("from reward_kit.rewards import math_answer, weighted\nevaluate = weighted(a=math_answer)\n")
    assert {"reward_kit.rewards.combinators", "math_verify"} <= collect_sources(
        mine, user_module_name(mine), [tmp_path]
    ).imports


def test_options_are_part_of_what_scored(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    hashes = {
        scorer_hash(load_reward("mine.py:short", tmp_path, SandboxChoice("warm"), options).reward)
        for options in ({}, {"longest": 5}, {"longest": 6})
    }
    assert len(hashes) == 3


TESTS = {"function": "solve", "tests": [{"args": [2], "expected": 4}]}
ELSEWHERE = [SandboxChoice("warm"), SandboxChoice("isolated")]


class TestWhatCallsOut:
    async def test_it_runs_in_this_process_and_what_the_model_wrote_does_not(self):
        loaded = load_reward("reward_kit.rewards:python_code", options={"time_s": 2})
        async with make_scorer(loaded.reward) as scorer:
            scored = await scorer.score(request("```python\ndef solve(x):\n    return x * x\n```", TESTS))
        assert (scored.score, scored.sandbox["level"]) == (1.0, "in_process"), scored

    @pytest.mark.parametrize("choice", ELSEWHERE)
    def test_other_walls_are_refused(self, choice):
        with pytest.raises(ConfigError, match="calls out"):
            load_reward("reward_kit.rewards:python_code", choice=choice)

    def test_a_judge_without_a_key_is_told_before_the_first_rollout(self, monkeypatch):
        monkeypatch.delenv("NO_SUCH_KEY", raising=False)
        options = {"model": "m", "client": {"api_key_env": "NO_SUCH_KEY"}, "rubric": {"good": "Is it good?"}}
        with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
            load_reward("reward_kit.rewards:llm_judge", options=options)
        monkeypatch.setenv("NO_SUCH_KEY", "k")
        assert load_reward("reward_kit.rewards:llm_judge", options=options).reward.id == "llm_judge"
