"""A check that all packages required by a reward are installed. Nothing is ever installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from reward_kit.errors import ConfigError

if TYPE_CHECKING:  # most rewards require nothing
    from packaging.requirements import Requirement


def check_installed(texts: Sequence[str], what: str) -> None:
    """Check names, versions and extras. Requirements whose marker is false on this machine are skipped.

    Args:
        texts: the requirements, such as `sympy>=1.12,<2`.
        what: the name of the reward in messages.

    Raises:
        ConfigError: If a requirement is malformed or is not met.
    """
    if not texts:
        return
    from packaging.requirements import InvalidRequirement, Requirement

    unmet: list[tuple[str, str]] = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{what}: requirements: {text!r} is malformed: {reason}; write a package and "
                "its versions, such as 'sympy>=1.12,<2'"
            ) from None
        is_for_here = requirement.marker is None or requirement.marker.evaluate()
        if is_for_here and (why := _why_unmet(requirement, frozenset())):
            unmet.append((str(requirement), why))
    if unmet:
        problems = ", and ".join(f"requires {text!r}, but {why}" for text, why in unmet)
        wanted = " ".join(repr(text) for text, _ in unmet)
        raise ConfigError(
            f"{what} {problems}; run `python -m pip install {wanted}`, or serve the reward from a "
            "separate environment (reward-kit serve) and use its URL"
        )


def _why_unmet(requirement: Requirement, seen: frozenset[tuple[str, str]]) -> str:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion

    try:
        installed = metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    try:
        # The content of a URL cannot be compared. It suffices that a package with this name is installed.
        fits = requirement.url is not None or requirement.specifier.contains(installed.version, prereleases=True)
    except (InvalidVersion, TypeError):
        fits = False
    if not fits:
        return f"{requirement.name} {installed.version} is installed"
    for extra in sorted(requirement.extras):
        key = (canonicalize_name(requirement.name), extra)
        for text in (installed.requires or ()) if key not in seen else ():
            wanted = Requirement(text)
            marker, wanted.marker = wanted.marker, None
            if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
                continue  # this extra does not add the requirement
            if why := _why_unmet(wanted, seen | {key}):
                return f"its extra {extra!r} requires {str(wanted)!r}: {why}"
    return ""
