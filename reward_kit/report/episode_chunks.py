"""The episodes of a page: the stored lines of each group, in chunks that a browser loads one at a time.

Lines are parsed only if the page could not show them quickly without changes. Writing the page of a large run therefore
takes little longer than copying its files. A chunk consists of lines that start with a letter. `E` is an episode. It is
followed by its score (`S`), the list of its lines in `credit.jsonl` (`C`) and the list of its success probabilities in
`counterfactual.jsonl` (`V`), each only if it exists. The page's script `objects.js` parses these lines.

The texts of tokens are read from the `tokenizer.json` in a model's directory. This file is plain JSON, so no tokenizer
is required and nothing is downloaded. If secrets in an episode were redacted, its token texts are omitted, since they
would reveal the secrets.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from reward_kit.display_text import escape_text
from reward_kit.episodes.json_codec import TAG, from_json_value
from reward_kit.errors import StoreError
from reward_kit.private_files import make_private_folder
from reward_kit.report.run_data import EpisodeOutline, RunFacts, curves_of, grouped
from reward_kit.runs.counterfactual_file import RunCurves
from reward_kit.runs.files import (
    CREDIT_FILE,
    EPISODES_FILE,
    SCORES_FILE,
    SUMMARY_FILE,
    TRAINING,
    read_json,
    wrap_os_errors,
    write_atomically,
)
from reward_kit.runs.redaction import HIDDEN
from reward_kit.runs.results import STEP, LineRange, index_credit
from reward_kit.runs.run_folder import RunHeader

MOST_TOGETHER = 64
"""The largest number of episodes of a group that are shown side by side; larger groups are split into parts."""
_PART_BYTES = 4_000_000
_CHUNK_BYTES = 500_000


class StoredLines(NamedTuple):
    """The stored lines of an episode. Its credit lines are concatenated."""

    episode: bytes
    score: bytes | None = None
    credit: bytes = b""
    curves: bytes = b""


class GroupPart(NamedTuple):
    """Episodes that are shown together: a group, or a part of a large group."""

    group_id: str
    size: int  # the number of episodes in the whole group
    first: int  # the index of the first of these episodes
    episodes: Sequence[EpisodeOutline]  # in the order of rollout indices


def group_text(episodes: Iterable[StoredLines], fitter: LineFitter) -> bytes:
    """Return the episodes of a group as part of a chunk: ASCII text without `<`, which could end a script."""
    parts: list[bytes] = []
    for lines in episodes:
        parts += b"E", fitter.fitted(lines.episode), b"\n"
        if lines.score is not None:
            parts += b"S", fitter.fitted(lines.score), b"\n"
        if lines.credit:
            # List items without the common prefix, which contains the episode's id.
            prefix = lines.credit[1 : max(1, lines.credit.find(STEP))]
            lean = lines.credit.replace(prefix, b"") if prefix else lines.credit
            parts += b"C[", lean.strip().replace(b"\n", b","), b"]\n"
        if lines.curves:
            parts += b"V", lines.curves, b"\n"
    return b"".join(parts).replace(b"<", b"\\u003c")


def curve_line(facts: EpisodeOutline, curves: RunCurves) -> bytes:
    """Return the success probabilities of an episode as a JSON list, or b"" if they were not measured."""
    own = [curve.model_dump(exclude={"schema_version", "rollout_id", "score"}) for curve in curves_of(facts, curves)]
    return json.dumps(own, separators=(",", ":")).encode("ascii") if own else b""


def split_groups(episodes: Iterable[EpisodeOutline]) -> list[GroupPart]:
    """Return the groups of a run in the order of samples and policies. Large groups are split into parts."""
    groups = grouped(episodes, lambda facts: facts.group_id)
    parts = []
    for name in sorted(groups, key=lambda name: (str(groups[name][0].row.sample_id), groups[name][0].row.policy, name)):
        ordered = sorted(groups[name], key=lambda facts: (facts.rollout_index, facts.row.rollout_id))
        first, size = 0, 0
        for index, facts in enumerate(ordered):
            if index > first and (index - first == MOST_TOGETHER or size + _size(facts) > _PART_BYTES):
                parts.append(GroupPart(name, len(ordered), first, ordered[first:index]))
                first, size = index, 0
            size += _size(facts)
        parts.append(GroupPart(name, len(ordered), first, ordered[first:]))
    return parts


def split_chunks(parts: Iterable[GroupPart]) -> list[list[GroupPart]]:
    """Divide parts into chunks that contain about half a megabyte of stored lines each."""
    chunks: list[list[GroupPart]] = []
    size = _CHUNK_BYTES
    for part in parts:
        if size >= _CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(part)
        size += sum(map(_size, part.episodes))
    return chunks


def _size(facts: EpisodeOutline) -> int:
    score = facts.score.place if facts.score is not None else None
    return (facts.place.length if facts.place is not None else 0) + (score.length if score is not None else 0)


class ChunkReader:
    """A context manager that reads the stored lines in a run's chunks."""

    def __init__(self, run: RunFacts) -> None:
        self._path, self._fitter, self._curves = run.path, LineFitter(run.header), run.curves
        self._credit = index_credit(run.path)
        self.chunks = split_chunks(split_groups(run.episodes))
        lines = sum(_size(facts) for facts in run.episodes)
        self.stored_bytes = lines + sum(place.length for place in self._credit.values())

    def __enter__(self) -> ChunkReader:
        with ExitStack() as opened:
            descriptors = []
            for name in (EPISODES_FILE, SCORES_FILE, CREDIT_FILE):
                descriptors.append(-1)
                if (path := self._path / name).exists():
                    with wrap_os_errors("open", path):
                        descriptors[-1] = os.open(path, os.O_RDONLY)
                    opened.callback(os.close, descriptors[-1])
            self._episodes, self._scores, self._steps = descriptors
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def texts(self) -> Iterator[bytes]:
        """Yield the text of each chunk. The text is read only when it is requested."""
        for chunk in self.chunks:
            with wrap_os_errors("read", self._path):
                text = b"".join(group_text(map(self._stored, part.episodes), self._fitter) for part in chunk)
            yield text

    def _stored(self, facts: EpisodeOutline) -> StoredLines:
        score, credit = facts.score, self._credit.get(facts.row.rollout_id)
        return StoredLines(
            _read(self._episodes, facts.place) or b"{}",
            _read(self._scores, score.place) if score is not None else None,
            _read(self._steps, credit) or b"",
            curve_line(facts, self._curves),
        )


