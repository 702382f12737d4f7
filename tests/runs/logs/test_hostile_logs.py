"""Test malformed logs of every format: each is imported, or rejected by one error that names the file."""

from __future__ import annotations

import copy
import json
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.checks.run import check_run
from reward_kit.errors import ConfigError
from reward_kit.runs.logs.importing import import_logs
from tests.runs.logs.test_trajectories_and_transcripts import CHAT, TRAJECTORY

FOLDER = Path(__file__).parent
TRACES = [json.loads(line) for line in (FOLDER / "verifiers_traces.jsonl").read_text().splitlines()]
LOGS: dict[str, list[Any]] = {
    "inspect": [json.loads((FOLDER / "inspect_part.json").read_text())],
    "verifiers": [TRACES[0], TRACES[8], TRACES[4]["traces"][0]],
    "atif": [TRAJECTORY],
    "openai-chat": [{"id": "q", "model": "m", "messages": CHAT, "usage": {"prompt_tokens": 3}}],
    "openai-responses": [
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]}],
            "output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "add"}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "2"}]},
            ],
        }
    ],
    "claude-code": [
        {"type": "user", "sessionId": "s", "message": {"role": "user", "content": "List."}},
        {
            "type": "assistant",
            "timestamp": "2026-01-01T00:00:00.000Z",
            "message": {
                "id": "m1",
                "model": "m",
                "usage": {"input_tokens": 3},
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "ls"}},
                ],
            },
        },
        {"type": "user", "message": {"content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a"}]}},
    ],
}
ODD = [
    *(
        None,
        True,
        -1,
        1e308,
        float("nan"),
        float("inf"),
        10**400,
        "",
        "\ud800",
        "\x00",
        "2026-13-99",
        "../../etc/passwd",
    ),
    *([], {}, [1], {"a": 1}, [[]], {"type": "text"}, "x" * 5_000),
]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*place, key)
        yield from places(inner, (*place, key))


@st.composite
def changed_logs(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return a format and the text of a log, in which values are replaced, removed, repeated or nested."""
    name = draw(st.sampled_from(list(LOGS)))
    documents = copy.deepcopy(LOGS[name])
    for _ in range(draw(st.integers(1, 3))):
        *outer, key = draw(st.sampled_from([place for place in places(documents) if len(place) > 1]))
        parent: Any = documents
        for step in outer:
            parent = parent[step]
        change = draw(st.sampled_from(["replace", "remove", "repeat", "nest"]))
        if change == "replace":
            parent[key] = draw(st.sampled_from(ODD))
        elif change == "remove":
            del parent[key]
        elif change == "repeat" and isinstance(parent, list):
            parent.append(parent[key])
        elif change == "nest":
            for _ in range(draw(st.sampled_from([10, 200]))):
                parent[key] = [parent[key]]
    text = "".join(json.dumps(document) + "\n" for document in documents).encode()
    return name, text[: draw(st.just(len(text)) | st.integers(0, len(text)))]


def check_import(path: Path, form: str | None) -> None:
    """Import a log, and check the error or the run."""
    runs = path.parent / "runs"
    try:
        run = import_logs([path], runs, form=form).path
    except ConfigError as error:
        assert str(path) in str(error)
        assert "\n" not in str(error)
        assert len(str(error)) < 2_000
        assert not runs.exists() or not [*runs.iterdir()]
    else:
        assert not check_run(run).has("unreadable")
        assert [*runs.iterdir()] == [run]


@given(changed_logs())
def test_changed_log_is_imported_or_rejected(log: tuple[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        path.write_bytes(log[1])
        check_import(path, log[0])


@pytest.mark.parametrize("form", [None, *LOGS])
@pytest.mark.parametrize("data", [b"", b"\n\n", b"{", b"[", b"[]", b"{}", b"null", b"1e999", b"\xff\xfe", b"[" * 9_999])
def test_log_without_episodes_is_rejected(tmp_path: Path, form: str | None, data: bytes) -> None:
    (tmp_path / "log.jsonl").write_bytes(data)
    with pytest.raises(ConfigError, match=r"log\.jsonl"):
        import_logs([tmp_path / "log.jsonl"], tmp_path / "runs", form=form)


def test_members_of_archives_are_not_written_to_disk(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    sample = {"id": "../../x", "epoch": 1, "messages": [{"role": "user", "content": "a"}]}
    with zipfile.ZipFile(tmp_path / "in" / "log.eval", "w") as archive:
        archive.writestr("header.json", json.dumps({"eval": {"task": "../t", "model": "/etc/m"}}))
        for name in ("samples/../../../x_epoch_1.json", "/samples/y_epoch_1.json", "samples//etc/z_epoch_1.json"):
            archive.writestr(name, json.dumps(sample))
    run = import_logs([tmp_path / "in" / "log.eval"], tmp_path / "in" / "runs")
    assert run.path.parent == tmp_path / "in" / "runs"
    assert run.policies[0].episodes == 2
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_repeated_ids_become_different_episodes(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(LOGS['openai-chat'][0])}\n" * 3)
    run = import_logs([path], tmp_path / "runs")
    assert run.policies[0].episodes == 3
    assert not check_run(run.path).findings
