"""Where this process may make control groups: read from the kernel and from marks of systemd; looking changes nothing.

Being able to write to a group does not make it ours: root can write to all of them, and a session's user to those
that its systemd manages. Only these are used, since whoever manages a group may take it for empty, or clear it away:

- one that systemd delegated (`Delegate=yes`), which it marks with an extended attribute;
- in a container, the outermost group it sees;
- one that the user names in `REWARD_KIT_CGROUP`, by its path below the place where groups are mounted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VARIABLE = "REWARD_KIT_CGROUP"
HOW_TO = f"start with `systemd-run --user --scope -p Delegate=yes reward-kit ...`, or name a group in {VARIABLE}"
CONTROLLERS = ("memory", "pids")
_MARKS = ("user.delegate", "trusted.delegate")
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One mounted hierarchy.

    Attributes:
        version: 1 or 2.
        controllers: what it counts; of version 2 that stands in its files.
        root: which group of the hierarchy is seen at `point`.
        point: where it is mounted.
    """

    version: int
    controllers: frozenset[str]
    root: str
    point: Path


class Place(NamedTuple):
    """Folders in which groups may be made.

    Attributes:
        version: 1 or 2.
        memory: where memory is counted; None where it is not.
        pids: where processes are; the same folder in version 2.
        is_to_be_divided: version 2 makes no groups that count beside processes, so those here, which are this process
            and what it started, have to move down first.
    """

    version: int
    memory: Path | None
    pids: Path | None
    is_to_be_divided: bool = False

    @property
    def folders(self) -> tuple[Path, ...]:
        """Each folder once."""
        return tuple(dict.fromkeys(folder for folder in (self.memory, self.pids) if folder is not None))

    @property
    def text(self) -> str:
        """What is counted here, for people."""
        counted = [name for name, folder in zip(CONTROLLERS, (self.memory, self.pids), strict=True) if folder]
        return f"{' and '.join(counted)} (v{self.version})"


class Found(NamedTuple):
    """A place, or why there is none."""

    place: Place | None
    reason: str


def parse_mounts(mountinfo: str) -> list[Mount]:
    """The hierarchies in a `/proc/PID/mountinfo`, see proc(5)."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, *rest) = before.split(" "), after.split(" ") if after else [""]
        if kind in ("cgroup", "cgroup2") and len(fields) >= 5 and len(rest) >= 2:
            controllers = frozenset(rest[1].split(",")) if kind == "cgroup" else frozenset()
            point = Path(_unescaped(fields[4]))
            found.append(Mount(2 if kind == "cgroup2" else 1, controllers, _unescaped(fields[3]), point))
    return found


def parse_groups(text: str) -> dict[str, str]:
    """The group by controller in a `/proc/PID/cgroup`; that of version 2 under "". See cgroups(7)."""
    groups = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path.startswith("/"):
            groups.update(dict.fromkeys(controllers.split(",") if number != "0" else [""], path))
    return groups


def folder_of(mount: Mount, group: str) -> Path | None:
    """The folder of a group; None where it lies outside of what is mounted."""
    if ".." in Path(group).parts:
        return None
    if group == mount.root or mount.root == "/":
        return mount.point / (group.lstrip("/") if mount.root == "/" else "")
    inside = group.removeprefix(f"{mount.root}/")
    return mount.point / inside if inside != group else None


def find() -> Found:
    """The place for this process's groups, version 2 before version 1."""
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    except OSError as error:
        return Found(None, f"/proc does not say which group this process is in: {error.strerror}")
    return find_in(groups, mounts, os.environ.get(VARIABLE, ""))


def find_in(cgroup: str, mountinfo: str, named: str = "") -> Found:
    """The same from texts.

    Args:
        cgroup: a `/proc/self/cgroup`.
        mountinfo: a `/proc/self/mountinfo`.
        named: the group that the user names; "" for none.
    """
    groups, reasons = parse_groups(cgroup), []
    mounts = [mount for mount in parse_mounts(mountinfo) if mount.point.is_dir()]
    for look in (_version_2, _version_1):
        found = look(mounts, groups, named)
        if found.place is not None:
            return found
        reasons.append(found.reason)
    reason = "; ".join(reason for reason in reasons if reason) or "no control groups are mounted"
    return Found(None, f"{VARIABLE}={named}: {reason}" if named else reason)


