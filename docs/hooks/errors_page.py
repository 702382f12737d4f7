"""The page of errors, made from the docstrings of the error types and of the enums that say why something ended.

Types and members are read from the sources, not from imported modules, since some need a peer that is not installed.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, get_args

from markdown_texts import code, inline, sentence, table

import reward_kit
from reward_kit import StopReason, errors
from reward_kit.credit import DropReason
from reward_kit.sandbox import Outcome
from reward_kit.sandbox.outcome import MEANINGS

PACKAGE = Path(reward_kit.__file__).parent
_HOME = "reward_kit.errors"
_INTRO = """# Errors

Every error that reward-kit raises deliberately is a `RewardKitError` of one of the types below. The command line prints
the error as one line, `error: …`, and exits with its exit code. An error in one episode or reward does not end a run.
The error is recorded with its type, failure class, message and the frames of the traceback in your code. The episode is
unscored, which is never a score of 0.

```json
{"class": "crash", "where": "RewardError", "message": "reward 'exact': KeyError: 'total'", "traceback": "…"}
```

`class` is one of the [failure classes](#failure-classes), which tables and metrics count. `where` is the error's type.
"""


class ErrorType(NamedTuple):
    """An error type, as found in the source."""

    name: str
    module: str
    bases: tuple[str, ...]
    text: str
    failure_class: str | None
    exit_code: int | None


def page() -> str:
    """Return the page."""
    found = error_types()
    own = [one for one in found.values() if one.module == _HOME and one.name != "RewardKitError"]
    finer = [one for one in found.values() if one.module != _HOME]
    parts = [_INTRO, "## Types of errors { #types }\n"]
    parts += [part for one in own for part in _section(one, found)]
    parts += ["## Finer types { #finer-types }\n", "These types let a caller distinguish single cases.\n"]
    rows = [(code(one.name), ", ".join(map(code, one.bases)), code(one.module), inline(one.text)) for one in finer]
    parts += [table(["Type", "Base", "Module", "Meaning"], rows)]
    parts += _reasons()
    return "\n".join(parts) + "\n"


def _section(one: ErrorType, found: dict[str, ErrorType]) -> Iterator[str]:
    yield f"### `{one.name}` {{ #{one.name.lower()} }}\n"
    for paragraph in one.text.split("\n\n"):
        head, colon, rest = paragraph.partition(": ")
        labelled = colon and head in ("Likely cause", "What to do")
        yield (f"**{head}**: {inline(rest)}" if labelled else inline(paragraph)) + "\n"
    counted, left = inherited(one, "failure_class", found), inherited(one, "exit_code", found)
    yield f"The failure class is {code(str(counted))}; the command line exits with {code(str(left))}.\n"


def _reasons() -> Iterator[str]:
    """Yield a table of values for each enum of classes, kinds and reasons."""
    yield "\n## Failure classes { #failure-classes }\n"
    classes = [(code(name), inline(errors.CLASS_MEANINGS[name])) for name in get_args(errors.FailureClass)]
    yield table(["Class", "Meaning and fix"], classes)
    yield "\n## Stop reasons { #stop-reasons }\n"
    yield "`terminated` means that the task ended; otherwise the episode was cut off.\n"
    stops = members(StopReason, "agent/models.py")
    rows = [
        (code(name), "yes" if StopReason(name).is_terminal else "no", inline(sentence(text)))
        for name, text in stops.items()
    ]
    yield table(["Stop reason", "Terminated", "Meaning"], rows)
    yield "\n## Outcomes of a sandboxed call { #kinds }\n"
    yield "For a reward in [the sandbox](../concepts/sandbox.md), with its failure class.\n"
    kinds = [
        (code(kind), code(Outcome.class_of(kind)), inline(text)) for kind, text in MEANINGS.items() if kind != "ok"
    ]
    yield table(["Kind", "Class", "Meaning"], kinds)
    yield "\n## Reasons for dropped groups { #dropped-groups }\n"
    yield "With `dynamic_sampling` in a [train file](train_file.md#dynamic_sampling).\n"
    dropped = members(DropReason, "credit/group_filter.py")
    yield table(["Reason", "Meaning"], [(code(name), inline(text)) for name, text in dropped.items()])


@cache
def error_types() -> dict[str, ErrorType]:
    """Return all public error types of the package by name, those of `reward_kit.errors` first."""
    classes = [one for path in sorted(PACKAGE.rglob("*.py")) for one in _classes(path)]
    found: dict[str, ErrorType] = {"RewardKitError": next(one for one in classes if one.name == "RewardKitError")}
    while further := [one for one in classes if one.name not in found and found.keys() & set(one.bases)]:
        found |= {one.name: one for one in further}
    public = [one for one in found.values() if not one.name.startswith("_")]
    return {one.name: one for one in sorted(public, key=lambda one: one.module != _HOME)}


def _classes(path: Path) -> Iterator[ErrorType]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        values = {
            target.id: ast.literal_eval(one.value)
            for one in node.body
            if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)
            for target in one.targets
            if isinstance(target, ast.Name)
        }
        text = (ast.get_docstring(node) or "").split("\n\nArgs:")[0].split("\n\nAttributes:")[0]
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        bases = tuple(base.id for base in node.bases if isinstance(base, ast.Name))
        yield ErrorType(node.name, module, bases, text, values.get("failure_class"), values.get("exit_code"))


def inherited(one: ErrorType, name: str, found: dict[str, ErrorType]) -> str | int:
    """Return an attribute of a type or of its nearest base that has it."""
    value: str | int | None = getattr(one, name)
    if value is not None:
        return value
    bases = [found[base] for base in one.bases if base in found]
    return inherited(bases[0], name, found) if bases else str(getattr(errors.RewardKitError, name))


def members(kind: type, path: str) -> dict[str, str]:
    """Return the values of an enum with the docstrings of its members.

    Args:
        kind: the enum.
        path: of its source, within the package.
    """
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    found = {}
    for one, after in pairwise(body):
        if isinstance(one, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[str(ast.literal_eval(one.value))] = inspect.cleandoc(str(after.value.value))
    return found
