"""A file of labels: the forms a row may have, what a reward is not shown, and what is said of a bad one."""

from __future__ import annotations

import csv
import json

import pytest

from reward_kit.errors import ConfigError
from reward_kit.runs.labels import LabelColumns, read_labels

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
    with pytest.raises(ConfigError, match=r"labels.csv:2: rollout_id: give the transcripts .* --data"):
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
def test_a_bad_row_is_one_error_with_line_and_column(write, header, row, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_labels(write(header, row))
    assert "\n" not in str(caught.value)


def test_the_line_is_that_of_the_row(write):
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
