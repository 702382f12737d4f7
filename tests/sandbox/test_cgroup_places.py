"""Where control groups may be made: read from texts of real systems, and from folders as version 2 shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reward_kit.sandbox.kernel import cgroup_places
from reward_kit.sandbox.kernel.cgroup_places import Mount, Place, find_in, folder_of, parse_groups, parse_mounts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")

# --- Texts of real systems -------------------------------------------------------------------------------------------

SCOPE = "/user.slice/user-1000.slice/user@1000.service/app.slice/run-r1f.scope"
UNIFIED = "35 24 0:30 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = """\
24 31 0:22 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,mode=755
25 24 0:23 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw,nsdelegate
32 24 0:29 / /sys/fs/cgroup/memory rw,nosuid shared:16 - cgroup cgroup rw,memory
34 24 0:31 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:18 - cgroup cgroup rw,cpu,cpuacct
35 24 0:32 / /sys/fs/cgroup/pids rw,nosuid shared:19 - cgroup cgroup rw,pids
"""
DOCKER_1 = """\
694 689 0:29 /docker/4f2a /sys/fs/cgroup/memory ro,nosuid master:16 - cgroup cgroup rw,memory
695 689 0:32 /docker/4f2a /sys/fs/cgroup/pids ro,nosuid master:19 - cgroup cgroup rw,pids
"""


def test_a_group_of_a_systemd_scope_is_found():
    (mount,) = parse_mounts(UNIFIED)
    assert mount == Mount(2, frozenset(), "/", Path("/sys/fs/cgroup"))
    assert folder_of(mount, parse_groups(f"0::{SCOPE}\n")[""]) == Path(f"/sys/fs/cgroup{SCOPE}")


def test_version_1_has_a_group_for_each_counter():
    groups = parse_groups(
        "5:cpu,cpuacct:/user.slice\n4:memory:/user.slice/s\n3:pids:/user.slice/s\n1:name=systemd:/x\n0::/x\n"
    )
    assert (groups["memory"], groups["cpu"], groups["cpuacct"], groups[""]) == (
        "/user.slice/s",
        "/user.slice",
        "/user.slice",
        "/x",
    )
    mounts = {name: mount for mount in parse_mounts(HYBRID) for name in mount.controllers or {""}}
    assert mounts["cpuacct"].point == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert folder_of(mounts["memory"], groups["memory"]) == Path("/sys/fs/cgroup/memory/user.slice/s")
    assert (mounts[""].version, mounts["pids"].version) == (2, 1)


def test_a_container_sees_its_own_group_at_the_top():
    memory, pids = parse_mounts(DOCKER_1)
    assert folder_of(memory, "/docker/4f2a") == Path("/sys/fs/cgroup/memory")
    assert folder_of(pids, "/docker/4f2a/below") == Path("/sys/fs/cgroup/pids/below")
    assert folder_of(pids, "/docker/4f2") is None
    assert folder_of(Mount(2, frozenset(), "/", Path("/sys/fs/cgroup")), "/") == Path("/sys/fs/cgroup")


def test_a_group_outside_of_what_is_seen_is_no_group():
    (mount,) = parse_mounts(UNIFIED)
    assert folder_of(mount, "/../other.scope") is None


@pytest.mark.parametrize("text", ["", "\n", "nonsense", "1 2 3 - cgroup2", "a:b", "0::", " - cgroup cgroup rw,memory"])
def test_what_is_no_such_text_holds_nothing(text):
    assert parse_mounts(text) == []
    assert parse_groups(text) == {}


def test_an_escaped_mount_point_is_read():
    (mount,) = parse_mounts(r"1 2 0:3 / /mnt/c\040groups rw - cgroup2 none rw")
    assert mount.point == Path("/mnt/c groups")


# --- Which groups are ours -------------------------------------------------------------------------------------------


class Hierarchy:
    """Folders with the files that the kernel shows in version 2."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.mounts = f"35 24 0:30 / {top} rw - cgroup2 cgroup2 rw\n"

    def group(self, path, *, controllers="cpu memory pids", enabled="", processes=(), delegated=False):
        folder = self.top / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"controllers": controllers, "subtree_control": enabled, "procs": "\n".join(map(str, processes))}
        for name, text in texts.items():
            (folder / f"cgroup.{name}").write_text(text)
        if folder != self.top:
            (folder / "cgroup.type").write_text("domain")
        if delegated:
            os.setxattr(folder, "user.delegate", b"1")
        return folder


