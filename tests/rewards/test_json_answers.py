"""Test JSON answers: equal values, schemas, invalid JSON, and where JSON is searched."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit import Message, with_options
from reward_kit.errors import ConfigError, RewardError
from reward_kit.rewards.json_answers import json_answer, json_schema_answer
from reward_kit.typed_interface import reward_spec
from tests.profiles import examples
from tests.rewards.answers import MEGABYTE, REPEATED, ask, histories, wild_text

TRUTH = {"city": "Oslo", "degrees": 4, "tags": ["cold", "wet"]}
TEXT = json.dumps(TRUTH)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        pytest.param(TEXT, 1.0, id="bare"),
        pytest.param(f"\n  {json.dumps(TRUTH, indent=4)} \n", 1.0, id="indented"),
        pytest.param(f"```json\n{TEXT}\n```", 1.0, id="fenced"),
        pytest.param(f"```\n{TEXT}\n```", 1.0, id="fenced-without-a-tag"),
        pytest.param(f"```JSON\n{TEXT}", 1.0, id="fence-not-closed"),
        pytest.param(f"Here you are: {TEXT}. Anything else?", 1.0, id="in-prose"),
        pytest.param(f"{{note}}: {TEXT}", 1.0, id="after-a-brace-that-is-none"),
        pytest.param(f"<think>{{}}</think>{TEXT}", 1.0, id="after-a-thought"),
        pytest.param(f"<think>{TEXT}</think>I do not know.", 0.0, id="only-in-the-thought"),
        pytest.param(f"{TEXT}\nNo, it is {{}}", 0.0, id="the-last-one-counts"),
        pytest.param(f"```json\n{{}}\n```\n```json\n{TEXT}\n```", 1.0, id="the-last-block-counts"),
        pytest.param(f"{TEXT}\n```json\noops\n```", 0.0, id="a-broken-block-is-the-answer"),
        pytest.param(f"```python\n{TEXT}\n```", 1.0, id="a-block-of-another-language-is-text"),
        pytest.param('{"degrees": 4.0, "tags": ["cold", "wet"], "city": "Oslo"}', 1.0, id="order-and-4.0"),
        pytest.param('{"city": "\\u004fslo", "degrees": 4, "tags": ["cold", "wet"]}', 1.0, id="escapes"),
        pytest.param('{"city": "Oslo", "degrees": 4, "tags": ["wet", "cold"]}', 0.0, id="order-of-an-array"),
        pytest.param('{"city": "oslo", "degrees": 4, "tags": ["cold", "wet"]}', 0.0, id="case"),
        pytest.param('{"city": "Oslo", "degrees": "4", "tags": ["cold", "wet"]}', 0.0, id="text-for-number"),
        pytest.param('{"city": "Oslo", "degrees": 5, "tags": ["cold", "wet"]}', 0.0, id="near"),
        pytest.param('{"city": "Oslo", "degrees": 4}', 0.0, id="field-missing"),
        pytest.param(TEXT[:-1] + ', "x": null}', 0.0, id="field-too-much"),
        pytest.param(TEXT[:-1] + ', "city": "Oslo"}', 0.0, id="field-twice"),
        pytest.param(TEXT[:-1] + ",}", 0.0, id="comma-at-the-end"),
        pytest.param(TEXT.replace('"', "'"), 0.0, id="python-not-json"),
        pytest.param(TEXT[:-1], 0.0, id="cut-off"),
        pytest.param(f"[{TEXT}]", 0.0, id="wrapped-in-an-array"),
        pytest.param(json.dumps(TEXT), 0.0, id="json-in-json"),
        pytest.param(TEXT.replace("4", "NaN"), 0.0, id="nan"),
        pytest.param("", 0.0, id="empty"),
        pytest.param("The city is Oslo.", 0.0, id="prose"),
        pytest.param("null", 0.0, id="null"),
        pytest.param("[" * 5000, 0.0, id="deep"),
        pytest.param('{"city": "\\ud800"}', 0.0, id="half-a-character"),
    ],
)
def test_answer_must_equal_the_expected_value(reply: str, score: float) -> None:
    assert ask(json_answer, reply, TRUTH).score == score
    assert ask(json_answer, reply, TEXT).score == score


@pytest.mark.parametrize(
    ("reply", "truth", "score"),
    [
        ("true", "true", 1.0),
        ("1", True, 0.0),
        ("true", 1, 0.0),
        ("0", False, 0.0),
        ("null", "null", 1.0),
        ('""', '""', 1.0),
        ("[]", [], 1.0),
        ("{}", [], 0.0),
        ("{}", {}, 1.0),
        ('"Paris"', '"Paris"', 1.0),
        ("Paris", '"Paris"', 0.0),
        ("1e2", 100, 1.0),
        ("-0", 0, 1.0),
        ("9007199254740993", 9007199254740992, 0.0),
    ],
)
def test_scalar_and_array_answers_are_compared(reply: str, truth: Any, score: float) -> None:
    assert ask(json_answer, reply, truth).score == score


def test_part_of_malformed_json_is_not_an_answer() -> None:
    for broken in (
        '{"items": [1, 2],}',
        'Result: {"items": [1, 2],}',
        '{"items": [1, 2], "a": NaN}',
        "[[1, 2], [1, 2]",
    ):
        assert ask(json_answer, broken, [1, 2]).score == 0.0


@pytest.mark.parametrize(
    ("answer", "replies"),
    [
        ("whole", {TEXT: 1.0, f"```json\n{TEXT}\n```": 0.0, f"It is {TEXT}": 0.0}),
        ("fenced", {TEXT: 0.0, f"```json\n{TEXT}\n```": 1.0, f"It is {TEXT}": 0.0}),
    ],
)
def test_answer_option_selects_the_location_of_the_json(answer: str, replies: dict[str, float]) -> None:
    for reply, score in replies.items():
        assert ask(json_answer, reply, TRUTH, answer=answer).score == score


@pytest.mark.parametrize(
    ("reply", "truth", "share"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, 1.0),
        ({"a": 1, "b": 3}, {"a": 1, "b": 2}, 1 / 3),
        ({"a": 1}, {"a": 1, "b": 2}, 1 / 2),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, {"a": 1, "b": 2}, 1 / 2),
        ({"a": {"b": [1, 2, 3]}}, {"a": {"b": [1, 2, 4]}}, 1 / 2),
        ([1, 2, 3], [1, 2, 3, 4], 3 / 4),
        ([0, 1, 2], [1, 2], 0.0),
        ({"a": []}, {"a": {}}, 0.0),
        (7, {"a": 7}, 0.0),
    ],
)
def test_partial_option_scores_the_share_of_fields(reply: Any, truth: Any, share: float) -> None:
    assert ask(json_answer, json.dumps(reply), truth, partial="fields").score == pytest.approx(share)
    plain = ask(json_answer, json.dumps(reply), truth)
    assert plain.score == float(share == 1.0)
    assert plain.metrics["fields"].score == pytest.approx(share)


def test_arrays_and_tolerance_options_relax_the_comparison() -> None:
    assert ask(json_answer, "[2, 1, 2]", [1, 2, 2], arrays="any_order").score == 1.0
    assert ask(json_answer, "[2, 1, 1]", [1, 2, 2], arrays="any_order").score == 0.0
    assert ask(json_answer, "[3, 1]", [1, 2], arrays="any_order", partial="fields").score == pytest.approx(1 / 3)
    assert ask(json_answer, "[0.30000000000000004]", [0.3], tolerance=1e-9).score == 1.0
    assert ask(json_answer, "[0.30000000000000004]", [0.3]).score == 0.0


@pytest.mark.parametrize("options", [{"tolerance": -1.0}, {"tolerance": 0.1, "arrays": "any_order"}])
def test_invalid_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tolerance"):
        ask(json_answer, "1", 1, **options)


@pytest.mark.parametrize("truth", [None, "Paris", '{"a": 1,}', {"a": {1, 2}}, float("nan")])
def test_ground_truth_that_is_not_json_leaves_the_rollout_unscored(truth: Any) -> None:
    with pytest.raises(RewardError, match="ground_truth"):
        ask(json_answer, "{}", truth)


def test_the_reason_names_the_first_difference() -> None:
    reason = ask(json_answer, '{"city": "Oslo", "degrees": 4, "tags": ["cold"]}', TRUTH).reason
    assert (
        reason
        == "the answer is not the expected value at .tags: expected an array of 2 items, found an array of 1 item"
    )
    assert "no JSON" in ask(json_answer, "Oslo", TRUTH).reason


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1},
        "degrees": {"type": "integer", "minimum": -90, "maximum": 60},
        "tags": {"type": "array", "items": {"enum": ["cold", "wet", "warm"]}, "uniqueItems": True},
        "when": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "more": {"$ref": "#"},
    },
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        pytest.param(TEXT, 1.0, id="conforms"),
        pytest.param(f"```json\n{TEXT}\n```", 1.0, id="fenced"),
        pytest.param('{"city": "Oslo"}', 1.0, id="optional-left-out"),
        pytest.param('{"degrees": 4}', 0.0, id="required-left-out"),
        pytest.param('{"city": ""}', 0.0, id="too-short"),
        pytest.param('{"city": 4}', 0.0, id="type"),
        pytest.param('{"city": null}', 0.0, id="null-is-no-text"),
        pytest.param('{"city": "Oslo", "degrees": 4.0}', 1.0, id="4.0-is-an-integer"),
        pytest.param('{"city": "Oslo", "degrees": 4.5}', 0.0, id="4.5-is-none"),
        pytest.param('{"city": "Oslo", "degrees": "4"}', 0.0, id="text-for-integer"),
        pytest.param('{"city": "Oslo", "degrees": true}', 0.0, id="true-is-no-integer"),
        pytest.param('{"city": "Oslo", "degrees": 61}', 0.0, id="too-large"),
        pytest.param('{"city": "Oslo", "tags": []}', 1.0, id="empty-array"),
        pytest.param('{"city": "Oslo", "tags": ["hot"]}', 0.0, id="none-of-the-enum"),
        pytest.param('{"city": "Oslo", "tags": ["cold", "cold"]}', 0.0, id="items-twice"),
        pytest.param('{"city": "Oslo", "tags": "cold"}', 0.0, id="no-array"),
        pytest.param('{"city": "Oslo", "country": "Norway"}', 0.0, id="additional"),
        pytest.param('{"city": "Oslo", "code": "OSL"}', 1.0, id="pattern"),
        pytest.param('{"city": "Oslo", "code": "osl"}', 0.0, id="not-the-pattern"),
        pytest.param('{"city": "Oslo", "code": "' + "A" * 20_000 + '"}', 0.0, id="too-long-for-a-pattern"),
        pytest.param('{"city": "Oslo", "more": {"city": "Bergen"}}', 1.0, id="recursion"),
        pytest.param('{"city": "Oslo", "more": {}}', 0.0, id="recursion-that-does-not-conform"),
        pytest.param('{"city": "Oslo", "more": ' * 45 + '{"city": "Oslo"}' + "}" * 45, 1.0, id="deep"),
        pytest.param('{"city": "Oslo", "more": ' * 60 + '{"city": "Oslo"}' + "}" * 60, 0.0, id="too-deep"),
        pytest.param('{"city": "Oslo", "when": "yesterday"}', 1.0, id="format-is-a-remark"),
        pytest.param(f"[{TEXT}]", 0.0, id="wrapped"),
        pytest.param(TEXT[:-1] + ",}", 0.0, id="no-json"),
        pytest.param('{"city": "Oslo", "city": "Oslo"}', 0.0, id="field-twice"),
        pytest.param("Oslo", 0.0, id="prose"),
        pytest.param("", 0.0, id="empty"),
        pytest.param("{}", 0.0, id="empty-object"),
        pytest.param('{"city": "Oslo", "degrees": 1e999}', 0.0, id="beyond-every-float"),
    ],
)
def test_answer_is_validated_against_the_schema(reply: str, score: float) -> None:
    assert ask(json_schema_answer, reply, SCHEMA).score == score
    assert ask(json_schema_answer, reply, json.dumps(SCHEMA)).score == score
    assert ask(json_schema_answer, reply, {"city": "a truth for another reward"}, schema=SCHEMA).score == score


def test_formats_are_checked_only_on_request() -> None:
    assert ask(json_schema_answer, '{"city": "Oslo", "when": "yesterday"}', SCHEMA, formats=True).score == 0.0
    assert ask(json_schema_answer, '{"city": "Oslo", "when": "2025-02-28"}', SCHEMA, formats=True).score == 1.0
    assert ask(json_schema_answer, '{"city": "Oslo", "when": "2025-02-29"}', SCHEMA, formats=True).score == 0.0


def test_schema_draft_is_respected() -> None:
    tuples = {"items": [{"type": "integer"}], "additionalItems": False}
    fourth = {"$schema": "http://json-schema.org/draft-04/schema#", **tuples}
    assert ask(json_schema_answer, "[1]", fourth).score == 1.0
    assert ask(json_schema_answer, "[1, 2]", fourth).score == 0.0
    assert ask(json_schema_answer, "4.0", {**fourth, "type": "integer"}).score == 0.0


def test_invalid_schema_is_rejected() -> None:
    for truth in (None, "no JSON", [], 7, {"type": "strnig"}, {"required": "city"}):
        with pytest.raises(RewardError, match="json_schema_answer"):
            ask(json_schema_answer, "", truth)
    with pytest.raises(ConfigError, match="not a JSON schema"):
        ask(json_schema_answer, "", None, schema={"type": "strnig"})
    with pytest.raises(RewardError, match="refers to itself endlessly"):
        ask(json_schema_answer, "1", {"$ref": "#"})


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str]]]:
    """A server's address, and the paths that it was asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", paths
    server.shutdown()
    thread.join()
    server.server_close()


