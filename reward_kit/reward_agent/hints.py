"""What a message from behind the walls does not say itself: which wall was met, and which key moves it."""

from __future__ import annotations

import os
import re
from pathlib import Path

_LIMIT = re.compile(r"raise limits\.(\w+)")
_UNSEEN = re.compile(r"No such file or directory: '([^'\n]+)'")
_REFUSED = re.compile(r"\[Errno 1\] Operation not permitted|Temporary failure in name resolution")
_VARIABLE = re.compile(r"KeyError: '([A-Za-z_]\w*)'")
_WAY_OUT = "what needs them runs with --sandbox in_process"
_NO_NETWORK = f"the sandbox has no network and starts no processes: {_WAY_OUT}"
_NO_VARIABLES = f"the sandbox has none of your environment variables: {_WAY_OUT}"
_NOT_SHOWN = "it is there and not shown in the sandbox: name it in sandbox.read_paths"
_RELATIVE = (
    "the sandbox works in an empty folder: open it by its whole path, such as Path(__file__).parent / {0!r}, and name "
    "it in sandbox.read_paths"
)


def with_keys(message: str) -> str:
    """A limit's message with the keys of a task file, and a hint where there is one."""
    return with_hint(_LIMIT.sub(_key_of_task, message))


def with_hint(message: str) -> str:
    """Say which wall it was where a file is only not shown, or a network, a process or a variable is asked for."""
    hint = _hint(message)
    return f"{message}; {hint}" if hint else message


def _hint(message: str) -> str:
    if found := _UNSEEN.search(message):
        path = Path(found.group(1))
        if not path.is_absolute():
            return _RELATIVE.format(found.group(1))
        return _NOT_SHOWN if path.exists() else ""
    if _REFUSED.search(message):
        return _NO_NETWORK
    found = _VARIABLE.search(message)
    return _NO_VARIABLES if found and found.group(1) in os.environ else ""


def _key_of_task(found: re.Match[str]) -> str:
    name = found.group(1)
    return "raise limits.reward_time_s" if name == "wall_s" else f"raise sandbox.limits.{name}"