@pytest.fixture
def tree(tmp_path):
    try:
        os.setxattr(tmp_path, "user.try", b"1")
    except OSError:
        pytest.skip("temporary files take no extended attributes here")
    return Hierarchy(tmp_path)


def test_a_delegated_scope_that_holds_only_us_is_divided(tree):
    scope = tree.group("a.scope", processes=[os.getpid()], delegated=True)
    assert find_in("0::/a.scope\n", tree.mounts).place == Place(2, scope, scope, is_to_be_divided=True)


def test_nobody_else_is_moved(tree):
    tree.group("a.scope", processes=[os.getpid(), 1], delegated=True)
    assert "other processes are in" in find_in("0::/a.scope\n", tree.mounts).reason


def test_from_a_leaf_the_delegated_group_above_is_used(tree):
    scope = tree.group("a.scope", enabled="memory pids", delegated=True)
    tree.group("a.scope/leaf", processes=[os.getpid()])
    assert find_in("0::/a.scope/leaf\n", tree.mounts).place == Place(2, scope, scope)


def test_being_able_to_write_is_not_enough(tree):
    tree.group("app.slice", enabled="memory pids")
    tree.group("app.slice/terminal.scope", processes=[os.getpid()])
    assert "nobody delegated" in find_in("0::/app.slice/terminal.scope\n", tree.mounts).reason


def test_the_first_group_of_the_machine_is_not_ours_and_that_of_a_container_is(tree):
    top = tree.group("/", enabled="memory pids")
    assert "nobody delegated" in find_in("0::/\n", tree.mounts).reason
    (top / "cgroup.type").write_text("domain")  # which all have but the first
    assert find_in("0::/\n", tree.mounts).place == Place(2, top, top)


def test_a_group_that_is_named_needs_no_mark_but_its_controllers(tree):
    folder = tree.group("given", enabled="memory pids")
    assert find_in("0::/\n", tree.mounts, "/given").place == Place(2, folder, folder)
    tree.group("given", enabled="cpu")
    assert "subtree_control" in find_in("0::/\n", tree.mounts, "/given").reason
    absent = find_in("0::/\n", tree.mounts, "/absent")
    assert absent.reason == f"REWARD_KIT_CGROUP=/absent: there is no group {tree.top}/absent"


def test_what_is_not_counted_is_said(tree):
    tree.group("a.scope", controllers="hugetlb pids", delegated=True)
    assert find_in("0::/a.scope\n", tree.mounts).reason == "version 2 does not count memory here"
    assert find_in("", "").reason == "no control groups are mounted"


def test_the_machine_under_the_tests_is_answered_without_a_change():
    before = Path("/proc/self/cgroup").read_text()
    found = cgroup_places.find()
    assert (found.place is None) == bool(found.reason)
    assert Path("/proc/self/cgroup").read_text() == before


def test_an_ordinary_user_is_answered_too():
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    script = "import os; os.setgroups([]); os.setgid(1000); os.setuid(1000)\n"
    script += "from reward_kit.sandbox.kernel import cgroups; print(cgroups.told())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), cgroup_places.VARIABLE: ""}
    # The interpreter may lie where others cannot enter, so all that is imported is imported before.
    script = "import reward_kit.sandbox.kernel.cgroups, subprocess, contextlib\n" + script
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("none: ")
    assert cgroup_places.HOW_TO in done.stdout
