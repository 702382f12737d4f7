"""Test the file resource: seven tools that cannot leave their directory."""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path

import anyio.to_thread
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reward_kit.environments import FilesystemResource, open_snapshot
from reward_kit.environments.filesystem import split_path
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError
from reward_kit.processes import temporary_root
from tests.profiles import examples

FILES = {"notes/today.txt": "milk", "readme": "hello"}


@pytest.fixture
async def resource():
    made = FilesystemResource()
    await made.setup({"files": FILES})
    await made.reset(0)
    yield made
    await made.close()


def content_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*")}


async def call(resource, name, **arguments):
    return (await resource.step(name, arguments)).observation


async def read_files(resource):
    return dict(open_snapshot(await resource.final_state()))


def own_folders() -> set[Path]:
    return set(temporary_root().glob("files-*"))


async def test_every_tool_works(resource) -> None:
    assert await call(resource, "list_directory") == [
        {"name": "notes", "type": "directory"},
        {"name": "readme", "type": "file"},
    ]
    assert await call(resource, "read_file", path="notes/today.txt") == "milk"
    await call(resource, "append_file", path="notes/today.txt", content=" and tea")
    await call(resource, "make_directory", path="deep/er")
    await call(resource, "write_file", path="deep/er/new.txt", content="é")
    await call(resource, "move_path", source="readme", target="deep/readme")
    assert await read_files(resource) == {
        "deep/er/new.txt": "é",
        "deep/readme": "hello",
        "notes/today.txt": "milk and tea",
    }
    await call(resource, "delete_path", path="deep")
    assert await read_files(resource) == {"notes/today.txt": "milk and tea"}


ESCAPES = ["/etc/passwd", "../outside", "notes/../../outside", "..", "a\0b", "x" * 300, "a/" * 3_000, "\ud800"]


@pytest.mark.parametrize("path", ESCAPES)
@pytest.mark.parametrize("tool", ["read_file", "write_file", "delete_path", "make_directory", "list_directory", "move"])
async def test_paths_outside_the_directory_are_rejected(resource, path, tool) -> None:
    before = await resource.state_key()
    with pytest.raises(ToolError, match=r"path .* (contains|is|has)"):
        if tool == "write_file":
            await call(resource, tool, path=path, content="x")
        elif tool == "move":
            await call(resource, "move_path", source="readme", target=path)
        else:
            await call(resource, tool, path=path)
    assert await resource.state_key() == before


@given(st.text(alphabet="./a\\\0~ ", max_size=12) | st.text(max_size=12))
def test_split_path_returns_safe_names_or_raises(path: str) -> None:
    try:
        parts = split_path(path)
    except ToolError:
        return
    assert not path.startswith("/")
    assert all(part not in ("", ".", "..") and "/" not in part and "\0" not in part for part in parts)


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.lists(st.sampled_from(["..", ".", "", "notes", "link", "readme", "x"]), max_size=5).map("/".join))
async def test_writes_never_change_files_outside(path: str) -> None:
    outside = Path(tempfile.mkdtemp())
    (outside / "x").write_text("safe")
    resource = FilesystemResource()
    await resource.setup({"files": FILES})
    try:
        (resource.root / "link").symlink_to(outside)
        for tool, rest in (("write_file", {"content": "!"}), ("append_file", {"content": "!"}), ("delete_path", {})):
            try:
                await call(resource, tool, path=path, **rest)
            except ToolError:
                continue
        assert content_of(outside) == {"x": "safe"}
    finally:
        await resource.close()
        shutil.rmtree(outside)


@pytest.mark.parametrize("path", ["file_link", "folder_link/secret", "folder_link", "notes/up/secret", "dangling"])
async def test_symbolic_links_are_rejected_everywhere(resource, path, tmp_path) -> None:
    (tmp_path / "secret").write_text("secret")
    (resource.root / "file_link").symlink_to(tmp_path / "secret")
    (resource.root / "folder_link").symlink_to(tmp_path)
    (resource.root / "notes" / "up").symlink_to("../../..")
    (resource.root / "dangling").symlink_to(tmp_path / "not yet")
    calls = [
        ("read_file", {}),
        ("write_file", {"content": "x"}),
        ("append_file", {"content": "x"}),
        ("delete_path", {}),
    ]
    for tool, rest in [*calls, ("list_directory", {}), ("make_directory", {})]:
        with pytest.raises(ToolError, match="is a symbolic link; links are not followed"):
            await call(resource, tool, path=path, **rest)
    with pytest.raises(ToolError, match="is a symbolic link"):
        await call(resource, "move_path", source=path, target="mine")
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]
    assert (tmp_path / "secret").read_text() == "secret"


