"""`compute_score` functions written for verl: arguments, results and scores of groups."""

from __future__ import annotations

import json
import logging
import re
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from reward_kit.errors import ConfigError, Failure, InvalidResultError, PolicyError
from reward_kit.models import Message
from reward_kit.providers.request_queue import Rates
from reward_kit.reward_agent import AsyncRewardAgent, Scored, ScoringRequest
from reward_kit.reward_agent.custom_rewards import CustomAnswer, build_spec, read_answer
from reward_kit.reward_agent.custom_scorer import GroupScorer
from reward_kit.reward_agent.loading import SandboxChoice, load_custom_reward, make_scorer
from reward_kit.reward_agent.sandboxed import SandboxedReward
from reward_kit.task_parts import SandboxLevel
from tests import command_line
from tests.cli.project import Project, lines

IN_PROCESS = SandboxChoice(level="in_process")

FORMS = """
import math

NAN = float("nan")
GIVEN = {"none": None, "nan": NAN, "half": 0.5}

def value_of(text):
    if text == "boom":
        raise ValueError("the judge is away")
    return GIVEN[text] if text in GIVEN else float(text)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return value_of(solution_str), f"asked of {data_source}", f"{ground_truth} {extra_info}"

async def awaited(data_source, solution_str, ground_truth, extra_info=None):
    return value_of(solution_str), "q", "r"

def with_bonus(solution_str, bonus: float = 0.0):
    return {"score": value_of(solution_str) + bonus, "query": "q", "length": len(solution_str)}

def of_many(data_sources, solution_strs, ground_truths, extra_infos):
    return [value_of(text) / len(solution_strs) for text in solution_strs]

class RewardAgent:
    def __init__(self):
        self.calls = []

    def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
        return value_of(solution_str), f"query {solution_str}", "said"

    def post_process_scores(self, scores):
        known = [score for score in scores if not math.isnan(score) and score >= 0]
        mean = sum(known) / len(known) if known else NAN
        return [mean if math.isnan(score) or score < 0 else score for score in scores]

class Awaited(RewardAgent):
    async def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
        return value_of(solution_str), f"query {solution_str}", "said"

    async def post_process_scores(self, scores):
        return RewardAgent.post_process_scores(self, scores)

class Shorter(RewardAgent):
    def post_process_scores(self, scores):
        return scores[1:]

class Raises(RewardAgent):
    def post_process_scores(self, scores):
        raise RuntimeError("no mean")

class Words(RewardAgent):
    def post_process_scores(self, scores):
        return ["high" for _ in scores]

class Forgets(RewardAgent):
    def post_process_scores(self, scores):
        return [None, *scores[1:]]
"""


def requests(*texts: str, **rest: Any) -> list[ScoringRequest]:
    return [
        ScoringRequest(f"r{i}", [Message(role="assistant", content=text)], ground_truth="g", **rest)
        for i, text in enumerate(texts)
    ]


def scorer(folder: Path, name: str, level: SandboxLevel = "in_process", text: str = FORMS) -> Any:
    (folder / "reward.py").write_text(textwrap.dedent(text))
    loaded = load_custom_reward("reward.py", name, folder=folder, choice=SandboxChoice(level=level))
    assert isinstance(loaded.reward, SandboxedReward) == (level != "in_process")
    return make_scorer(loaded.reward)


async def scored(made: Any, batch: Sequence[ScoringRequest], group_size: int = 1) -> list[Scored]:
    async with AsyncRewardAgent(made) as agent:
        ticket = await agent.submit(batch, group_size)
        del ticket
        return [each for _ in range(0, len(batch), group_size) for each in (await agent.get_group()).extra_infos]


def of_one(scored: Scored) -> Any:
    assert scored.result is not None
    return scored.result


@pytest.mark.parametrize("level", ["in_process", "warm"])
@pytest.mark.parametrize("name", ["compute_score", "awaited", "RewardAgent", "Awaited"])
async def test_both_forms_give_score_query_and_response_at_every_level(tmp_path: Path, name: str, level: Any) -> None:
    (found,) = await scored(scorer(tmp_path, name, level), requests("0.25"))
    assert (found.rollout_id, found.score, found.failure) == ("r0", 0.25, None)
    assert of_one(found).query and of_one(found).response and of_one(found).is_imputed is None


