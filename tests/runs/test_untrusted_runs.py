"""Test untrusted run folders: neither links nor names in their lines lead out of the folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from reward_kit.cli.runs import remove, stored_runs
from reward_kit.errors import StoreError
from reward_kit.runs.events import log_to_file
from reward_kit.runs.files import state_name
from reward_kit.runs.redaction import Redaction
from reward_kit.runs.run_folder import RunFolder, RunHeader, load_episode, read_episodes
from tests.cli.project import Project
from tests.runs.stored_run import episode, make_run, score

PAYLOAD = b'{"kept": 1}'
REWARD = "from reward_kit import reward_function\n\n@reward_function\ndef one(messages, state):\n    return 1.0\n"


@pytest.fixture
def received(tmp_path: Path) -> Path:
    """A project's `runs` with one run of one episode with a final state."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "reward.py").write_text(REWARD)
    made = episode("a", ["s0"])
    made.custom_data["final_state"] = {"kind": "json", "payload": PAYLOAD}
    return make_run(tmp_path / "runs", [made], [score("a", 1.0)])


def with_state(run: Path, **stored: str) -> None:
    """Make the episode's line name another final state."""
    (line,) = read_episodes(run)
    (run / "episodes.jsonl").write_text(json.dumps({**line, "final_state": {**line["final_state"], **stored}}) + "\n")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "stored",
    [
        {"sha256": "../../../outside/secret"},
        {"sha256": "{outside}/secret"},
        {"kind": "/../../../../outside/secret.json"},
        {"kind": "json/../../../../outside/secret.json"},
        {"sha256": "..", "kind": "/run.json"},
        {"sha256": "A" * 64},
        {"sha256": "a\x1b[2J"},
    ],
)
def test_final_state_name_cannot_leave_the_folder(received: Path, tmp_path: Path, stored: dict[str, str]) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.json").write_text("private")
    stored = {key: value.replace("{outside}", str(outside)) for key, value in stored.items()}
    with_state(received, **stored)
    (line,) = read_episodes(received)
    with pytest.raises(StoreError, match=r"episode a: a final state must be named by its SHA-256"):
        load_episode(received, line)


def test_scoring_a_run_again_copies_no_state_to_or_from_elsewhere(received: Path, tmp_path: Path) -> None:
    (tmp_path / "private.json").write_text("private")
    (first,) = read_episodes(received)
    elsewhere = {**first, "rollout_id": "b", "final_state": {"kind": "json", "sha256": "../../../private"}}
    (received / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (first, elsewhere)))
    (tmp_path / "other" / "deep").mkdir(parents=True)
    project = Project(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    done = project.call("score", "runs/run", "--reward", "reward.py:one", "--log-dir", "other/deep/runs")
    assert not (tmp_path / "other" / "deep" / "private.json").exists()
    assert done.returncode == 3 and "a final state must be named by its SHA-256" in done.stderr


def test_link_instead_of_a_state_is_not_followed(received: Path, tmp_path: Path) -> None:
    (tmp_path / "private.json").write_bytes(PAYLOAD)
    (state,) = (received / "states").iterdir()
    state.unlink()
    state.symlink_to(tmp_path / "private.json")
    (line,) = read_episodes(received)
    with pytest.raises(StoreError, match=r"its final state .* is missing"):
        load_episode(received, line)


def test_path_like_state_kind_is_rejected() -> None:
    digest = hashlib.sha256(PAYLOAD).hexdigest()
    assert state_name({"kind": "json", "sha256": digest}) == f"{digest}.json"
    for kind in ("", "../x", "a/b", "a\0", "x" * 65, "."):
        with pytest.raises(StoreError, match="named by its SHA-256"):
            state_name({"kind": kind, "sha256": digest})


ENTRIES = ["episodes.jsonl", "scores.jsonl", "run.log", ".lock", "credit.jsonl", "summary.json", "report.html"]
FOLDERS = ["states", "inputs", "logs", "report_data", "export", "episodes", "checkpoints"]


def replaced_by_link(run: Path, name: str, target: Path) -> None:
    if (run / name).is_dir():
        (run / name).rename(run.parent.parent / "aside")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target)


@pytest.mark.parametrize("name", [*ENTRIES, *FOLDERS])
@pytest.mark.parametrize("is_relative", [False, True])
def test_links_out_of_the_folder_are_neither_read_nor_written(
    received: Path, tmp_path: Path, name: str, is_relative: bool
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"a line\nand what follows the last line break")
    (outside / "deadbeef").mkdir()  # looks like a folder of a page's chunks
    target = outside / "file" if name in ENTRIES else outside
    replaced_by_link(received, name, Path(os.path.relpath(target, received)) if is_relative else target)
    before = contents(outside)
    for use in (RunHeader.read, lambda run: RunFolder(run).__enter__(), lambda run: _trained(run).__enter__()):
        with pytest.raises(StoreError, match=f"{name} is a symbolic link to a target outside the run's directory"):
            use(received)
    assert contents(outside) == before and (outside / "deadbeef").is_dir()


