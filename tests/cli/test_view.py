"""Test how `reward-kit view` starts, prints its address, and ends."""

from __future__ import annotations

import signal
import socket
import time
import urllib.error
from pathlib import Path

import pytest

from tests.cli.project import Project
from tests.cli.view_process import fetched, viewer
from tests.report.run_factory import Parsed, episode, make_run, random_run, score


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_view_prints_an_address_serves_and_ends_quietly(project: Project, sign: signal.Signals) -> None:
    (project.folder / "runs").mkdir()
    make_run(project.folder / "runs", [episode("a")], [score("a", 1.0)])
    with viewer(project) as (process, address):
        assert address.startswith("http://127.0.0.1:") and "/?token=" in address
        index, page = fetched(address, "/run/")
        assert Parsed(index).tables["runs"]["rows"][0][0] == ["run", "./run/"]
        assert Parsed(page).column("episodes", "rollout") == ["a"]
        process.send_signal(sign)
        rest, errors = process.communicate(timeout=120)
    assert (process.returncode, rest) == (0, "")
    assert errors.splitlines() == [
        "Ctrl-C stops the server. Anyone on this machine who has this address can read these runs."
    ]


def test_single_run_is_served_and_a_port_in_use_is_rejected(project: Project) -> None:
    for name in ("one", "two"):
        make_run(project.folder, [episode("a")], []).rename(project.folder / name)
    with viewer(project, "one") as (_, address):
        port = address.split(":")[2].split("/")[0]
        assert [row[0][0] for row in Parsed(fetched(address)[0]).tables["runs"]["rows"]] == ["one"]
        with viewer(project, "one", "--port", port) as (taken, _):
            errors = taken.communicate(timeout=120)[1]
        assert taken.returncode == 2
        assert f"error: --port {port}:" in errors and "choose another" in errors


def test_requested_port_is_used(project: Project) -> None:
    make_run(project.folder, [episode("a")], [])
    for _ in range(5):  # another process may take the free port first
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with viewer(project, ".", "--port", str(port)) as (_, address):
            if address:
                assert f":{port}/" in address
                return
    pytest.fail("five ports in turn were taken by other processes")


def test_missing_folder_is_named(project: Project) -> None:
    with viewer(project, "nosuch") as (process, _):
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert errors == "error: directory nosuch does not exist; pass the directory of the runs or of one run\n"


def test_browser_is_opened_only_with_the_open_option(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (project.folder / "runs").mkdir()
    make_run(project.folder / "runs", [episode("a")], [])
    told = project.folder / "opened"
    browser = project.folder / "browser"
    browser.write_text(f'#!/bin/sh\necho "$0 $@" > {told}.new && mv {told}.new {told}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    with viewer(project, "--open") as (process, address):
        token = address.partition("token=")[2]
        while not told.exists():
            assert process.poll() is None
            time.sleep(0.02)
        arguments = told.read_text().split()
        assert arguments[0] == str(browser) and token not in told.read_text() and "token" not in told.read_text()
        (opened,) = arguments[1:]
        assert "./run/" in fetched(opened)[0]
        with pytest.raises(urllib.error.HTTPError, match="403"):  # a process that read the browser's arguments
            fetched(opened)
        assert "./run/" in fetched(address)[0]
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
    told.unlink()
    with viewer(project) as (process, _):
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
    assert not told.exists()


def test_viewing_changes_no_files(project: Project) -> None:
    run = random_run(project.folder, 20)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    with viewer(project, ".") as (_, address):
        fetched(address, "/run/", "/run/figures", "/run/episode/r00000", "/run/group/s0-a")
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
