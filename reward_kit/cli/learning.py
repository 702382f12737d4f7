"""What learning needs is installed by an extra: told in one line where it is not there, imported when it is used.

Help and completion of the verbs that learn cost no import of PyTorch, and work without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from reward_kit.errors import ConfigError, how_to_install


@contextlib.contextmanager
def needs_to_learn(what: str) -> Iterator[None]:
    """Import what a verb needs within this.

    Args:
        what: needs it, such as the verb's name, for the message.

    Raises:
        ConfigError: a package of the extra `train` is not there.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("reward_kit"):
            raise
        raise ConfigError(f"{what} needs {error.name}; {how_to_install('train')}") from error