def test_schema_references_are_not_fetched(asked: tuple[str, list[str]]) -> None:
    address, paths = asked
    for schema in ({"$ref": f"{address}/a.json"}, {"$id": f"{address}/b.json", "$ref": "c.json"}):
        with pytest.raises(RewardError, match="other documents are not fetched"):
            ask(json_schema_answer, "{}", schema)
    with pytest.raises(RewardError, match="other documents are not fetched"):
        ask(json_schema_answer, "{}", {"$ref": "file:///etc/passwd"})
    assert paths == []


def test_json_schema_answer_runs_in_the_sandbox() -> None:
    assert reward_spec(json_schema_answer).sandbox == "warm"
    assert reward_spec(with_options(json_schema_answer, schema=SCHEMA)).sandbox == "warm"


def test_unique_items_check_is_linear() -> None:
    items = [value for index in range(8_000) for value in (index, str(index), [index])]
    assert ask(json_schema_answer, json.dumps(items), {"uniqueItems": True}).score == 1.0
    assert ask(json_schema_answer, json.dumps([*items, [1.0]]), {"uniqueItems": True}).score == 0.0
    assert ask(json_schema_answer, "[1, true, 0, false]", {"uniqueItems": True}).score == 1.0


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(values, st.sampled_from(["{}", "```json\n{}\n```", "<think>[</think>{}"]))
def test_json_value_is_found_in_any_frame(value: Any, frame: str) -> None:
    reply = frame.replace("{}", json.dumps(value, ensure_ascii=False, indent=2))
    assert ask(json_answer, reply, json.dumps(value)).score == 1.0


