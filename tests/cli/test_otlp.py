"""Test traces of runs, live and from a finished run, against an OTLP receiver."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes, server_attributes

from reward_kit.providers.completion import Usage
from reward_kit.telemetry.records import usage_attributes
from reward_kit.telemetry.traces import SCHEMA_URL
from tests.chat_server import ChatServer, answer, status, tool_calls
from tests.cli.project import Project
from tests.otlp_receiver import Receiver, receiver
from tests.rewards.judges import fair, grades

JUDGE = """
from reward_kit import with_options
from reward_kit.rewards import llm_judge

judge = with_options(llm_judge, model="judge", base_url="{url}")
"""
RUBRIC = {"rubric": {"manners": {"description": "It is polite.", "weight": 2}}}
SECRET = "sk-secret-0123456789"


@pytest.fixture
def collector() -> Iterator[Receiver]:
    with receiver() as server:
        yield server


def known_names() -> set[str]:
    modules = (gen_ai_attributes, error_attributes, server_attributes)
    return {value for module in modules for value in vars(module).values() if isinstance(value, str)}


async def call(project: Project, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(project.call, *arguments, **variables)


def behave(body: dict[str, Any]) -> Any:
    """Answer as a judge, or call a tool and then answer."""
    if body["model"] == "judge":
        return fair(grades(4))(body)
    if body["messages"][-1]["role"] == "tool":
        return answer("done")
    return tool_calls([("wait", {"milliseconds": 1})])


async def test_live_and_exported_traces_are_equal(tmp_path: Path, collector: Receiver) -> None:
    project = Project(tmp_path, rows=1, policy=None, reward_function_path="judge.py:judge", evaluation_criteria=RUBRIC)
    failed: set[str] = set()

    def script(body: dict[str, Any]) -> Any:
        if body["model"] == "small" and "429" not in failed:
            failed.add("429")
            return status(429, {"Retry-After": "0"})
        return behave(body)

    async with ChatServer(script) as server:
        (tmp_path / "judge.py").write_text(JUDGE.format(url=server.base_url))
        arguments = ("run", "task.yaml", "--model", "openai/small", "--base-url", server.base_url)
        done = await call(
            project,
            *arguments,
            "--otlp",
            "env",
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
            OTEL_EXPORTER_OTLP_HEADERS="x-team=agents",
            OTEL_SERVICE_NAME="my-runs",
            OPENAI_API_KEY=SECRET,
            REWARD_KIT_RUN_SANDBOX="in_process",
        )
    assert done.returncode == 0, done.stderr
    live, live_tree = list(collector.spans), collector.tree()
    assert collector.headers[0]["x-team"] == "agents" and live[0].service == "my-runs"
    collector.spans.clear()
    exported = await call(project, "export", "--otlp", collector.url)
    assert exported.returncode == 0, exported.stderr
    assert len(live_tree) == 2
    for tree in live_tree.values():
        name, *children = tree
        assert name == "invoke_agent openai/small"
        assert children[0][0] == "step 0" and children[0][1:] == [["chat small"], ["execute_tool wait"]]
        assert children[1] == ["step 1", ["chat small"]]
        assert children[2][0] == "reward llm_judge"
    judged = [tree[3][1:] for tree in live_tree.values()]
    assert sorted(judged) == [[], [["chat judge"]]]  # the judge is asked once for equal answers
    assert collector.tree() == live_tree
    by_id = {span.span_id: span for span in live}
    assert len(by_id) == len(live) == len(collector.spans)
    for span in collector.spans:
        same = by_id[span.span_id]
        assert (span.trace_id, span.parent_id, span.name, span.kind) == same[:1] + same[2:5]
        assert span.attributes == same.attributes
        assert span.events == same.events and span.schema_url == SCHEMA_URL
    assert sum(span.attributes.get("reward_kit.model_call.retries", 0) for span in live) == 1
    used = {key for span in live for key in span.attributes} | {
        key for span in live for _, attributes in span.events for key in attributes
    }
    assert {key for key in used if not key.startswith("reward_kit.")} <= known_names()
    chat = next(span for span in live if span.name == "chat small")
    assert chat.attributes["gen_ai.usage.input_tokens"] == 11 and chat.attributes["gen_ai.provider.name"] == "openai"
    assert all("messages" not in key for key in used)


def test_export_refused_by_the_collector_reports_missing_episodes(tmp_path: Path, collector: Receiver) -> None:
    project = Project(tmp_path, rows=2)
    assert project.call("run", "task.yaml", "--otlp", collector.url).returncode == 0
    collector.status = 403
    done = project.call("export", "--otlp", collector.url)
    assert done.returncode == 3
    assert "403" in done.stderr and "0 episodes were sent, and 4 were not" in done.stderr


def test_run_goes_on_without_collector(tmp_path: Path) -> None:
    project = Project(tmp_path, rows=2)
    with receiver() as gone:
        url = gone.url
    done = project.call("run", "task.yaml", "--otlp", url, OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("did not accept spans") == 1
    assert re.search(r"(\d+) of \1 spans were dropped", done.stderr)


def test_message_content_is_exported_on_request_without_secrets(tmp_path: Path, collector: Receiver) -> None:
    project = Project(tmp_path, rows=1, messages=[{"role": "user", "content": f"Use {SECRET}"}])
    variables = {"OPENAI_API_KEY": SECRET, "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}
    done = project.call("run", "task.yaml", "--otlp", collector.url, **variables)
    assert done.returncode == 0, done.stderr
    tool = next(span for span in collector.spans if span.name == "execute_tool wait")
    assert tool.attributes["gen_ai.tool.call.result"] == "waited 0"
    assert json.loads(tool.attributes["gen_ai.tool.call.arguments"]) == {}
    assert SECRET not in repr(collector.spans)


def test_failures_are_errors_of_their_spans(tmp_path: Path, collector: Receiver) -> None:
    actions = [{"type": "tool_call", "name": "\ud800" + "x" * 500, "arguments": {}}, {"type": "text", "content": "a"}]
    project = Project(tmp_path, rows=1, reward_function_path="reward.py:broken")
    project.write_task(policy={"type": "scripted", "actions": actions}, reward_function_path="reward.py:broken")
    project.call("run", "task.yaml", "--otlp", collector.url)
    tool = next(span for span in collector.spans if span.name.startswith("execute_tool"))
    assert tool.is_error and tool.attributes["error.type"] == "tool_error" and len(tool.name) < 200
    reward = next(span for span in collector.spans if span.name == "reward broken")
    assert reward.is_error and reward.attributes["error.type"] == "RewardError" and not reward.events


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--otlp", "collector:4318"], "pass an HTTP URL"),
        (["--otlp", "env"], "set OTEL_EXPORTER_OTLP_ENDPOINT"),
        (["--otlp", "http://localhost:1", "--format", "csv"], "pass either --format or --otlp"),
        (["--otlp", "http://localhost:1", "--table", "steps"], "--table has no effect with --otlp"),
    ],
)
def test_wrong_options_are_rejected(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = Project(tmp_path).call("export", *arguments)
    assert done.returncode == 2 and message in done.stderr


def test_nothing_is_imported_without_telemetry() -> None:
    code = (
        "import sys, reward_kit.cli.run, reward_kit.agent.rl_rollout_worker, reward_kit.reward_agent.remote\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_every_kind_of_tokens_is_exported_under_a_name_of_the_conventions() -> None:
    usage = Usage(100, 20, 40, 0.5, 30, 8).to_json()
    assert {name: value for name, value in usage_attributes(usage).items() if name in known_names()} == {
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 40,
        "gen_ai.usage.cache_creation.input_tokens": 30,
        "gen_ai.usage.reasoning.output_tokens": 8,
    }