async def test_arguments_come_from_the_row_unless_the_trainer_sets_them(tmp_path: Path) -> None:
    row = {"question": "2 + 2?", "data_source": "sums", "ground_truth": "g", "extra_info": {"split": "test"}}
    own = {"data_source": "d", "solution_str": "0.5", "extra_info": {"mine": 1}}
    task = {"task_name": "my task"}
    batch = [*requests("1", sample=row), *requests("1", sample={}, extra=task), *requests("1", sample=row, extra=own)]
    first, second, third = await scored(scorer(tmp_path, "compute_score"), batch)
    assert of_one(first).query == "asked of sums"
    assert of_one(first).response == "g {'question': '2 + 2?', 'split': 'test'}"
    assert (of_one(second).query, of_one(second).response) == ("asked of my task", "g {}")
    assert (third.score, of_one(third).query, of_one(third).response) == (0.5, "asked of d", "g {'mine': 1}")


async def test_solution_str_contains_only_text_of_the_policy(tmp_path: Path) -> None:
    text = "def compute_score(solution_str): return 1.0, solution_str, None"
    talk = [("assistant", "an example"), ("user", "go"), ("assistant", "1"), ("tool", "99"), ("assistant", "2")]
    messages = [Message(role=role, content=content) for role, content in talk]  # type: ignore[arg-type]
    told = ScoringRequest("r", messages, assistant_turns=(2, 4))
    (found,) = await scored(scorer(tmp_path, "compute_score", text=text), [told])
    assert of_one(found).query == "1\n2"


async def test_additional_parameters_are_options(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(FORMS)
    loaded = load_custom_reward(
        "reward.py", "with_bonus", folder=tmp_path, choice=IN_PROCESS, reward_kwargs={"bonus": "0.5"}
    )
    (found,) = await scored(make_scorer(loaded.reward), requests("1"))
    assert (found.score, of_one(found).reason) == (1.5, '{"length": 1}')
    with pytest.raises(ConfigError, match="has no option 'bonis'; did you mean 'bonus'"):
        load_custom_reward("reward.py", "with_bonus", folder=tmp_path, choice=IN_PROCESS, reward_kwargs={"bonis": 1})


@pytest.mark.parametrize("level", ["in_process", "warm"])
async def test_plural_parameter_names_select_batch_mode(tmp_path: Path, level: Any) -> None:
    found = await scored(scorer(tmp_path, "of_many", level), requests("1", "none", "half", "2"), 2)
    # None / 2 raises, so the call of that group does; the other group has its scores.
    assert {each.rollout_id: each.score for each in found} == {"r0": None, "r1": None, "r2": 0.25, "r3": 1.0}


@pytest.mark.parametrize(
    ("returned", "score", "query"),
    [(1, 1.0, None), (True, 1.0, None), ((0.5, "q", "r"), 0.5, "q"), ([2, {"a": 1}, 3], 2.0, '{"a": 1}')],
)
def test_number_triple_and_mapping_results_are_accepted(returned: Any, score: float, query: str | None) -> None:
    found = read_answer(returned, "mine")
    assert (found.score, found.query, found.is_score_valid) == (score, query, True)
    told = {"query": query, "words": 3}
    mapped = read_answer({"score": score, **told}, "mine")
    assert (
        isinstance(mapped, CustomAnswer)
        and mapped.mapping_values == told
        and "mapping_values" not in mapped.model_dump()
    )
    assert mapped.model_dump(exclude={"reason"}) == read_answer((score, query, None), "mine").model_dump(
        exclude={"reason"}
    )
    assert mapped.reason == '{"words": 3}'


def test_numpy_scores_and_surrogates_are_accepted() -> None:
    numpy = pytest.importorskip("numpy")
    found = read_answer((numpy.float32(0.5), "a \ud800 b", None), "mine")
    assert found.score == 0.5 and found.query == "a \\ud800 b"
    json.dumps(found.model_dump(mode="json")).encode("ascii")


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("0.5", "str"),
        ((0.5, "q"), "2 values"),
        ({"reward": 1}, "without 'score'"),
        (float("inf"), "finite"),
        (10**400, "finite"),
        (("0.5", "q", "r"), "str"),
    ],
)
def test_other_results_are_rejected_with_a_message(returned: Any, told: str) -> None:
    with pytest.raises(InvalidResultError, match=told) as caught:
        read_answer(returned, "mine")
    assert str(caught.value).startswith("mine ")