def _trained(run: Path) -> RunFolder:
    return RunFolder(run, Redaction())


@pytest.mark.parametrize(
    "arguments",
    [
        ("view", "RUN", "-o", "page.html"),
        ("credit", "RUN"),
        ("export", "RUN", "--format", "csv"),
        ("score", "RUN", "--reward", "reward.py:one"),
        ("compare", "RUN", "RUN/../other"),
        ("run", "--resume", "RUN"),
        ("check", "RUN"),
    ],
)
def test_commands_reject_a_run_whose_episodes_are_a_link(
    received: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    other = make_run(tmp_path, [episode("b", ["s0"])], [])
    lines = (received / "episodes.jsonl").rename(tmp_path / "private.jsonl")
    lines.write_bytes(lines.read_bytes() + b"no line break")
    (received / "episodes.jsonl").symlink_to(lines)
    other.rename(tmp_path / "runs" / "other")
    before = lines.read_bytes()
    project = Project(tmp_path)
    done = project.call(*(part.replace("RUN", "runs/run") for part in arguments))
    assert done.returncode in (1, 2, 3) and "link to a target outside the run's directory" in done.stderr + done.stdout
    assert lines.read_bytes() == before
    assert {path.name for path in received.iterdir()} <= {"run.json", "episodes.jsonl", *ENTRIES, "states"}


@pytest.mark.parametrize("make", [lambda path: os.mkfifo(path), lambda path: path.symlink_to("nowhere/at/all")])
def test_a_pipe_and_a_dangling_link_do_not_hang_a_reader(received: Path, make: Callable[[Path], None]) -> None:
    (received / "credit.jsonl").unlink(missing_ok=True)
    make(received / "credit.jsonl")
    if (received / "credit.jsonl").is_symlink():
        RunHeader.read(received)  # it stays in the folder, and there is nothing
    else:
        with pytest.raises(StoreError, match="neither a file nor a directory"):
            RunHeader.read(received)


def test_links_within_the_folder_and_to_the_folder_are_fine(received: Path, tmp_path: Path) -> None:
    (received / "latest.jsonl").symlink_to("episodes.jsonl")
    (tmp_path / "runs" / "latest").symlink_to(received)
    with RunFolder(tmp_path / "runs" / "latest") as store:
        assert store.header.task_name == "t"


class TestRemoving:
    """`runs prune` deletes the folder of a run, and never the target of a link in it."""

    def test_link_targets_are_not_removed(self, received: Path, tmp_path: Path) -> None:
        kept = tmp_path / "kept"
        kept.mkdir()
        (kept / "file").write_text("mine")
        for name in ("folder", "states/folder"):
            (received / name).symlink_to(kept)
        (received / "file").symlink_to(kept / "file")
        done = Project(tmp_path).call("runs", "prune", "--keep", "0", "--yes")
        assert done.returncode == 0, done.stderr
        assert not received.exists() and (kept / "file").read_text() == "mine"

    def test_symlinked_run_is_not_deleted(self, received: Path, tmp_path: Path) -> None:
        moved = received.rename(tmp_path / "moved")
        received.symlink_to(moved)
        (run,) = stored_runs(tmp_path / "runs")
        with pytest.raises(StoreError, match="is a symbolic link; remove the link itself"):
            remove(run)
        assert (moved / "run.json").is_file() and received.is_symlink()


def test_rejected_run_has_no_log(received: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine\n")
    (received / "run.log").symlink_to(tmp_path / "elsewhere")
    store = RunFolder(received)
    with pytest.raises(StoreError), store, log_to_file(received / "run.log", Redaction()):
        pytest.fail("the run is open")
    assert (tmp_path / "elsewhere").read_text() == "mine\n"


@pytest.mark.parametrize("rollout_id", ["../../etc/passwd", "/etc/passwd", "a/b\\c", "..", "%2e%2e%2f", "x\x1b[2J", ""])
def test_path_like_id_is_treated_as_a_name(tmp_path: Path, rollout_id: str) -> None:
    project = Project(tmp_path)
    (tmp_path / "runs").mkdir()
    made = episode(rollout_id, ["s0", "s1"], group=rollout_id)
    run = make_run(tmp_path / "runs", [made], [score(rollout_id, 1.0)])
    before = contents(tmp_path)
    for arguments in (
        ("view", "-o", "page.html"),
        ("credit", "--estimator", "grpo"),
        ("export", "--format", "csv"),
        ("score", "--reward", "reward.py:broken"),
        ("check",),
    ):
        verb, *rest = arguments
        done = project.call(verb, "runs/run", *rest)
        assert "Traceback" not in done.stderr
    new = contents(tmp_path).keys() - before.keys()
    assert run.is_dir() and all(name.startswith(("runs/", "__pycache__/", "page")) for name in new)
