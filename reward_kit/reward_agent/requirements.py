"""What a reward says it needs of installed packages: read without running it, and checked against what there is."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from reward_kit.errors import ConfigError
from reward_kit.reward_agent.sources import Definition, definition_of, definitions

if TYPE_CHECKING:  # most rewards require nothing
    from packaging.requirements import Requirement


class Declared(NamedTuple):
    """What the text of a reward says.

    Attributes:
        requirements: those of its decorator; None where they are there and are no plain list of texts.
        may_take_steps: it may be given `step_data`, for which a worker needs NumPy.
    """

    requirements: tuple[str, ...] | None
    may_take_steps: bool


def declared_in(text: str, name: str) -> Declared | None:
    """Read a reward's decorator. Nothing of the text is run.

    Args:
        text: of the file.
        name: of the function or class in it, dotted for one in a class.

    Returns:
        None where the text does not define that name by `def` or `class`, or is no Python.
    """
    try:
        scope = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # told with its line where it is run
        return None
    found = definition_of(name, scope)
    return Declared(_requirements_of(found), _may_take_steps(found)) if found is not None else None


def parsed(texts: Sequence[str], what: str) -> list[Requirement]:
    """The requirements that hold on this machine; those whose marker is false here are left out.

    Args:
        texts: as in a requirements file, one each.
        what: whose they are, for the message.

    Raises:
        ConfigError: a text is no requirement.
    """
    if not texts:
        return []
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{what}: requirements: {text!r} is none: {reason}; write a package and its versions: 'sympy>=1.12,<2'"
            ) from None
        if requirement.marker is None or requirement.marker.evaluate():
            found.append(requirement)
    return found


def check_installed(texts: Sequence[str], what: str) -> None:
    """Compare requirements with the packages of the running interpreter: names, versions, and what extras ask for.

    Args:
        texts: as in a requirements file, one each.
        what: whose they are, for the message.

    Raises:
        ConfigError: a text is no requirement, or is not met; every unmet one is told, with what is installed.
    """
    unmet = [(text, why) for text, why in ((str(one), _why_unmet(one)) for one in parsed(texts, what)) if why]
    if not unmet:
        return
    told = ", and ".join(f"requires {text!r}, and {why}" for text, why in unmet)
    wanted = " ".join(repr(text) for text, _ in unmet)
    raise ConfigError(
        f"{what} {told}; install it yourself (python -m pip install {wanted}), or have an environment made of this "
        "reward's requirements, which asks your package index: --install-requirements, at the "
        "level warm or isolated"
    )


def _requirements_of(definition: Definition) -> tuple[str, ...] | None:
    """What a decorator says by `requirements=`, whatever the decorator is called there."""
    for decorator in definition.decorator_list:
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
            if keyword.arg is None:  # **options, which may hold them
                return None
            if keyword.arg != "requirements":
                continue
            try:
                value = ast.literal_eval(keyword.value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return None
            if value is not None and not _are_texts(value):
                return None
            return tuple(value or ())
    return ()


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _may_take_steps(definition: Definition) -> bool:
    function: Definition | None = definition
    if isinstance(definition, ast.ClassDef):
        function = next((one for one in definitions(definition.body) if one.name == "score"), None)
    if function is None or isinstance(function, ast.ClassDef):  # such as a method of a parent
        return True
    taken = function.args
    names = {argument.arg for argument in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}
    return taken.kwarg is not None or "step_data" in names


def _why_unmet(requirement: Requirement, seen: frozenset[tuple[str, str]] = frozenset()) -> str | None:
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion

    try:
        installed = metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    version = installed.version
    try:
        # What an address holds cannot be compared; a package of its name is there.
        fits = requirement.url is not None or requirement.specifier.contains(version, prereleases=True)
    except (InvalidVersion, TypeError):
        fits = False
    if not fits:
        return f"{requirement.name} {version} is installed"
    for extra in sorted(requirement.extras):
        key = (canonicalize_name(requirement.name), extra)
        for wanted in _wanted_by(installed, extra) if key not in seen else ():
            if why := _why_unmet(wanted, seen | {key}):
                return f"its extra {extra!r} wants {str(wanted)!r}: {why}"
    return None


def _wanted_by(installed: metadata.Distribution, extra: str) -> Iterator[Requirement]:
    """What an extra of an installed package adds to it."""
    from packaging.requirements import Requirement

    for text in installed.requires or ():
        wanted = Requirement(text)
        marker = wanted.marker
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            wanted.marker = None
            yield wanted
