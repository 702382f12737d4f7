"""Reward functions as the documentation of reward-kit 0.4 teaches them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, List, Optional  # noqa: UP035 - as in 0.4

import anyio
import pytest
from click.testing import CliRunner

import reward_kit
import reward_protocol
from reward_kit import (
    EvaluateResult,
    Message,
    MetricResult,
    RewardFunction,
    StepOutput,
    load_jsonl,
    reward_fn_to_scorer,
    scorer_to_reward_fn,
)
from reward_kit.agent.models import StepData
from reward_kit.cli.main import program
from reward_kit.errors import ConfigError, InvalidResultError
from reward_kit.reward_function import reward_function
from reward_kit.rl_processing import RLDataAligner
from reward_kit.server import ASGIApp, create_app
from reward_kit.typed_interface import EvaluationMode

CHAT = [{"role": "user", "content": "Say more."}, {"role": "assistant", "content": "For example, specifically this."}]


@reward_function
def specific(messages: List[Dict[str, Any]], original_messages: Optional[List[Dict[str, Any]]] = None, **kwargs: Any):  # noqa: UP006, UP045
    words, marks = messages[-1]["content"].split(), ["specifically", "for example"]
    found = sum(mark in messages[-1]["content"].lower() for mark in marks)
    metrics = {
        "length": MetricResult(score=min(len(words) / 10, 1.0), success=len(words) > 10, reason=f"{len(words)} words"),
        "specific": MetricResult(score=found / 2, success=found > 0, reason=f"{found} marks"),
    }
    return EvaluateResult(score=metrics["specific"].score, reason="combined", metrics=metrics)


@reward_function
def called(messages: list[Message] | list[dict[str, Any]], ground_truth: dict[str, Any] | None = None, **kwargs):
    return EvaluateResult(score=messages[-1].content == (ground_truth or {}).get("text"), reason="compared", metrics={})


@reward_function
def anything(*args, **kwargs) -> EvaluateResult:
    return EvaluateResult(score=len(kwargs["messages"]), reason=kwargs.get("extra"))


def test_metrics_take_success_which_has_no_effect() -> None:
    result = specific(messages=CHAT)
    assert result["score"] == 1.0
    assert result["metrics"]["length"].is_score_valid is True
    assert "success" not in result["metrics"]["length"]
    assert MetricResult.model_validate({"score": 1.0, "reason": "", "success": False}).is_score_valid is True


def test_comparison_result_becomes_a_score() -> None:
    assert called(messages=CHAT, ground_truth={"text": CHAT[-1]["content"]}).score == 1.0
    assert called(messages=CHAT).score == 0.0


def test_function_with_args_gets_everything_by_name() -> None:
    assert anything(messages=CHAT, extra="more") == EvaluateResult(score=2.0, reason="more")


def test_step_metric_can_be_a_number() -> None:
    output = StepOutput(step_index=0, base_reward=0.5, metrics={"accuracy": 0.9})
    assert output.metrics == {"accuracy": 0.9}
    step = StepData(system_step_index=0, observation_data=[], action_taken={}, resulting_messages_history=[])
    step.step_info["assistant_turn_index"] = 0
    result = EvaluateResult(score=1.0, step_outputs=[output])
    (aligned,) = RLDataAligner().align_data_for_rl_processing(result, [step], "r")
    assert aligned.step_info["metrics"] == {"accuracy": 0.9}
    with pytest.raises(ValueError, match="a score must be a number, got a str"):
        StepOutput(step_index=0, base_reward=0.5, metrics={"accuracy": "high"})


def test_module_reward_function_leaves_the_decorator_callable() -> None:
    assert reward_kit.reward_function(specific)(messages=CHAT).score == 1.0
    mode: EvaluationMode = "batch"
    together = reward_kit.reward_function(mode=mode)(
        lambda rollouts_messages, **kwargs: [0.5 for _ in rollouts_messages]
    )
    assert [result.score for result in together(rollouts_messages=[CHAT, CHAT])] == [0.5, 0.5]


def test_local_reward_function_object_scores() -> None:
    def plain(messages, ground_truth=None, **kwargs):
        return EvaluateResult(score=len(ground_truth), reason=kwargs.get("why"))

    assert RewardFunction(func=plain, mode="local", why="fixed")(CHAT) == EvaluateResult(score=1.0, reason="fixed")
    assert RewardFunction(func_path=f"{__name__}:specific")(messages=CHAT).score == 1.0


@pytest.mark.parametrize("mode", ["remote", "fireworks_hosted"])
def test_removed_parts_of_reward_function_name_the_migration_page(mode: str) -> None:
    with pytest.raises(ValueError, match=r"docs/migrating/reward_kit\.md"):
        RewardFunction(mode=mode, endpoint="https://example.com/reward")


@pytest.mark.parametrize("name", ["make", "rollout", "auth", "config"])
def test_removed_names_can_be_imported_and_name_the_migration_page(name: str) -> None:
    removed = getattr(reward_protocol, name)
    assert removed is getattr(reward_kit, name)
    assert not hasattr(removed, "__wrapped__")
    for use in (removed, lambda: removed.anything):
        with pytest.raises(ConfigError, match=rf"reward_kit\.{name} was removed: .*docs/migrating/reward_kit\.md"):
            use()


def test_second_import_name_has_the_same_objects() -> None:
    import reward_protocol.agent.models
    from reward_protocol.typed_interface import reward_function as decorator

    assert decorator is reward_function
    assert reward_protocol.agent.models.StepData is StepData
    assert reward_protocol.Message is reward_protocol.models.Message is Message
    assert (reward_protocol.__all__, reward_protocol.__version__) == (reward_kit.__all__, reward_kit.__version__)
    with pytest.raises(ImportError):
        import_module("reward_protocol.absent")


def test_trl_adapter_scores_texts_and_messages_and_raises_errors() -> None:
    adapter = RewardFunction(func=lambda messages, ground_truth, **_: messages[-1]["content"] == ground_truth)
    adapter = adapter.get_trl_adapter()
    prompts, texts = [[CHAT[0]], [CHAT[0]]], ["4", [{"role": "assistant", "content": "5"}]]
    assert adapter(prompts, texts, solution=["4", "4"], trainer_state=None) == [1.0, 0.0]
    assert adapter(prompts=[CHAT]) == [0.0]
    with pytest.raises(ValueError, match="zip"):
        adapter(prompts, texts[:1])
    with pytest.raises(ZeroDivisionError):
        RewardFunction(func=lambda messages, **_: 1 / 0).get_trl_adapter()(prompts, texts)


def test_path_of_a_missing_function_is_an_import_error() -> None:
    for path in ("reward_kit.absent:f", "reward_kit.models:absent", "plain"):
        with pytest.raises(ImportError, match=path):
            RewardFunction(func_path=path)


def test_result_lists_the_fields_of_0_4_and_later_ones_that_are_set() -> None:
    assert set(EvaluateResult(score=1.0)) == {"score", "is_score_valid", "reason", "metrics", "step_outputs", "error"}
    judged = EvaluateResult(score=1.0, query="Which?")
    assert dict(judged)["query"] == "Which?"
    assert judged["response"] is None
    assert EvaluateResult(**judged) == judged


def test_scorer_and_reward_are_converted_to_each_other() -> None:
    reward = scorer_to_reward_fn(lambda question, answer, expected: 0.5 * (answer == expected))
    truth = [{"role": "assistant", "content": CHAT[1]["content"]}]
    assert reward(messages=CHAT, ground_truth=truth).score == 0.5
    assert reward_fn_to_scorer(reward)(input="Say more.", output="4", expected="4") == 0.5
    assert reward_fn_to_scorer(reward)("Say more.", "4", "5") == 0.0


def test_load_jsonl_reads_rows_and_names_invalid_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"id": 1}\n\n{"id": 2}\n')
    assert load_jsonl(str(file)) == [{"id": 1}, {"id": 2}]
    file.write_text('{"id": 1}\n{')
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: not JSON"):
        load_jsonl(file)


def post(app: ASGIApp, body: bytes, path: str = "/reward") -> tuple[int, Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    anyio.run(app, {"type": "http", "method": "POST", "path": path}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_create_app_serves_a_reward_over_http() -> None:
    app = create_app(specific)
    status, result = post(app, json.dumps({"messages": CHAT}).encode())
    assert (status, result["score"], set(result["metrics"])) == (200, 1.0, {"length", "specific"})
    assert post(app, b"{")[0] == post(app, b"[]")[0] == post(app, b'{"messages": 3}')[0] == 422
    assert post(app, b"{}", "/other")[0] == 404


def test_message_without_a_role_is_rejected() -> None:
    with pytest.raises(ValueError, match="Role is required"):
        Message.model_validate({"content": "x"})


def test_agent_eval_runs_a_task_file(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(
        "name: counter\nresource_type: PythonStateResource\nbase_resource_config: {initial_state: {count: 0}}\n"
        "initial_user_prompt: Count.\npolicy: {type: scripted, actions: [{type: terminate}]}\n"
    )
    given = ["agent-eval", "--task-def", str(tmp_path / "task.yaml"), "--dry-run"]
    result = CliRunner().invoke(program, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_errors_of_rewards_are_value_errors() -> None:
    @reward_function
    def last(messages: list[Message], **kwargs) -> EvaluateResult:
        return EvaluateResult(score=len(messages))

    with pytest.raises(ValueError, match=r"reward 'last': Input 'messages' failed .*: 0\.role: missing"):
        last(messages=[{"content": "without a role"}])
    with pytest.raises(ValueError, match="mode 'other' is unknown"):
        reward_function(mode="other")(last)
    assert issubclass(InvalidResultError, ValueError)
    assert issubclass(ConfigError, ValueError)