async def test_directory_swapped_for_a_link_during_use_exposes_nothing(resource, tmp_path) -> None:
    (tmp_path / "secret").write_text("secret")
    (resource.root / "flip").mkdir()
    (resource.root / "flip" / "secret").write_text("inside")
    stop = threading.Event()

    def flip() -> None:
        folder, aside, link = root / "flip", root / "aside", root / "link"
        link.symlink_to(tmp_path)
        while not stop.is_set():
            folder.rename(aside)
            link.rename(folder)
            folder.rename(link)
            aside.rename(folder)

    root = resource.root
    racer = threading.Thread(target=flip)
    racer.start()
    seen = set()
    try:
        for _ in range(300):
            try:
                seen.add(await call(resource, "read_file", path="flip/secret"))
            except ToolError:
                continue
    finally:
        stop.set()
        racer.join()
    assert seen <= {"inside"}


async def test_named_pipe_is_rejected_without_blocking(resource) -> None:
    os.mkfifo(resource.root / "pipe")
    with pytest.raises(ToolError, match="not a regular file"):
        await call(resource, "read_file", path="pipe")


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("raed_file", {}, "did you mean 'read_file'"),
        ("read_file", {}, "path: missing"),
        ("read_file", {"path": 1}, "must be a string"),
        ("read_file", {"path": "readme", "mode": "r"}, "unknown argument 'mode'"),
        ("read_file", {"path": "nothing"}, "does not exist"),
        ("read_file", {"path": "notes"}, "is a directory"),
        ("read_file", {"path": "readme/x"}, "is not a directory"),
        ("write_file", {"path": "nowhere/x", "content": ""}, "'nowhere' does not exist"),
        ("write_file", {"path": "notes", "content": ""}, "is a directory"),
        ("write_file", {"path": "x", "content": "\ud800"}, "not valid Unicode"),
        ("delete_path", {"path": "."}, "is the working directory itself"),
        ("delete_path", {"path": "nothing"}, "does not exist"),
        ("move_path", {"source": "readme", "target": "notes"}, "already exists"),
        ("move_path", {"source": "notes", "target": "notes/inner"}, "into itself"),
        ("make_directory", {"path": "readme/x"}, "not a directory"),
        ("make_directory", {"path": "readme"}, "not a directory"),
    ],
)
async def test_rejected_call_gives_the_reason_and_changes_nothing(resource, tool, arguments, message) -> None:
    before = await resource.state_key()
    with pytest.raises(ToolError, match=message):
        await resource.step(tool, arguments)
    assert await resource.state_key() == before


async def test_limits_are_enforced_and_named() -> None:
    resource = FilesystemResource()
    await resource.setup({"files": {"a": "1234"}, "max_file_bytes": 8, "max_files": 2, "max_total_bytes": 10})
    for tool, arguments, message in [
        ("write_file", {"path": "a", "content": "123456789"}, "larger than 8 bytes"),
        ("append_file", {"path": "a", "content": "56789"}, "larger than 8 bytes"),
        ("write_file", {"path": "b", "content": "1234567"}, "the limit of 10 bytes"),
        ("make_directory", {"path": "b/c"}, "the limit of 2 files"),
    ]:
        with pytest.raises(ToolError, match=message):
            await resource.step(tool, arguments)
    await call(resource, "write_file", path="b", content="123456")
    with pytest.raises(ToolError, match="the limit of 2 files"):
        await call(resource, "write_file", path="c", content="")
    await resource.close()


async def test_state_key_covers_names_content_kind_and_executable_bit(resource) -> None:
    keys = [await resource.state_key()]
    await call(resource, "write_file", path="readme", content="hellO")
    keys.append(await resource.state_key())
    await call(resource, "make_directory", path="empty")
    keys.append(await resource.state_key())
    (resource.root / "readme").chmod(0o700)
    keys.append(await resource.state_key())
    assert len(set(keys)) == 4
    (resource.root / "readme").chmod(0o600)
    await call(resource, "delete_path", path="empty")
    await call(resource, "write_file", path="readme", content="hello")
    assert await resource.state_key() == keys[0]


