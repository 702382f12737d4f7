"""The recorded tokens of an episode, step by step, as the page shows them; and the texts of their ids, where known.

Texts come from the `tokenizer.json` of a model's folder, read as the JSON that it is: no tokenizer has to be installed,
and nothing is fetched. Where secrets were blotted out of an episode its texts are left out, since ids would tell them.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reward_kit.display_text import shown
from reward_kit.episodes.json_codec import from_json_value
from reward_kit.runs.files import TRAINING
from reward_kit.runs.redaction import HIDDEN
from reward_kit.runs.run_folder import RunHeader

_MOST_CONTEXT = 200  # tokens shown of what the model saw before an action
_DIGITS = 4
_SPACE = "\u2581"  # how SentencePiece writes a space


class TokenTexts:
    """The texts of token ids.

    Args:
        pieces: by id, as the tokenizer's vocabulary has them.
        added: by id, of those that were added to it, which are text as they stand.
        is_byte_level: each character of a piece stands for a byte.
    """

    def __init__(
        self, pieces: Mapping[int, str], added: Mapping[int, str] | None = None, *, is_byte_level: bool = False
    ) -> None:
        self._pieces, self._added = pieces, added or {}
        self._bytes = _bytes_of_characters() if is_byte_level else None

    @classmethod
    def read(cls, file: Path) -> TokenTexts | None:
        """Of a `tokenizer.json`; None where there is none, or where it is of a form unknown here."""
        try:
            data = json.loads(file.read_bytes())
            vocabulary = data["model"]["vocab"]
            if isinstance(vocabulary, Mapping):
                pieces = {number: piece for piece, number in vocabulary.items()}
            else:  # of "Unigram": pieces with their weights
                pieces = {number: piece for number, (piece, _) in enumerate(vocabulary)}
            added = {one["id"]: one["content"] for one in data.get("added_tokens") or ()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        parts = json.dumps([data.get("decoder"), data.get("pre_tokenizer")])
        return cls(pieces, added, is_byte_level='"ByteLevel"' in parts)

    def of(self, ids: Iterable[int]) -> dict[str, str]:
        """The texts of those of these ids that have one."""
        return {str(number): text for number in set(ids) if (text := self._text(number)) is not None}

    def _text(self, number: int) -> str | None:
        if number in self._added or number not in self._pieces:
            return self._added.get(number)
        piece = self._pieces[number]
        if self._bytes is not None and all(character in self._bytes for character in piece):
            return bytes(self._bytes[character] for character in piece).decode("utf-8", "replace")
        return piece.replace(_SPACE, " ")


def token_texts(header: RunHeader) -> TokenTexts | None:
    """The texts of the tokens of a run whose policy is a model in a folder of this machine.

    None where it is not, and where the task has a hook that blots texts out.
    """
    task, folder = header.task, Path(header.task_path).parent if header.task_path else Path()
    redacts = bool(task.get("redact"))
    if (training := header.training) is not None:
        task, folder = training.get("config") or {}, Path(str(training.get("train_path"))).parent
        redacts = bool(training.get("redacts"))
    policy = task.get("policy")
    if not isinstance(policy, Mapping) or redacts:
        return None
    place = policy.get("tokenizer") or policy.get("model")
    if not isinstance(place, str) or not place:
        return None
    return TokenTexts.read(folder / Path(place).expanduser() / "tokenizer.json")


def token_rows(record: Mapping[str, Any], texts: TokenTexts | None = None) -> dict[str, Any] | None:
    """The tokens of one line of `episodes.jsonl` for the page; None where none are recorded.

    Args:
        record: the line.
        texts: of the ids.

    Returns:
        `texts` by id, null where unknown; `steps`, one for each action: its `step`; `context`, the last 200 ids that
        the model saw since its last action, or since its context was rewritten, and `cut`, how many stood before them;
        the `ids` that it sampled, with the `logprobs` of the distribution that was sampled, null where unknown;
        `choices`, among how many ids each was chosen, null for any; `version` of the weights; `reason`, why the context
        was rewritten. In a line that a training run kept, also `advantages` and `ratios` of the sampled ids. Of damaged
        tokens there are no steps, and `damaged` says why.
    """
    stored = record.get("tokens")
    if not stored or "steps" in stored:
        return None
    try:
        steps = _steps(stored, record.get(TRAINING) or {})
        used = {number for step in steps for number in (*step["context"], *step["ids"])}
        is_told = texts is not None and HIDDEN not in json.dumps(record.get("messages"))
        return {"texts": texts.of(used) if texts is not None and is_told else None, "steps": steps}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        return {"texts": None, "steps": [], "damaged": shown(repr(error), _MOST_CONTEXT)}


def _steps(stored: Mapping[str, Any], training: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One for each action; `actions` are [step, segment, start, stop, version] in the flat ids."""
    ids, segments = stored["ids"], stored["segments"]
    advantages, ratios = training.get("advantages"), training.get("ratios")
    allowed = stored.get("allowed_ids") or {"places": [], "which": [], "sets": []}
    sizes = [_size(one) for one in allowed["sets"]]
    found: list[dict[str, Any]] = []
    seen = before = 0
    for number, (step, segment, start, stop, version) in enumerate(stored["actions"]):
        begin = seen if segment == before and found else segments[segment][0]
        row = {"step": step, "context": ids[max(begin, start - _MOST_CONTEXT) : start], "ids": ids[start:stop]}
        row |= {"cut": max(0, start - begin - _MOST_CONTEXT), "version": version if version >= 0 else None}
        row["logprobs"] = [_short(value) for value in stored["logprobs"][number]]
        row["choices"] = _choices(allowed, sizes, start, stop)
        if segment != before:
            row["reason"] = segments[segment][2]
        if advantages is not None and advantages[number] is not None:
            row["advantages"] = [_short(advantages[number])] * (stop - start)
        if ratios is not None and ratios[number] is not None:
            row["ratios"] = [_short(value) for value in ratios[number]]
        found.append(row)
        seen, before = stop, segment
    return found


def _size(one: Any) -> int:
    """How many ids a set has; runs are [first, length, first, length …]."""
    return sum(one["runs"][1::2]) if isinstance(one, Mapping) else len(one)


def _choices(allowed: Mapping[str, Any], sizes: Sequence[int], start: int, stop: int) -> list[int | None] | None:
    first, last = bisect_left(allowed["places"], start), bisect_left(allowed["places"], stop)
    if first == last:
        return None
    found: list[int | None] = [None] * (stop - start)
    for place, which in zip(allowed["places"][first:last], allowed["which"][first:last], strict=True):
        found[place - start] = sizes[which]
    return found


def _short(value: Any) -> float | None:
    """A number with as many digits as anybody reads; an infinite one, and an unknown one, is none."""
    known = from_json_value(value)
    is_finite = isinstance(known, int | float) and abs(known) < float("inf")
    return round(float(known), _DIGITS) if is_finite else None


def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Source: `bytes_to_unicode` of GPT-2, https://github.com/openai/gpt-2/blob/master/src/encoder.py: bytes that print
    stand for themselves, the others for the characters from 256 on.
    """
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(prints)]
    return {chr(byte): byte for byte in prints} | {chr(256 + place): byte for place, byte in enumerate(others)}