@pytest.mark.parametrize("text", ["none", "nan"])
async def test_missing_score_is_unscored_and_not_zero(tmp_path: Path, text: str) -> None:
    (found,) = await scored(scorer(tmp_path, "compute_score"), requests(text))
    assert found.score is None and found.failure is not None and found.failure.failure_class == "invalid_result"
    assert "no score" in found.failure.message and of_one(found).query == "asked of None"


@pytest.mark.parametrize("level", ["in_process", "warm"])
@pytest.mark.parametrize("name", ["RewardAgent", "Awaited"])
async def test_scores_filled_in_by_the_group_are_marked_imputed(tmp_path: Path, name: str, level: Any) -> None:
    batch = requests("0.2", "none", "0.6", "boom", "-1", "nan")
    found = await scored(scorer(tmp_path, name, level), batch, 6)
    assert [each.score for each in found] == [0.2, *[pytest.approx(0.4)], 0.6, *[pytest.approx(0.4)] * 3]
    assert [of_one(each).is_imputed for each in found] == [None, True, None, True, None, True]
    assert [of_one(each).raw_score for each in found] == [None, None, None, None, -1.0, None]
    assert not any(each.failure for each in found)
    assert of_one(found[1]).query == "query none" and "the judge is away" in (of_one(found[3]).reason or "")


@pytest.mark.parametrize("level", ["in_process", "warm"])
async def test_group_without_any_score_is_not_imputed(tmp_path: Path, level: Any) -> None:
    found = await scored(scorer(tmp_path, "RewardAgent", level), requests("none", "boom"), 2)
    assert [each.score for each in found] == [None, None]
    assert [bool(each.failure) for each in found] == [True, True]
    assert found[1].failure is not None and "the judge is away" in found[1].failure.message


@pytest.mark.parametrize("level", ["in_process", "warm"])
@pytest.mark.parametrize(
    ("name", "why"),
    [("Shorter", "1 scores for 2"), ("Raises", "no mean"), ("Words", "a str as the score; return a list of")],
)
async def test_failed_post_processing_leaves_the_group_unscored(
    tmp_path: Path, name: str, why: str, level: Any
) -> None:
    found = await scored(scorer(tmp_path, name, level), requests("0.2", "0.4"), 2)
    for each in found:
        assert each.score is None and each.failure is not None and why in each.failure.message


@pytest.mark.parametrize("level", ["in_process", "warm"])
async def test_score_removed_by_post_processing_leaves_the_rollout_unscored(tmp_path: Path, level: Any) -> None:
    first, second = await scored(scorer(tmp_path, "Forgets", level), requests("0.2", "0.4"), 2)
    assert (first.score, second.score) == (None, 0.4) and of_one(first).raw_score == 0.2


@pytest.mark.parametrize("level", ["in_process", "warm"])
async def test_keyboard_interrupt_in_a_call_fails_only_that_call(tmp_path: Path, level: Any) -> None:
    text = "def compute_score(solution_str):\n if solution_str == 'stop': raise KeyboardInterrupt\n return 1.0"
    found = await scored(scorer(tmp_path, "compute_score", level, text), requests("stop", "go"))
    assert {each.rollout_id: each.score for each in found} == {"r0": None, "r1": 1.0}
    (failure,) = [each.failure for each in found if each.failure]
    assert "KeyboardInterrupt" in failure.message