async def test_replacing_a_file_keeps_its_executable_bit(resource) -> None:
    (resource.root / "readme").chmod(0o700)
    await call(resource, "write_file", path="readme", content="#!/bin/sh")
    assert os.access(resource.root / "readme", os.X_OK)


async def test_fork_checkpoint_and_restore_keep_the_state(resource) -> None:
    saved, key = await resource.checkpoint(), await resource.state_key()
    fork = await resource.fork()
    await call(fork, "delete_path", path="notes")
    assert await resource.state_key() == key
    await call(resource, "write_file", path="new", content="x")
    assert "new" not in await read_files(fork)
    await resource.restore(saved)
    assert await resource.state_key() == key
    await fork.close()
    assert await call(resource, "read_file", path="readme") == "hello"


async def test_final_state_is_deterministic_and_holds_bytes(resource) -> None:
    (resource.root / "raw").write_bytes(b"\xff\x00")
    (resource.root / "link").symlink_to("/etc")
    snapshot = await resource.final_state()
    assert snapshot.kind == "files"
    assert json.loads(snapshot.payload)["files"]["raw"] == {"base64": "/wA="}
    state = open_snapshot(snapshot)
    assert state["raw"] == b"\xff\x00"
    assert state["readme"] == "hello"
    assert "link" not in state
    assert state.directories == ("notes",)
    assert (await resource.final_state()).digest == snapshot.digest


async def test_source_dir_is_copied_without_its_links(tmp_path, caplog) -> None:
    task = tmp_path / "task"
    (task / "data" / "sub").mkdir(parents=True)
    (task / "data" / "sub" / "a.txt").write_text("a")
    (task / "data" / "leak").symlink_to("/etc/passwd")
    (task / "data" / "sub" / "leak").symlink_to("/etc")
    resource = FilesystemResource()
    await resource.setup({"source_dir": "data", "task_folder": str(task), "files": {"sub/b.txt": "b"}})
    assert await read_files(resource) == {"sub/a.txt": "a", "sub/b.txt": "b"}
    assert "symbolic links are not copied" in caplog.text
    await resource.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fils": {}}, "fils: unknown key; did you mean 'files'"),
        ({"files": {"../out": "x"}}, r"contains '\.\.'"),
        ({"files": {"/abs": "x"}}, "is absolute"),
        ({"files": {"a": "x", "a/b": "y"}}, "'a', which is a file"),
        ({"files": {".": "x"}}, "is not a file path"),
        ({"files": {"a": "xxxx"}, "max_file_bytes": 3}, "max_file_bytes"),
        ({"source_dir": "..", "task_folder": "."}, "outside the task's directory"),
        ({"source_dir": "/etc", "task_folder": "."}, "outside the task's directory"),
        ({"source_dir": "no such place"}, "no such directory"),
    ],
)
async def test_invalid_configuration_leaves_nothing_behind(config, message) -> None:
    before = own_folders()
    with pytest.raises(ConfigError, match=message):
        await FilesystemResource().setup(config)
    assert own_folders() == before


async def test_directory_cannot_be_configured(tmp_path) -> None:
    # The predecessor took base_dir_name, and removed that directory when it was absolute.
    with pytest.raises(ConfigError, match="base_dir_name: unknown key"):
        await FilesystemResource().setup({"base_dir_name": str(tmp_path)})
    assert tmp_path.exists()


async def test_directories_are_temporary_and_removed_on_close(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    resource = FilesystemResource()
    await resource.setup({"files": FILES})
    fork = await resource.fork()
    places = [resource.root, fork.root]
    assert places[0] != places[1]
    assert not list(tmp_path.iterdir())
    (places[0] / "notes").chmod(0)
    for made in (resource, fork):
        await made.close()
        await made.close()
    assert not any(place.parent.exists() for place in places)
    with pytest.raises(EnvironmentFailure, match="closed"):
        await resource.state_key()


async def test_unclosed_directory_is_removed_by_garbage_collection() -> None:
    resource = FilesystemResource()
    await resource.setup({})
    place = resource.root
    del resource
    # A worker thread remembers its last call until its next one.
    await anyio.to_thread.run_sync(int)
    gc.collect()
    assert not place.exists()
