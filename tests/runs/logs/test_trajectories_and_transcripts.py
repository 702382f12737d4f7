"""Test trajectories in ATIF and transcripts of OpenAI and Claude Code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.checks.run import check_run
from reward_kit.errors import ConfigError
from reward_kit.runs.export import Selection, selected
from reward_kit.runs.logs.exporting import export_logs
from reward_kit.runs.logs.importing import detect_format, import_logs
from reward_kit.runs.results import read_results
from reward_kit.runs.run_folder import RunFolder, RunHeader

TRAJECTORY: dict[str, Any] = {
    "schema_version": "ATIF-v1.7",
    "session_id": "s1",
    "trajectory_id": "t1",
    "agent": {"name": "terminus", "version": "2.0", "model_name": "m/large", "extra": {"temperature": 1.0}},
    "steps": [
        {"step_id": 1, "source": "system", "message": "Be short."},
        {
            "step_id": 2,
            "source": "user",
            "message": [{"type": "text", "text": "List"}],
            "timestamp": "2026-01-01T00:00:00Z",
        },
        {
            "step_id": 3,
            "source": "agent",
            "timestamp": "2026-01-01T00:00:05Z",
            "model_name": "m/large",
            "reasoning_effort": "high",
            "message": "I look.",
            "reasoning_content": "ls helps",
            "tool_calls": [
                {"tool_call_id": "c1", "function_name": "sh", "arguments": {"cmd": "ls"}, "extra": {"x": 1}}
            ],
            "observation": {"results": [{"source_call_id": "c1", "content": "a.txt"}, {"content": "a note"}]},
            "metrics": {"prompt_tokens": 10, "completion_tokens": 3, "cost_usd": 0.5, "logprobs": [-0.5], "extra": {}},
            "llm_call_count": 1,
        },
        {"step_id": 4, "source": "agent", "message": "a.txt", "is_copied_context": False},
    ],
    "notes": "a note",
    "final_metrics": {"total_prompt_tokens": 10, "total_steps": 4, "extra": {"y": [1, 2.0]}},
    "extra": {"seed": 7},
}
RESULT = {"task_name": "list-files", "verifier_result": {"rewards": {"reward": 1.0, "style": 0.5}}}


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def only_episode(path: Path, tmp_path: Path) -> dict[str, Any]:
    run = import_logs([path], tmp_path / "runs").path
    assert not check_run(run).findings
    [result] = read_results(run)
    return dict(result.episode)


class TestAtif:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        write(tmp_path / "trial" / "result.json", RESULT)
        return import_logs(
            [write(tmp_path / "trial" / "agent" / "trajectory.json", TRAJECTORY)], tmp_path / "runs"
        ).path

    def export(self, run: Path, target: Path) -> dict[str, Any]:
        header = RunHeader.read(run)
        results = selected(run, Selection(header.pass_threshold))
        [path] = export_logs(run, header, results, "atif", target, is_private=False).paths
        return dict(json.loads(path.read_text()))

    def test_trajectory_becomes_an_episode(self, run: Path) -> None:
        assert not check_run(run).findings
        [result] = read_results(run)
        record = result.episode
        assert (record["sample_id"], record["policy"], record["num_steps"]) == ("list-files", "m/large", 2)
        assert [message["role"] for message in record["messages"]] == [
            *("system", "user", "assistant", "tool", "user", "assistant")
        ]
        assert record["messages"][2]["reasoning_content"] == "ls helps"
        assert record["usage"] == {"prompt_tokens": 10, "completion_tokens": 3, "cost": 0.5}
        assert record["timing"]["duration_s"] == pytest.approx(5.0)
        assert result.score is not None
        assert result.score["score"] == 1.0
        assert {*result.score["result"]["metrics"]} == {"reward", "style"}
        imported = RunHeader.read(run).imported
        assert imported is not None
        assert imported["fields"]["log_only"]["metrics.logprobs"] == 1

    def test_imported_trajectory_is_equal_after_export(self, run: Path, tmp_path: Path) -> None:
        assert self.export(run, tmp_path / "out") == TRAJECTORY

    def test_changed_message_is_exported_with_the_other_fields(self, run: Path, tmp_path: Path) -> None:
        lines = (run / "episodes.jsonl").read_text()
        (run / "episodes.jsonl").write_text(lines.replace('"I look."', '"Hidden."'))
        exported = self.export(run, tmp_path / "out.json")
        assert exported["steps"][2] == {**TRAJECTORY["steps"][2], "message": "Hidden."}
        assert exported["steps"][3] == TRAJECTORY["steps"][3]

    def test_exported_trajectory_of_another_run_is_imported_with_its_score(self, run: Path, tmp_path: Path) -> None:
        chats = write(tmp_path / "chats.jsonl", {"id": "q", "ground_truth": "2", "level": 3, "messages": CHAT})
        other = import_logs([chats], tmp_path / "others").path
        [result] = read_results(other)
        store = RunFolder(other)
        with store:
            scored = {"rollout_id": result.episode["rollout_id"], "attempt": 0, "score": 0.25, "failure": None}
            store.append_score({**scored, "result": {"score": 0.25}})
        write(tmp_path / "t.json", self.export(other, tmp_path / "out.json"))
        [again] = read_results(import_logs([tmp_path / "t.json"], tmp_path / "again").path)
        assert again.score is not None
        assert again.score["score"] == 0.25
        for key in ("sample_id", "ground_truth", "sample", "messages"):
            assert again.episode[key] == result.episode[key]

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"agent": None}, "must have an agent and steps"),
            ({"steps": [1]}, r"steps\[0\]: expected an object"),
            ({"steps": [{"source": "robot", "message": ""}]}, r"steps\[0\]: source: must be system, user or agent"),
            ({"steps": [{"source": "agent", "message": "", "tool_calls": {}}]}, "tool_calls: expected a list"),
        ],
    )
    def test_invalid_trajectory_names_the_field(self, tmp_path: Path, change: dict[str, Any], problem: str) -> None:
        path = write(tmp_path / "t.json", {**TRAJECTORY, **change})
        with pytest.raises(ConfigError, match=problem):
            import_logs([path], tmp_path / "runs")
        assert not list((tmp_path / "runs").iterdir())


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
    {"role": "assistant", "content": "2"},
]


class TestTranscripts:
    def test_chat_keeps_its_messages_and_fields(self, tmp_path: Path) -> None:
        row = {"id": "q", "model": "gpt", "messages": CHAT, "ground_truth": "2", "level": 3}
        record = only_episode(write(tmp_path / "c.jsonl", row), tmp_path)
        assert record["messages"] == CHAT
        assert (record["sample_id"], record["policy"], record["sample"]) == ("q", "gpt", {"level": 3})
        assert record["num_steps"] == 2

    def test_completion_of_a_chat_is_its_last_message(self, tmp_path: Path) -> None:
        usage = {"prompt_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
        row = {"messages": CHAT[:1], "choices": [{"message": CHAT[3], "finish_reason": "stop"}], "usage": usage}
        record = only_episode(write(tmp_path / "c.jsonl", row), tmp_path)
        assert [message["content"] for message in record["messages"]] == ["1 + 1?", "2"]
        assert record["usage"] == {"prompt_tokens": 4, "completion_tokens": 1, "cached_tokens": 2}

    def test_response_becomes_a_chat(self, tmp_path: Path) -> None:
        output = [
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "2"}]},
        ]
        row = {"id": "resp_1", "object": "response", "model": "gpt", "instructions": "Add.", "input": "1 + 1?"}
        record = only_episode(write(tmp_path / "r.jsonl", {**row, "output": output}), tmp_path)
        assert [message["role"] for message in record["messages"]] == [
            *("system", "user", "assistant", "tool", "assistant")
        ]
        assert record["messages"][2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 1}'}
        assert record["messages"][-1]["content"] == "2"

    def test_session_merges_the_parts_of_a_message(self, tmp_path: Path) -> None:
        def entry(kind: str, content: Any, **more: Any) -> dict[str, Any]:
            message = {"role": kind, "content": content, **more.pop("message", {})}
            return {"parentUuid": None, "sessionId": "s", "type": kind, "message": message, **more}

        part = {"id": "m1", "model": "claude-x", "usage": {"input_tokens": 3, "output_tokens": 2}}
        use = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "ls"}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "a.txt"}
        path = write(
            tmp_path / "session.jsonl",
            {"type": "summary", "summary": "files", "leafUuid": "u"},
            entry("user", "List the files.", timestamp="2026-01-01T00:00:00.000Z"),
            entry("assistant", [{"type": "text", "text": "I look."}], message=part),
            entry("assistant", [use], message=part),
            entry("assistant", [{"type": "text", "text": "aside"}], isSidechain=True),
            entry("user", [result], timestamp="2026-01-01T00:00:03.000Z"),
            entry("assistant", [{"type": "text", "text": "a.txt"}], message={**part, "id": "m2"}),
        )
        record = only_episode(path, tmp_path)
        assert [message["role"] for message in record["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert record["messages"][1]["content"] == "I look."
        assert json.loads(record["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"command": "ls"}
        assert record["usage"]["completion_tokens"] == 4
        assert (record["policy"], record["num_steps"]) == ("claude-x", 2)

    def test_real_chat_with_parallel_calls_and_an_image(self, tmp_path: Path) -> None:
        calls = [{**CALL, "id": f"c{n}"} for n in (1, 2)]
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
        answer = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": calls}
        messages = [
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]},
            answer,
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
        ]
        last = {"role": "assistant", "content": "A pixel that", "refusal": None, "audio": None}
        choice = {"index": 0, "message": last, "finish_reason": "length", "logprobs": None}
        row = {"id": "chatcmpl-1", "object": "chat.completion", "model": "m", "messages": messages, "choices": [choice]}
        record = only_episode(write(tmp_path / "c.jsonl", row), tmp_path)
        assert record["messages"][1]["content"][1] == image
        assert [call["id"] for call in record["messages"][2]["tool_calls"]] == ["c1", "c2"]
        assert (record["num_steps"], record["stop_reason"]) == (2, "output_limit")

    def test_real_response_with_reasoning_searches_and_an_image(self, tmp_path: Path) -> None:
        given = [
            {"role": "developer", "content": "Be short."},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Where?"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"},
                ],
            },
        ]
        text = {"type": "output_text", "text": "In Rome", "annotations": [{"type": "url_citation"}], "logprobs": []}
        output = [
            {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "Look."}]},
            {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {"type": "search"}},
            {"id": "fc_1", "type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"},
            {"id": "fc_2", "type": "function_call", "call_id": "c2", "name": "find", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "a"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "b"}]},
            {"id": "msg_1", "type": "message", "role": "assistant", "status": "incomplete", "content": [text]},
        ]
        details = {"cached_tokens": 3}
        usage = {"input_tokens": 9, "input_tokens_details": details, "output_tokens": 5, "total_tokens": 14}
        row = {"id": "resp_1", "object": "response", "model": "m", "input": given, "output": output, "usage": usage}
        row |= {"error": None, "instructions": None, "incomplete_details": {"reason": "max_output_tokens"}}
        path = write(tmp_path / "r.jsonl", row)
        record = only_episode(path, tmp_path)
        assert [message["role"] for message in record["messages"]] == [
            *("developer", "user", "assistant", "tool", "tool", "assistant")
        ]
        assert record["messages"][1]["content"][1]["type"] == "image_url"
        assert record["messages"][2]["reasoning_content"] == "Look."
        assert [call["id"] for call in record["messages"][2]["tool_calls"]] == ["c1", "c2"]
        assert record["messages"][-1]["content"] == "In Rome"
        assert record["stop_reason"] == "output_limit"
        assert record["usage"] == {"prompt_tokens": 9, "completion_tokens": 5, "cached_tokens": 3}
        run = import_logs([path], tmp_path / "again")
        assert run.report.log_only == {"item (web_search_call)": 1}
        row |= {"output": [], "error": {"code": "server_error", "message": "overloaded"}}
        failed = only_episode(write(tmp_path / "failed.jsonl", row), tmp_path / "failed")
        assert (failed["stop_reason"], failed["failure"]["message"]) == ("error", "overloaded")

    def test_real_session_with_compaction_thinking_and_errors(self, tmp_path: Path) -> None:
        def entry(kind: str, content: Any, message: Any = None, **more: Any) -> dict[str, Any]:
            head = {"parentUuid": "p", "isSidechain": False, "userType": "external", "cwd": "/w", "version": "2.1.0"}
            head |= {"sessionId": "s", "type": kind, "uuid": "u", "timestamp": "2026-01-01T00:00:00.000Z"}
            return {**head, "message": {"role": kind, "content": content, **(message or {})}, **more}

        def part(number: int, **more: Any) -> dict[str, Any]:
            usage = {"input_tokens": 3, "cache_read_input_tokens": 5, "output_tokens": 2, "service_tier": "standard"}
            return {"id": f"m{number}", "type": "message", "model": "claude-x", "usage": usage, **more}

        calls = [{"type": "tool_use", "id": f"c{n}", "name": "Read", "input": {"path": str(n)}} for n in (1, 2)]
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
        results = [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "one"}, image]},
            {"type": "tool_result", "tool_use_id": "c2", "content": "no such file", "is_error": True},
        ]
        apology = [{"type": "text", "text": "API Error: 529 overloaded"}]
        entries = [
            {"type": "file-history-snapshot", "messageId": "x", "snapshot": {}},
            entry("user", "Caveat: ignore these.", isMeta=True),
            entry("user", [{"type": "text", "text": "What is it?"}, image]),
            entry("assistant", [{"type": "thinking", "thinking": "read both", "signature": "Eq=="}], part(1)),
            entry("assistant", [calls[0]], part(1)),
            entry("user", [results[0]], toolUseResult={"file": "1"}),
            entry("assistant", [calls[1]], part(1, stop_reason="tool_use")),
            entry("user", [results[1]], toolUseResult="Error: no such file"),
            entry("assistant", apology, {"model": "<synthetic>"}, isApiErrorMessage=True),
            {"type": "system", "subtype": "compact_boundary", "sessionId": "s", "parentUuid": None, "content": "..."},
            entry("user", "This session continues an earlier one.", isCompactSummary=True),
            entry("assistant", [{"type": "text", "text": "A pixel."}], part(2, stop_reason="end_turn")),
        ]
        path = write(tmp_path / "s.jsonl", *entries)
        record = only_episode(path, tmp_path)
        assert [message["role"] for message in record["messages"]] == [
            *("user", "user", "assistant", "tool", "tool", "user", "assistant")
        ]
        answer = record["messages"][2]
        assert answer["reasoning_content"] == "read both"
        assert [call["id"] for call in answer["tool_calls"]] == ["c1", "c2"]
        assert record["messages"][3]["content"][1]["type"] == "image_url"
        assert record["steps"][1]["info"]["tools"] == [{"name": None, "error": "no such file"}]
        assert (record["policy"], record["stop_reason"], record["num_steps"]) == ("claude-x", "recorded", 2)
        assert record["usage"]["prompt_tokens"] == 16
        report = import_logs([path], tmp_path / "again").report
        assert report.log_only["entry (error of the API)"] == 1
        assert report.log_only["entry (system)"] == 1
        failed = only_episode(write(tmp_path / "failed.jsonl", *entries[:9]), tmp_path / "failed")
        assert failed["stop_reason"] == "error"
        assert failed["failure"]["message"] == "API Error: 529 overloaded"

    @pytest.mark.parametrize(
        ("row", "problem"),
        [
            ({"messages": [{"role": "robot", "content": ""}]}, "messages: .*role"),
            ({"messages": 3}, "unknown format"),
            ({"answer": 1}, "unknown format; pass --format"),
            (
                {"output": [{"type": "message", "role": "user", "content": [{"type": "text"}]}]},
                r"content\[0\].text: exp",
            ),
            ({"output": [{"type": "message", "role": "user"}]}, r"output\[0\].content: is missing"),
            ({"output": [{"type": "function_call", "name": 1}]}, r"output\[0\].name: expected a string, got 1"),
            ({"output": [{"type": 3}]}, "line 1"),
            ({"input": "x", "output": [], "error": "x"}, "error: expected an object"),
        ],
    )
    def test_invalid_rows_are_reported(self, tmp_path: Path, row: dict[str, Any], problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            import_logs([write(tmp_path / "c.jsonl", row)], tmp_path / "runs")

    def test_broken_line_is_reported_with_its_number(self, tmp_path: Path) -> None:
        path = write(tmp_path / "c.jsonl", {"messages": CHAT}, {"messages": CHAT})
        path.write_text(path.read_text() + '{"messages": [')
        with pytest.raises(ConfigError, match=r"c.jsonl:3: not JSON"):
            import_logs([path], tmp_path / "runs")

    def test_format_is_detected_from_the_content(self, tmp_path: Path) -> None:
        expected = {
            "atif": TRAJECTORY,
            "openai-chat": {"id": 1, "messages": CHAT},
            "openai-responses": {"id": "r", "output": []},
            "claude-code": {"type": "summary", "leafUuid": "x"},
            "inspect": {"version": 2, "status": "success", "eval": {}},
        }
        assert {name: detect_format(write(tmp_path / f"{name}.x", row)).name for name, row in expected.items()} == {
            name: name for name in expected
        }