async def test_failed_rollout_is_not_passed_to_post_processing(tmp_path: Path) -> None:
    broken = Failure.from_exception(PolicyError("no action"))
    batch = requests("0.2", "0.4", "0.6")
    batch[1] = ScoringRequest("r1", [], failure=broken)
    found = await scored(scorer(tmp_path, "RewardAgent"), batch, 3)
    assert [each.score for each in found] == [0.2, None, 0.6] and found[1].failure == broken


LIFE = """
log_of = []

class RewardAgent:
    requests_per_minute = 6000
    max_connections = 3

    def setup(self):
        log_of.append("setup")

    def compute_score(self, data_source, solution_str, ground_truth, extra_info):
        return float(solution_str), "q", "r"

    def log(self, solution_str, score, response):
        log_of.append((solution_str, score, response))
        raise OSError("disk full")

    async def close(self):
        log_of.append("close")
"""


async def test_reward_class_is_set_up_once_logged_per_call_and_closed_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = scorer(tmp_path, "RewardAgent", text=LIFE)
    assert made.mode == "pointwise" and made.rates == Rates(requests_per_minute=6000, max_connections=3)
    with caplog.at_level(logging.WARNING):
        found = await scored(made, requests("1", "2"))
    assert [each.score for each in found] == [1.0, 2.0], "a log that fails says nothing of a score"
    (module,) = [m for m in sys.modules.values() if getattr(m, "__file__", None) == str(tmp_path / "reward.py")]
    assert module.log_of[0] == "setup" and module.log_of[-1] == "close"
    assert sorted(module.log_of[1:-1]) == [("1", 1.0, "r"), ("2", 2.0, "r")]
    assert "disk full" in caplog.text


def test_invalid_rate_is_reported_with_its_class(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="RewardAgent: requests_per_minute: expected a number above 0, got 'many'"):
        scorer(tmp_path, "RewardAgent", text=LIFE.replace("6000", "'many'"))


def test_log_method_with_other_parameters_is_not_a_log_hook() -> None:
    class RewardAgent:
        def compute_score(self, solution_str: str) -> float:
            return self.log("called")

        def log(self, message: str) -> float:
            return 1.0

    spec = build_spec(RewardAgent)
    assert spec.function().score(messages=[Message(role="assistant", content="x")]).score == 1.0


async def test_calls_of_a_group_run_concurrently(tmp_path: Path) -> None:
    text = """
    import threading
    together = threading.Barrier(3, timeout=5)
    class RewardAgent:
        def compute_score(self, solution_str):
            together.wait()
            return 1.0
        def post_process_scores(self, scores):
            return scores
    """
    made = scorer(tmp_path, "RewardAgent", text=text)
    assert isinstance(made, GroupScorer)
    assert [each.score for each in await scored(made, requests("a", "b", "c"), 3)] == [1.0, 1.0, 1.0]
    (tmp_path / "alone").mkdir()
    async with scorer(tmp_path / "alone", "RewardAgent", text=text.replace("(3,", "(1,")) as alone:
        assert [each.score for each in await alone.score_group(requests("a", "b"))] == [1.0, 1.0]


IN_A_RUN = """
import os

class RewardAgent:
    def compute_score(self, data_source, solution_str, ground_truth, extra_info, strictness: int = 1):
        query = f"{extra_info['number']} {strictness} with {os.environ['JUDGE_API_KEY']}"
        return (1.0 if ground_truth == "done" else None), query, {"verdict": solution_str}

    def post_process_scores(self, scores):
        return [0.25 if score != score else score for score in scores]
"""