@given(values, values)
def test_the_share_of_fields_is_1_for_equal_values_only(one: Any, other: Any) -> None:
    share = ask(json_answer, json.dumps(one), json.dumps(other), partial="fields").score
    assert (share == 1.0) == (ask(json_answer, json.dumps(one), json.dumps(other)).score == 1.0)
    assert share == pytest.approx(ask(json_answer, json.dumps(other), json.dumps(one), partial="fields").score)


json_like = st.lists(st.sampled_from(["{", "}", "[", "]", '"a"', ":", ",", "1", "NaN", "```", "\n", "\\", "\ud800"]))


@settings(max_examples=examples(200), deadline=None)
@given(wild_text | json_like.map("".join), histories)
def test_no_reply_raises(reply: str, messages: list[Message]) -> None:
    for reward in (with_options(json_answer, partial="fields"), json_schema_answer):
        assert 0.0 <= ask(reward, reply, SCHEMA).score <= 1.0
        assert 0.0 <= reward(messages, SCHEMA).score <= 1.0


@pytest.mark.parametrize("repeated", [*REPEATED[::4], '{"', '{"a":', '["', "[1,", "{}", "[]{", '"\\'])
def test_megabyte_reply_is_read_in_linear_time(repeated: str) -> None:
    reply = (repeated * (MEGABYTE // len(repeated)))[:MEGABYTE]
    assert ask(json_answer, reply, TRUTH).score == 0.0
    assert ask(json_schema_answer, reply, SCHEMA).score == 0.0
