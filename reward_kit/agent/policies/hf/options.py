"""Options of the policy that a file may have wrong: of another kind, or too small."""

from __future__ import annotations

from collections.abc import Mapping

from reward_kit.errors import ConfigError, kind_of


def check_options(
    *, numbers: Mapping[str, object], whole: Mapping[str, tuple[object, int]], switches: Mapping[str, object]
) -> None:
    """Refuse what is of another kind than it should be.

    Args:
        numbers: by their names.
        whole: whole numbers, each with its least value.
        switches: what is true or false.

    Raises:
        ConfigError: see above.
    """
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ConfigError(f"{name}: expected a number, got {number!r}, {kind_of(number)}")
    for name, (count, least) in whole.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise ConfigError(f"{name}: expected a whole number, got {count!r}, {kind_of(count)}")
        if count < least:
            raise ConfigError(f"{name}: {count} is below {least}")
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise ConfigError(f"{name}: expected true or false, got {switch!r}, {kind_of(switch)}")


def check_room(max_context: int, max_new_tokens: int) -> int:
    """The first of them, where an answer leaves room for a prompt.

    Raises:
        ConfigError: it does not, and every episode would end before its first step.
    """
    if max_new_tokens >= max_context:
        raise ConfigError(
            f"max_new_tokens: {max_new_tokens} leaves no room for a prompt in a context of {max_context} tokens"
        )
    return max_context