def test_task_accepts_verl_style_custom_reward_function(tmp_path: Path) -> None:
    named = {"path": "mine.py", "name": "RewardAgent", "reward_kwargs": {"strictness": 3}}
    project = Project(tmp_path, reward_function_path=None, custom_reward_function=named)
    (tmp_path / "mine.py").write_text(IN_A_RUN)
    done = project.call("run", "task.yaml", "--sandbox", "in_process", "--json", JUDGE_API_KEY="sk-a-long-secret")
    assert done.returncode == 0, done.stderr
    (policy,) = json.loads(done.stdout)["policies"]
    assert (policy["scored"], policy["imputed"], policy["errors"]) == (6, 4, {})
    found = lines(project.run_path() / "scores.jsonl")
    assert {(each["score"], each["result"].get("is_imputed")) for each in found} == {(1.0, None), (0.25, True)}
    assert {each["result"]["query"] for each in found} == {f"{n} 3 with (hidden)" for n in range(3)}
    assert {each["result"]["response"] for each in found} == {'{"verdict": "done"}'}
    assert {each["scorer"]["id"] for each in found} == {"RewardAgent"}


def test_both_forms_score_existing_transcripts(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(FORMS)
    rows = [{"id": f"t{n}", "messages": [{"role": "assistant", "content": "1"}], "ground_truth": "g"} for n in (0, 1)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("compute_score", "RewardAgent"):
        done = command_line.call("score", "talks.jsonl", "--reward", f"reward.py:{name}", "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["policies"][0]["score"]["mean"] == 1.0


def test_custom_reward_function_beside_reward_function_path_is_rejected(tmp_path: Path) -> None:
    project = Project(tmp_path, custom_reward_function={"path": "mine.py"})
    done = project.call("run", "task.yaml")
    assert done.returncode == 2 and "replaces reward_function_path" in done.stderr


async def test_call_retries_of_a_class_are_applied() -> None:
    asked: list[str] = []

    class Judge:
        call_retries: ClassVar[dict[str, float]] = {"max_attempts": 3, "base_s": 0.001}

        async def compute_score(self, solution_str: str) -> float:
            asked.append(solution_str)
            if solution_str == "0.5" and asked.count("0.5") < 3:
                raise ConnectionResetError("the endpoint hung up")
            if solution_str == "down":
                raise ConnectionRefusedError
            return float(solution_str)

    async with AsyncRewardAgent(build_spec(Judge)) as agent:
        await agent.submit(requests("0.5", "down", "mistake"))
        chunk = await agent.get(3)
        assert agent.stats.retries == 4
    assert chunk.rewards == [0.5, None, None] and asked.count("mistake") == 1
    down, mistake = (each.failure for each in chunk.extra_infos[1:])
    assert down is not None and down.failure_class == "provider_error" and down.message.endswith("; 3 attempts")
    assert mistake is not None and mistake.failure_class == "crash"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            6,
            "Judge.call_retries must be a mapping with some of the keys max_attempts, budget_s, base_s, cap_s, "
            "got an int",
        ),
        ({"attempts": 6}, "Judge.call_retries: unknown key 'attempts'; did you mean 'max_attempts'?"),
        ({"max_attempts": 2.5}, "Judge.call_retries['max_attempts']: expected a whole number above 0, got 2.5"),
    ],
)
def test_invalid_call_retries_are_rejected(given: Any, told: str) -> None:
    class Judge:
        call_retries = given

        def compute_score(self, solution_str: str) -> float:
            return 1.0

    with pytest.raises(ConfigError, match=re.escape(told)):
        AsyncRewardAgent(build_spec(Judge))


async def test_agent_calls_a_class_concurrently_per_rollout_and_once_per_group() -> None:
    together, seen = threading.Barrier(3, timeout=30), []

    class Judge:
        requests_per_minute, max_connections = 6000, 3

        def compute_score(self, solution_str: str) -> tuple[float, str, str]:
            together.wait()
            return float(solution_str), "asked", "answered"

        def post_process_scores(self, scores: list[float]) -> list[float]:
            seen.append(scores)
            return [score - min(scores) for score in scores]

    async with AsyncRewardAgent(build_spec(Judge)) as agent:
        assert isinstance(agent.scorer, GroupScorer)
        assert agent.scorer.rates == Rates(requests_per_minute=6000, max_connections=3)
        await agent.submit(requests("3", "1", "2"), group_size=3)
        assert (await agent.get(3)).rewards == [2.0, 0.0, 1.0]
    assert seen == [[3.0, 1.0, 2.0]]
