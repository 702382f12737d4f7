"""Test label files: accepted rows, columns hidden from rewards, and errors."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys

import pytest

from reward_kit.errors import ConfigError, StoreError
from reward_kit.runs.label_file import Label, append_label, parse_label, read_run_labels
from reward_kit.runs.labels import LabelColumns, read_labels
from tests.browser.walks import walk, write_walks

TALK = json.dumps([{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}])


@pytest.fixture
def write(tmp_path):
    def write(header, *rows):
        path = tmp_path / "labels.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
        return path

    return write


def texts(request):
    return [(message.role, message.text) for message in request.messages]


def test_prompt_and_response_columns_are_read(write):
    path = write(["id", "label", "prompt", "response", "ground_truth", "topic"], ["q", "4", "2+2", "5\n", "4", "sums"])
    (row,) = read_labels(path)
    (request,) = row.requests
    assert (row.id, row.label, row.is_pair) == ("q", 4.0, False)
    assert texts(request) == [("user", "2+2"), ("assistant", "5\n")]
    assert (request.ground_truth, request.assistant_turns, request.stop_reason) == ("4", [1], "recorded")
    assert request.sample["topic"] == "sums"


def test_messages_column_is_read_as_json(write):
    (row,) = read_labels(write(["id", "label", "messages"], ["q", "yes", TALK]))
    assert texts(row.requests[0]) == [("user", "2+2"), ("assistant", "4")] and row.label == 1.0


def test_the_label_is_not_shown_to_the_reward(write):
    (row,) = read_labels(write(["label", "messages", "topic"], ["5", TALK, "sums"]))
    assert row.requests[0].sample == {"topic": "sums"}
    pair = write(["winner", "prompt", "response_a", "response_b"], ["A", "x", "1", "2"])
    assert all("winner" not in request.sample for request in read_labels(pair)[0].requests)


def test_rollout_column_refers_to_transcripts(write, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"id": "a", "messages": json.loads(TALK), "ground_truth": "4"}) + "\n")
    path = write(["rollout_id", "label"], ["a-0", "1"])
    from reward_kit.runs.scoring import read_transcripts

    (episode,) = read_transcripts(data)
    path = write(["rollout_id", "label"], [episode.id_, "1"])
    (row,) = read_labels(path, data=data)
    assert texts(row.requests[0])[1] == ("assistant", "4") and row.requests[0].ground_truth == "4"
    with pytest.raises(ConfigError, match=r"labels.csv:2: rollout_id: the data has no rollout 'nobody'"):
        read_labels(write(["rollout_id", "label"], ["nobody", "1"]), data=data)
    with pytest.raises(ConfigError, match=r"labels.csv:2: rollout_id: use --data to pass the transcripts"):
        read_labels(path)


def test_pairs_of_responses_are_read(write):
    path = write(["id", "winner", "prompt", "response_a", "response_b", "ground_truth"], ["q", "B", "x", "1", "2", "g"])
    (row,) = read_labels(path)
    assert (row.label, row.is_pair) == (0.0, True)
    assert [texts(request)[1][1] for request in row.requests] == ["1", "2"]
    assert [request.ground_truth for request in row.requests] == ["g", "g"]
    (row,) = read_labels(path, pairs="judge")
    assert [request.ground_truth for request in row.requests] == ["2", "1"]


def test_pairs_of_conversations_are_read(write):
    other = TALK.replace('"4"', '"5"')
    (row,) = read_labels(write(["winner", "messages_a", "messages_b"], ["tie", TALK, other]), pairs="judge")
    assert row.label == 0.5
    assert [request.ground_truth for request in row.requests] == ["5", "4"]


@pytest.mark.parametrize(
    ("text", "label"),
    [("1", 1), ("-2.5", -2.5), ("1e-3", 0.001), (" 4 ", 4), ("Yes", 1), ("FALSE", 0), ("pass", 1), ("incorrect", 0)],
)
def test_label_values_are_parsed(write, text, label):
    assert read_labels(write(["label", "messages"], [text, TALK]))[0].label == label


@pytest.mark.parametrize(
    ("text", "label"), [("A", 1), ("b", 0), ("tie", 0.5), ("model_a", 1), ("model_b", 0), ("tie (bothbad)", 0.5)]
)
def test_winner_values_are_parsed(write, text, label):
    assert read_labels(write(["winner", "messages_a", "messages_b"], [text, TALK, TALK]))[0].label == label


def test_columns_may_have_other_names(write):
    path = write(["key", "stars", "question", "reply"], ["q", "3", "2+2", "4"])
    names = LabelColumns(id="key", label="stars", prompt="question", response="reply")
    (row,) = read_labels(path, names)
    assert (row.id, row.label) == ("q", 3.0) and "stars" not in row.requests[0].sample


def test_without_an_id_rows_are_samples_of_their_own(write):
    rows = read_labels(write(["label", "messages"], ["1", TALK], ["0", TALK]))
    assert len({row.id for row in rows}) == 2


BAD = {
    "no label": (["id", "lable", "messages"], ["q", "1", TALK], r"csv:2: missing column 'label'.*mean 'lable'\?"),
    "empty label": (["label", "messages"], ["", TALK], "csv:2: label: expected a number"),
    "a word": (["label", "messages"], ["fine", TALK], "csv:2: label: expected a number.*'fine'"),
    "NaN": (["label", "messages"], ["nan", TALK], "csv:2: label"),
    "infinite": (["label", "messages"], ["inf", TALK], "csv:2: label"),
    "decimal comma": (["label", "messages"], ["0,5", TALK], "csv:2: label"),
    "no prompt": (["label", "response"], ["1", "4"], "csv:2: missing column 'prompt'"),
    "no response": (["label", "prompt"], ["1", "4"], "csv:2: missing column 'response' .or 'messages'"),
    "no JSON": (["label", "messages"], ["1", "[{"], "csv:2: messages: not JSON"),
    "no list": (["label", "messages"], ["1", "{}"], "csv:2: messages: expected a list"),
    "an empty list": (["label", "messages"], ["1", "[]"], "csv:2: messages: expected a list"),
    "no message": (
        ["label", "messages"],
        ["1", '[{"role": "robot"}]'],
        "csv:2: messages: 0.role|csv:2: messages: role",
    ),
    "another winner": (
        ["winner", "messages_a", "messages_b"],
        ["C", TALK, TALK],
        "csv:2: winner: expected A, B or tie",
    ),
    "half a pair": (["winner", "prompt", "response_a"], ["A", "x", "1"], "csv:2: missing column 'response_b'"),
    "a short row": (["label", "messages"], ["1"], "csv:2"),
    "a column twice": (["label", "label"], ["1", "2"], "csv:1: duplicate column 'label'"),
}


@pytest.mark.parametrize(("header", "row", "message"), BAD.values(), ids=BAD)
def test_invalid_row_is_one_error_with_line_and_column(write, header, row, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_labels(write(header, row))
    assert "\n" not in str(caught.value)


def test_error_line_is_the_line_of_the_row(write):
    with pytest.raises(ConfigError, match="csv:4: label"):
        read_labels(write(["label", "messages"], ["1", TALK], ["0", TALK], ["?", TALK]))


def test_empty_and_missing_files_are_rejected(write, tmp_path):
    with pytest.raises(ConfigError, match="has no rows"):
        read_labels(write(["label", "messages"]))
    with pytest.raises(ConfigError, match="does not exist"):
        read_labels(tmp_path / "nowhere.csv")


def test_jsonl_file_is_read(tmp_path):
    path = tmp_path / "labels.jsonl"
    path.write_text(json.dumps({"label": 1, "messages": json.loads(TALK)}) + "\n")
    assert read_labels(path)[0].label == 1.0


def test_pairs_and_single_answers_do_not_mix(tmp_path):
    path = tmp_path / "labels.jsonl"
    rows = [{"label": 1, "messages": TALK}, {"winner": "A", "messages_a": TALK, "messages_b": TALK}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="jsonl:2: this row is a pair"):
        read_labels(path)


def labeled_run(tmp_path, *labels):
    draw = random.Random(0)
    run = write_walks(tmp_path, (walk(n, draw, rollout_id=name) for n, name in enumerate("ab")), is_credited=False)
    for label in labels:
        append_label(run, parse_label(label))
    return run


def test_labels_of_the_viewer_are_read_without_options(tmp_path):
    run = labeled_run(
        tmp_path,
        {"rollout_id": "a", "label": "fail", "note": "first"},
        {"rollout_id": "b", "label": 0.25},
        {"rollout_id": "a", "label": "pass"},
        {"rollout_id": "a", "step": 0, "label": "fail"},
    )
    rows = read_labels(run / "labels.jsonl")
    assert [(row.id, row.label) for row in rows] == [("a", 1.0), ("b", 0.25)], "the last label of each episode"
    assert texts(rows[0].requests[0])[0] == ("system", "You walk along a street.")
    assert read_run_labels(run) == {"a": {None: Label("pass"), 0: Label("fail")}, "b": {None: Label(0.25)}}
    append_label(run, parse_label({"rollout_id": "b", "label": None, "note": "unsure"}))
    append_label(run, parse_label({"rollout_id": "a", "step": 0, "label": None}))
    assert [row.id for row in read_labels(run / "labels.jsonl")] == ["a"], "a note is not a label"
    assert read_run_labels(run) == {"a": {None: Label("pass")}, "b": {None: Label(None, "unsure")}}


def test_file_with_only_notes_has_no_labels(tmp_path):
    run = labeled_run(tmp_path, {"rollout_id": "a", "label": None, "note": "x"})
    with pytest.raises(ConfigError, match="no rows with a label"):
        read_labels(run / "labels.jsonl")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must be an object"),
        ({"label": "pass"}, "rollout_id must be a string"),
        ({"rollout_id": "a"}, "label must be .*, got nothing"),
        ({"rollout_id": "a", "label": "maybe"}, "got 'maybe'"),
        ({"rollout_id": "a", "label": True}, "got True"),
        ({"rollout_id": "a", "label": float("nan")}, "got nan"),
        ({"rollout_id": "a", "label": 10**400}, "label must be"),
        ({"rollout_id": "a", "label": "pass", "step": -1}, "step must be"),
        ({"rollout_id": "a", "label": "pass", "step": True}, "step must be"),
        ({"rollout_id": "a", "label": "pass", "note": "x" * 10_001}, "at most 10,000"),
        ({"rollout_id": "a", "label": "pass", "labeled_at": "now"}, "unknown field 'labeled_at'"),
    ],
)
def test_invalid_label_is_rejected(given, message):
    with pytest.raises(ConfigError, match=message):
        parse_label(given)


def test_concurrent_writers_lose_no_label_and_torn_line_is_removed(tmp_path):
    (tmp_path / "labels.jsonl").write_text('{"rollout_id": "torn", "la')
    code = """
import sys
from pathlib import Path
from reward_kit.runs.label_file import append_label, parse_label
for n in range(50):
    append_label(Path(sys.argv[1]), parse_label({"rollout_id": sys.argv[2] + str(n), "label": n, "note": "x" * 9000}))
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert set(read_run_labels(tmp_path)) == {f"{name}{n}" for name in "abc" for n in range(50)}


def test_unwritable_folder_is_reported(tmp_path):
    with pytest.raises(StoreError, match=r"cannot write .*labels.jsonl: .*; labels need a writable run directory"):
        append_label(tmp_path / "missing", parse_label({"rollout_id": "a", "label": "pass"}))