def _read(descriptor: int, place: LineRange | None) -> bytes | None:
    return os.pread(descriptor, place.length, place.offset) if place is not None else None


# Fitting lines into a page

CUT = "__cut__"
"""The key of a truncated text: `{"__cut__": its beginning, "length": the full length}`."""
_LONG_LINE = 100_000
_LONGEST_TEXTS = (20_000, 2_000, 200)  # use the next limit if a line is still too long
_MOST_BYTES = 2_000_000
_TOKENS = b'"tokens":{'
_ENCODED_TEXT = f'"{TAG}":"text"'.encode()


class LineFitter:
    """Truncates the lines of a run to fit them into the page of the run."""

    def __init__(self, header: RunHeader) -> None:
        self._texts = functools.cache(functools.partial(token_texts, header))  # read on first use

    def fitted(self, line: bytes) -> bytes:
        """Return a line for the page as ASCII text of bounded length.

        A string of more than 20,000 characters becomes `{"__cut__": …, "length": …}`, and recorded tokens become the
        rows of `token_rows`. A damaged line becomes null or stays unchanged, and the page reports that it cannot be
        read.
        """
        line = line.strip()
        is_plain = _TOKENS not in line and line.isascii()
        if is_plain and (len(line) <= _LONG_LINE or (len(line) <= _MOST_BYTES and _has_short_texts(line))):
            return line
        try:
            record = json.loads(line)
            if isinstance(record, dict) and "tokens" in record:
                record["tokens"] = token_rows(record, self._texts())
            for longest in _LONGEST_TEXTS:
                text = json.dumps(_cut(record, longest), separators=(",", ":"), allow_nan=False).encode("ascii")
                if len(text) <= _MOST_BYTES:
                    break
        except (ValueError, RecursionError):  # damaged, or nested too deeply
            return b"null"
        return text


def _has_short_texts(line: bytes) -> bool:
    """Return True if no string of a JSON line must be truncated. This is faster than parsing the line."""
    if _ENCODED_TEXT in line:
        return False
    unescaped = line.replace(b"\\\\", b"..").replace(b'\\"', b"..")
    return max(map(len, unescaped.split(b'"'))) <= _LONGEST_TEXTS[0]


