"""What a command that goes on with a run says of the secrets that the run was given, which no file of it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_kit.cli.echo import echo
from reward_kit.runs.redaction import hidden_keys


def told_of_hidden(overrides: Mapping[str, Any], given: Mapping[str, Any], otherwise: str = "") -> list[str]:
    """The keys of the overrides of which a secret was hidden; who resumes is told of those that are missing now.

    Args:
        overrides: what the run was given by -T, as it is stored.
        given: what the resume is given.
        otherwise: what may be done besides giving it again, as the end of a sentence.
    """
    hidden = list(hidden_keys(overrides))
    if missing := [key for key in hidden if key not in given]:
        keys = " ".join(f"-T {key}=…" for key in missing)
        echo(f"{keys} is a secret, or holds one, and was not stored; give it again{otherwise}", err=True)
    return hidden
