"""The reward for answers that are lists: all of the items and no other, or the share that the author pays for."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from reward_kit.errors import RewardError
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.rewards.reading.found_answers import answer_region
from reward_kit.rewards.reading.normalising import Normalisation, normalised
from reward_kit.rewards.reading.texts import last_answer, needed
from reward_kit.typed_interface import reward_function

LONGEST = 100_000
"""Characters of a reply's list. A longer one is not read."""

MOST_ITEMS = 1_000
_BULLET = re.compile(r"[ \t]*(?:[-*•‣–]|[0-9]{1,4}[.)])[ \t]+(\S.*)")
_FENCE = re.compile(r"```[a-zA-Z]*[ \t]*\n(.*?)```", re.DOTALL)
_QUOTES = ('"', "'", "`", "**", "“”")
_LAST_AND = re.compile(r",?\s+(?:and|or)\s+", re.IGNORECASE)


@reward_function
def list_answer(
    messages: list[Message],
    ground_truth: Any,
    *,
    ordered: bool = False,
    duplicates: Literal["count", "ignore"] = "count",
    partial: Literal["none", "recall", "f1", "jaccard"] = "none",
    normalise: tuple[Normalisation, ...] = ("strip", "nfkc", "casefold"),
) -> EvaluateResult:
    """1 where the reply lists exactly the expected items; else 0, or a share where `partial` asks for one.

    The list is a JSON array, lines with bullets or numbers, plain lines, or items between commas or semicolons (the
    last one may follow an "and"). It is looked for in the last box, in `<answer>`, behind the last "the answer is", and
    else in the whole reply. The score's parts are metrics: recall, precision, f1 and jaccard.

    Args:
        messages: the conversation; its last assistant message is read.
        ground_truth: a list, or a text that is read in the same way.
        ordered: the order counts. Items in order are then those of the longest common subsequence.
        duplicates: "count": an item that is expected twice is named twice; "ignore": once is as good as twice.
        partial: what a list that is not right earns. "recall" pays a reply that lists everything it can think of; "f1"
            and "jaccard" do not.
        normalise: what is done to each item on both sides, in this order, as for `exact_answer`; "numbers" makes 1,000
            and 1000.0 the same.

    Raises:
        RewardError: there is no ground truth, so that the rollout is unscored.

    Example:
        ```python
        list_answer(messages, ["red", "blue"])  # 1 for "Answer: Blue, red" and for "- red\\n- blue"
        ```
    """
    given = needed(ground_truth, "list_answer")
    if isinstance(given, set | frozenset):
        given = sorted(given, key=str)
    wanted = given if isinstance(given, list | tuple) else read_list(str(given))
    if wanted is None or len(wanted) > MOST_ITEMS:
        raise RewardError(f"list_answer: the ground_truth is no list of at most {MOST_ITEMS} items")
    found = read_list(answer_region(last_answer(messages)))
    if found is None:
        return EvaluateResult(score=0.0, reason="the reply lists nothing that can be read")
    if len(found) > MOST_ITEMS:
        return EvaluateResult(score=0.0, reason=f"the reply lists {len(found)} items; {MOST_ITEMS} are looked at")
    expected, stated = ([_item(item, normalise) for item in items] for items in (wanted, found))
    if duplicates == "ignore":
        expected, stated = list(dict.fromkeys(expected)), list(dict.fromkeys(stated))
    return _scored(expected, stated, ordered, partial)


def read_list(text: str) -> list[Any] | None:
    """The items of a list in a text; None where there is none, or it is too long to be read."""
    text = text.strip()
    if not text or len(text) > LONGEST:
        return None
    if (items := _json_list(text)) is not None:
        return items
    lines = [line for line in text.splitlines() if line.strip()]
    bullets = _last_bullets(lines)
    if bullets:
        return [_bare(item) for item in bullets]
    if len(lines) > 1:
        return [_bare(line) for line in lines]
    return _between_commas(lines[0])


def _scored(expected: Sequence[str], stated: Sequence[str], ordered: bool, partial: str) -> EvaluateResult:
    common = _in_order(expected, stated) if ordered else sum((Counter(expected) & Counter(stated)).values())
    is_right = common == len(expected) == len(stated)
    recall = common / len(expected) if expected else float(not stated)
    precision = common / len(stated) if stated else float(not expected)
    union = len(expected) + len(stated) - common
    shares = {
        "recall": recall,
        "precision": precision,
        "f1": 2 * recall * precision / (recall + precision) if common else float(is_right),
        "jaccard": common / union if union else 1.0,
    }
    reason = f"{common} of {len(expected)} expected items, among {len(stated)} listed{', in order' if ordered else ''}"
    metrics = {name: MetricResult(score=share, reason=reason) for name, share in shares.items()}
    return EvaluateResult(score=shares.get(partial, float(is_right)), reason=reason, metrics=metrics)


def _in_order(left: Sequence[str], right: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(right) + 1)
    for item in left:
        diagonal = 0
        for index, other in enumerate(right, start=1):
            above = row[index]
            row[index] = diagonal + 1 if item == other else max(above, row[index - 1])
            diagonal = above
    return row[-1]


def _json_list(text: str) -> list[Any] | None:
    """The text, its last code block, or its last bracket that opens a line, as a JSON array."""
    fenced = _FENCE.findall(text)
    candidates = [text, *fenced[-1:]]
    if (opened := text.rfind("\n[")) >= 0 or (opened := text.find("[")) >= 0:
        candidates.append(text[opened:].lstrip("\n")[: text.rfind("]") - opened + 1])
    for candidate in candidates:
        if not candidate.strip().startswith("["):
            continue
        try:
            read = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return list(read)
    return None


def _last_bullets(lines: Sequence[str]) -> list[str]:
    """The items of the last block of lines with bullets."""
    found: list[str] = []
    for line in reversed(lines):
        match = _BULLET.fullmatch(line)
        if match:
            found.append(match[1])
        elif found:
            break
    return found[::-1]


def _between_commas(line: str) -> list[str]:
    line = line.strip().rstrip(".")
    if len(line) > 1 and (line[0], line[-1]) in {("[", "]"), ("{", "}"), ("(", ")")}:
        line = line[1:-1]
    sign = ";" if ";" in line else ","
    pieces = line.split(sign)
    pieces = [*pieces[:-1], *_LAST_AND.split(pieces[-1].strip(), maxsplit=1)]
    return [_bare(re.sub(r"^(?:and|or)\s+", "", piece.strip())) for piece in pieces if piece.strip()]


def _bare(item: str) -> str:
    """An item without the quotes or bold marks around it, and without a comma behind it."""
    item = item.strip().rstrip(",;").strip()
    for quote in _QUOTES:
        start, end = (quote[0], quote[-1]) if quote == "“”" else (quote, quote)
        if len(item) > len(start) + len(end) and item.startswith(start) and item.endswith(end):
            return item[len(start) : -len(end)].strip()
    return item


def _item(item: Any, steps: tuple[Normalisation, ...]) -> str:
    text = item if isinstance(item, str) else json.dumps(item, sort_keys=True, default=str)
    return normalised(text, steps)