def _cut(value: Any, longest: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= longest else {CUT: value[:longest], "length": len(value)}
    if isinstance(value, list):
        return [_cut(item, longest) for item in value]
    if isinstance(value, Mapping):
        if value.get(TAG) == "text":
            return _cut(from_json_value(value), longest)
        return {key[:longest]: _cut(item, longest) for key, item in value.items()}
    return value


# Tokens

_MOST_CONTEXT = 200  # context tokens shown before an action
_DIGITS = 4
_SPACE = "\u2581"  # the character that SentencePiece uses for a space


class TokenTexts:
    """A mapping of token ids to their texts."""

    def __init__(
        self, pieces: Mapping[int, str], added: Mapping[int, str] | None = None, *, is_byte_level: bool = False
    ) -> None:
        self._pieces, self._added = pieces, added or {}
        self._bytes = _bytes_of_characters() if is_byte_level else None

    @classmethod
    def read(cls, file: Path) -> TokenTexts | None:
        """Read a `tokenizer.json`, or return None if the file is missing or its format is unknown."""
        try:
            data = json.loads(file.read_bytes())
            vocabulary = data["model"]["vocab"]
            if isinstance(vocabulary, Mapping):
                pieces = {number: piece for piece, number in vocabulary.items()}
            else:  # "Unigram": pieces with their weights
                pieces = {number: piece for number, (piece, _) in enumerate(vocabulary)}
            added = {one["id"]: one["content"] for one in data.get("added_tokens") or ()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        parts = json.dumps([data.get("decoder"), data.get("pre_tokenizer")])
        return cls(pieces, added, is_byte_level='"ByteLevel"' in parts)

    def of(self, ids: Iterable[int]) -> dict[str, str]:
        """Return the texts of those ids that are known."""
        return {str(number): text for number in set(ids) if (text := self._text(number)) is not None}

    def _text(self, number: int) -> str | None:
        if number in self._added or number not in self._pieces:
            return self._added.get(number)
        piece = self._pieces[number]
        if self._bytes is not None and all(character in self._bytes for character in piece):
            return bytes(self._bytes[character] for character in piece).decode("utf-8", "replace")
        return piece.replace(_SPACE, " ")


def token_texts(header: RunHeader) -> TokenTexts | None:
    """Return the token texts of a run whose policy is a model in a local directory.

    The result is `None` for other policies and if the task has a redaction hook.
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
    """Return the tokens in a line of `episodes.jsonl` in the form for the page, or None if no tokens are recorded.

    Args:
        record: the line.
        texts: the texts of the token ids, or None if they are unknown.

    Returns:
        A dict with `texts`, which maps ids to their texts (null if unknown), and `steps`, a list with one dict per
        action. The dict of an action contains its index `step`; `context`, the last 200 ids that the model saw since
        its last action or context rewrite; `cut`, the number of earlier ids; the sampled `ids`; their `logprobs` under
        the sampling distribution, null if unknown; `choices`, the number of ids from which each id was chosen, null if
        all ids were allowed; the `version` of the weights; and the `reason` for a context rewrite. In lines logged by a
        training run, it also contains the `advantages` and `ratios` of the sampled ids. If the tokens are damaged,
        there are no steps, and `damaged` contains the reason.
    """
    stored = record.get("tokens")
    if not stored or "steps" in stored:
        return None
    try:
        steps = _steps(stored, record.get(TRAINING) or {})
        used = {number for step in steps for number in (*step["context"], *step["ids"])}
        is_hidden = HIDDEN in json.dumps(record.get("messages"))
        return {"texts": None if texts is None or is_hidden else texts.of(used), "steps": steps}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        return {"texts": None, "steps": [], "damaged": escape_text(repr(error), _MOST_CONTEXT)}


def _steps(stored: Mapping[str, Any], training: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each action, which is stored as [step, segment, start, stop, version]."""
    ids, segments = stored["ids"], stored["segments"]
    advantages, ratios = training.get("advantages"), training.get("ratios")
    allowed = stored.get("allowed_ids") or {"places": [], "which": [], "sets": []}
    # The size of each set of ids, stored as runs [first, length, first, length …].
    sizes = [sum(one["runs"][1::2]) if isinstance(one, Mapping) else len(one) for one in allowed["sets"]]
    steps: list[dict[str, Any]] = []
    seen = before = 0
    for number, (step, segment, start, stop, version) in enumerate(stored["actions"]):
        begin = seen if segment == before and steps else segments[segment][0]
        row: dict[str, Any] = {
            "step": step,
            "context": ids[max(begin, start - _MOST_CONTEXT) : start],
            "ids": ids[start:stop],
        }
        row |= {"cut": max(0, start - begin - _MOST_CONTEXT), "version": version if version >= 0 else None}
        row["logprobs"] = [_short(value) for value in stored["logprobs"][number]]
        first, last = bisect_left(allowed["places"], start), bisect_left(allowed["places"], stop)
        row["choices"] = [None] * (stop - start) if first != last else None
        for place, which in zip(allowed["places"][first:last], allowed["which"][first:last], strict=True):
            row["choices"][place - start] = sizes[which]
        if segment != before:
            row["reason"] = segments[segment][2]
        if advantages is not None and advantages[number] is not None:
            row["advantages"] = [_short(advantages[number])] * (stop - start)
        if ratios is not None and ratios[number] is not None:
            row["ratios"] = [_short(value) for value in ratios[number]]
        steps.append(row)
        seen, before = stop, segment
    return steps


def _short(value: Any) -> float | None:
    """Round a number for display, or return None if it is infinite or unknown."""
    known = from_json_value(value)
    is_finite = isinstance(known, int | float) and abs(known) < float("inf")
    return round(float(known), _DIGITS) if is_finite else None


def _bytes_of_characters() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to its byte.

    Source: `bytes_to_unicode` of GPT-2, https://github.com/openai/gpt-2/blob/master/src/encoder.py. Printable bytes map
    to themselves, and all other bytes map to the characters from 256 on.
    """
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(prints)]
    return {chr(byte): byte for byte in prints} | {chr(256 + place): byte for place, byte in enumerate(others)}


# Chunks inside the page or next to it

Mode = Literal["inline", "files", "server"]
MOST_INLINE = 3_000_000
"""The maximum size in bytes of the stored lines in the page itself; a larger page would be slow to open."""
_STAMP_BYTES = 4
_CREDIT_FACTS = ("estimator", "step_rewards")
_CREDIT_OPTIONS = ("gamma", "omega", "combination", "step_weight", "default_step_reward")


@dataclass(frozen=True, slots=True)
class ChunkData:
    """The episodes of a page, or the addresses from which they are loaded."""

    mode: Mode
    credit: Mapping[str, Any] | None  # the settings of the step credit; None if no credit was assigned
    folder: str = ""  # relative to the page
    chunks: Sequence[Sequence[GroupPart]] = ()
    texts: Sequence[str] = ()  # chunks inside the page itself

    @property
    def index(self) -> str:
        """Return JSON that HTML parsers do not interpret as markup."""
        chunks = [
            [
                [part.group_id, part.size, part.first, [facts.row.rollout_id for facts in part.episodes]]
                for part in parts
            ]
            for parts in self.chunks
        ]
        index = {"mode": self.mode, "credit": self.credit, "folder": self.folder, "chunks": chunks}
        return json.dumps(index, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def served(run: Path) -> ChunkData:
    """Return the data of a page whose episodes are served at `group/ID` and `episode/ID`."""
    return ChunkData("server", credit_facts(run))


def within(run: Path, reader: ChunkReader) -> ChunkData:
    """Return the data of a page that contains all chunks."""
    texts = [text.decode("ascii") for text in reader.texts()]
    return ChunkData("inline", credit_facts(run), chunks=reader.chunks, texts=texts)


def beside(run: Path, reader: ChunkReader, page: Path, *, is_private: bool) -> ChunkData:
    """Write all chunks into a new directory. `forget_others` later removes the directories of earlier versions."""
    stamp = secrets.token_hex(_STAMP_BYTES)
    folder = page.with_name(f"{page.stem}_data") / stamp
    with wrap_os_errors("write", folder):
        for new in (folder.parent, folder):
            (make_private_folder if is_private else Path.mkdir)(new, exist_ok=new != folder)
    for number, text in enumerate(reader.texts()):
        write_atomically(folder / f"{number}.js", chunk_script(number, text), is_private=is_private)
    return ChunkData("files", credit_facts(run), f"{folder.parent.name}/{stamp}", reader.chunks)


def chunk_script(number: int, text: bytes) -> bytes:
    """Return a script that passes the text of a chunk to the page.

    The text is a raw template literal, which keeps backslashes. Characters that would end it are escaped within the
    JSON.
    """
    quoted = text.replace(b"`", b"\\u0060")
    if b"$" in quoted:  # searching for one byte is much faster than searching for two
        quoted = quoted.replace(b"${", b"$\\u007b")
    return b"RK.take(%d,String.raw`%s`)\n" % (number, quoted)


def forget_others(page: Path, data: ChunkData) -> None:
    """Remove the chunks of earlier versions of a page. Other files are kept."""
    folder = page.with_name(f"{page.stem}_data")
    if not folder.is_dir():
        return
    with wrap_os_errors("remove", folder):
        for old in folder.iterdir():
            is_stamp = len(old.name) == 2 * _STAMP_BYTES and not set(old.name) - set("0123456789abcdef")
            if is_stamp and f"{folder.name}/{old.name}" != data.folder:
                shutil.rmtree(old)
        if not any(folder.iterdir()):
            folder.rmdir()


def credit_facts(run: Path) -> dict[str, Any] | None:
    """Return the credit settings of a run, or None if it has no credit or `summary.json` is damaged."""
    try:
        section = read_json(run / SUMMARY_FILE)["credit"]
        options: Mapping[str, Any] = section["options"]
        facts = {key: section[key] for key in _CREDIT_FACTS}
    except (StoreError, KeyError, TypeError):
        return None
    # A run of an earlier release does not record the name of its state hash.
    return facts | {"state_hash": section.get("state_hash")} | {key: options.get(key) for key in _CREDIT_OPTIONS}
