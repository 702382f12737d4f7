"""Where the page finds its episodes: within itself, in files beside it, or on the server that it came from."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reward_kit.errors import StoreError
from reward_kit.private_files import make_private_folder
from reward_kit.runs.files import read_json, told_of, write_atomically
from reward_kit.runs.report.chunks import ChunkReader, Part

Mode = Literal["inline", "files", "server"]
MOST_INLINE = 3_000_000
"""Bytes of stored lines that are put into the page itself. With more of them it would be slow to open."""
_STAMP_BYTES = 4
_CREDIT_FACTS = ("estimator", "step_rewards")
_CREDIT_OPTIONS = ("gamma", "omega", "combination", "step_weight", "default_step_reward")


@dataclass(frozen=True, slots=True)
class EpisodeData:
    """What a page has of the episodes.

    Attributes:
        mode: where they are.
        credit: by what their steps were credited; None where they were not.
        folder: of the files, seen from the page.
        chunks: which groups and episodes are in which chunk.
        texts: of the chunks, where they are in the page.
    """

    mode: Mode
    credit: Mapping[str, Any] | None
    folder: str = ""
    chunks: Sequence[Sequence[Part]] = ()
    texts: Sequence[str] = ()

    @property
    def index(self) -> str:
        """JSON that no HTML parser takes for markup."""
        chunks = [
            [
                [part.group_id, part.size, part.first, [facts.row.rollout_id for facts in part.episodes]]
                for part in parts
            ]
            for parts in self.chunks
        ]
        told = {"mode": self.mode, "credit": self.credit, "folder": self.folder, "chunks": chunks}
        return json.dumps(told, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def served(run: Path) -> EpisodeData:
    """For a page whose server answers `group/ID` and `episode/ID` with the text of a group."""
    return EpisodeData("server", credit_facts(run))


def within(run: Path, reader: ChunkReader) -> EpisodeData:
    """All chunks in the page itself.

    Raises:
        StoreError: a file of the run cannot be read.
    """
    texts = [text.decode("ascii") for text in reader.texts()]
    return EpisodeData("inline", credit_facts(run), chunks=reader.chunks, texts=texts)


def beside(run: Path, reader: ChunkReader, page: Path, *, is_private: bool) -> EpisodeData:
    """All chunks as files in a new folder next to those of earlier writings, which `forget_others` removes.

    Args:
        run: the folder of the run.
        reader: its chunks.
        page: the file of the page, such as `report.html`; the folder is then `report_data/` and its stamp.
        is_private: the files are their owner's alone, like the page.

    Raises:
        StoreError: a file of the run cannot be read, or one of the page cannot be written.
    """
    stamp = secrets.token_hex(_STAMP_BYTES)
    folder = folder_of(page) / stamp
    with told_of("write", folder):
        for new in (folder.parent, folder):
            (make_private_folder if is_private else Path.mkdir)(new, exist_ok=new != folder)
    for number, text in enumerate(reader.texts()):
        write_atomically(folder / f"{number}.js", chunk_script(number, text), is_private=is_private)
    return EpisodeData("files", credit_facts(run), f"{folder.parent.name}/{stamp}", reader.chunks)


def chunk_script(number: int, text: bytes) -> bytes:
    """A script that hands the text of a chunk to the page.

    The text is a raw template: its backslashes stay. What would end one stands in JSON, where it can be escaped.
    """
    quoted = text.replace(b"`", b"\\u0060")
    if b"$" in quoted:  # one byte is found at once; two take as long as all the rest
        quoted = quoted.replace(b"${", b"$\\u007b")
    return b"RK.take(%d,String.raw`%s`)\n" % (number, quoted)


def folder_of(page: Path) -> Path:
    """Where the chunks of a page are: `report_data` beside `report.html`."""
    return page.with_name(f"{page.stem}_data")


def forget_others(page: Path, data: EpisodeData) -> None:
    """Remove the chunks of earlier writings of a page, once it is there. What is not ours stays.

    Raises:
        StoreError: they cannot be removed.
    """
    folder = folder_of(page)
    if not folder.is_dir():
        return
    with told_of("remove", folder):
        for old in folder.iterdir():
            if _is_stamp(old.name) and f"{folder.name}/{old.name}" != data.folder:
                shutil.rmtree(old)
        if not any(folder.iterdir()):
            folder.rmdir()


def _is_stamp(name: str) -> bool:
    return len(name) == 2 * _STAMP_BYTES and not set(name) - set("0123456789abcdef")


def credit_facts(run: Path) -> dict[str, Any] | None:
    """By what the steps of a run were credited, as `summary.json` says; None where they were not, or it is damaged."""
    try:
        section = read_json(run / "summary.json")["credit"]
        options: Mapping[str, Any] = section["options"]
        facts = {key: section[key] for key in _CREDIT_FACTS}
    except (StoreError, KeyError, TypeError):
        return None
    return facts | {key: options.get(key) for key in _CREDIT_OPTIONS}