def _version_2(mounts: list[Mount], groups: dict[str, str], named: str) -> Found:
    reasons = []
    for mount, folder in _candidates([mount for mount in mounts if mount.version == 2], groups.get(""), named):
        is_to_be_divided = not _words(folder / "cgroup.subtree_control").issuperset(CONTROLLERS)
        reason = _why_not(folder, mount, named)
        if not reason and is_to_be_divided:
            reason = _why_not_divided(folder, bool(named))
        if not reason:
            return Found(Place(2, folder, folder, is_to_be_divided), "")
        reasons.append(reason)
    return Found(None, reasons[0] if reasons else "")


def _candidates(mounts: list[Mount], own: str | None, named: str) -> Iterator[tuple[Mount, Path]]:
    """The group named; or our own, and the one it lies in, which is the delegated one where we were moved to a leaf."""
    for mount in mounts[:1]:
        if named:
            yield mount, mount.point / named.lstrip("/")
            continue
        folder = folder_of(mount, own) if own is not None else None
        if folder is not None:
            yield mount, folder
            if folder != mount.point:
                yield mount, folder.parent


def _version_1(mounts: list[Mount], groups: dict[str, str], named: str) -> Found:
    places: dict[str, Path] = {}
    reasons = []
    for name in CONTROLLERS:
        counting = [mount for mount in mounts if mount.version == 1 and name in mount.controllers]
        for mount, folder in list(_candidates(counting, groups.get(name), named))[:1]:
            reason = _why_not(folder, mount, named)
            if reason:
                reasons.append(f"{name}: {reason}")
            else:
                places[name] = folder
    if places:
        return Found(Place(1, places.get("memory"), places.get("pids")), "")
    return Found(None, "; ".join(reasons))


def _why_not(folder: Path, mount: Mount, named: str) -> str:
    """Why no groups may be made in this one; "" where they may."""
    if not folder.is_dir():
        return f"there is no group {folder}"
    counted = _words(folder / "cgroup.controllers") if mount.version == 2 else set(CONTROLLERS)
    if missing := [name for name in CONTROLLERS if name not in counted]:
        return f"version 2 does not count {' and '.join(missing)} here"
    is_own_of_container = folder == mount.point and not _is_first_of_machine(folder, mount.version)
    if not (named or is_own_of_container or _is_marked(folder)):
        return f"nobody delegated {folder} to this process"
    if not all(os.access(path, os.W_OK) for path in (folder, folder / "cgroup.procs")):
        return f"this user may not write to {folder}"
    return ""


def _is_first_of_machine(folder: Path, version: int) -> bool:
    """It is the group above all others, by a file that only this one lacks, or has."""
    return (folder / "release_agent").exists() if version == 1 else not (folder / "cgroup.type").exists()


def _is_marked(folder: Path) -> bool:
    """Systemd delegated it. Only root can read the second mark, which is all that systemd before 251 sets."""
    for mark in _MARKS:
        try:
            if os.getxattr(folder, mark) == b"1":
                return True
        except OSError:  # it is not there, or not for us to see
            continue
    return False


def _why_not_divided(folder: Path, is_named: bool) -> str:
    missing = " and ".join(CONTROLLERS)
    if is_named:
        return f"{missing} are not in {folder / 'cgroup.subtree_control'}"
    others = members(folder) - family()
    return f"other processes are in {folder} too, so {missing} cannot be counted below it" if others else ""


def members(folder: Path) -> set[int]:
    """The processes in a group."""
    return {int(word) for word in _words(folder / "cgroup.procs") if word.isdigit()}


def family() -> set[int]:
    """This process and all that it started, as far as they run and have their parents."""
    parents = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            parents[int(name)] = parent_and_start(int(name))[0]
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def parent_and_start(pid: int) -> tuple[int, int]:
    """A process's parent, and when it started in ticks since the machine did; (0, 0) where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0, 0
    return int(fields[1]), int(fields[19])


def _words(path: Path) -> set[str]:
    try:
        return set(path.read_text(encoding="utf-8").split())
    except OSError:
        return set()


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
