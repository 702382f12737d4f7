"""What a reward manager tells besides the rewards: a few decoded examples, and facts for each row."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from reward_kit.errors import ConfigError, RewardError, boundary
from reward_kit.rl.reward_manager.batches import Floats, RewardBatch

Echo = Callable[[str], None]
Column = npt.NDArray[Any]

SHOWN_SHARE = 0.1
"""How likely a row is shown while its data source has not had all its examples."""

logger = logging.getLogger("reward_kit.rl")


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of these tokens."""


def check_whole(name: str, number: object, low: int) -> None:
    """Refuses what is no whole number of at least `low`.

    Raises:
        ConfigError: see above.
    """
    if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < low:
        raise ConfigError(f"{name} is a whole number of at least {low}; got {number!r}")


def check_tokenizer(tokenizer: object) -> None:
    """Refuses what cannot decode. Where nothing is decoded, a tokenizer may be anything.

    Raises:
        ConfigError: see above.
    """
    if not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(f"the tokenizer has no method `decode`; got {tokenizer!r:.80}")


class ExampleLog:
    """Shows some rows of a batch as text: prompt, response, score.

    Args:
        tokenizer: decodes them, and only them.
        num_examine: at most so many of each data source in a batch.
        seed: of the generator that chooses them, which is its own.
        echo: takes each line; by default the logger "reward_kit.rl", at the level INFO.

    Raises:
        ConfigError: a number is none, or below 0; the tokenizer or `echo` is none.
    """

    def __init__(self, tokenizer: Tokenizer, num_examine: int, seed: int, echo: Echo | None) -> None:
        check_whole("num_examine", num_examine, 0)
        check_whole("seed", seed, 0)
        if echo is not None and not callable(echo):
            raise ConfigError(f"echo is a function that takes a line; got {echo!r:.80}")
        if num_examine:
            check_tokenizer(tokenizer)
        self._tokenizer, self._num_examine, self._echo = tokenizer, num_examine, echo
        self._generator = np.random.default_rng(seed)

    def show(self, batch: RewardBatch, scores_B: Floats, skip_special_tokens: bool) -> None:
        """Show the rows that are chosen; where none is, nothing is decoded.

        Raises:
            RewardError: the tokenizer cannot decode a row.
        """
        if not self._num_examine or not (self._echo or logger.isEnabledFor(logging.INFO)):
            return
        sources = batch.column("data_source")
        shown: Counter[str] = Counter()
        for row in np.flatnonzero(self._generator.random(len(batch)) < SHOWN_SHARE).tolist():
            source = "unknown" if sources is None or sources[row] is None else str(sources[row])
            if shown[source] < self._num_examine:
                shown[source] += 1
                prompt, response = texts_of(self._tokenizer, batch, row, skip_special_tokens)
                score = "none" if math.isnan(scores_B[row]) else f"{scores_B[row]:g}"
                for what, text in (("prompt", prompt), ("response", response), ("score", score)):
                    self._tell(f"[{source}][{what}] {text}")

    def _tell(self, line: str) -> None:
        if self._echo is not None:
            self._echo(line)
        else:
            logger.info("%s", line)


def texts_of(tokenizer: Tokenizer, batch: RewardBatch, row: int, skip_special_tokens: bool) -> tuple[str, str]:
    """A row's prompt and what followed it.

    Raises:
        RewardError: the tokenizer cannot decode it.
    """
    prompt, response = batch.ids(row)
    with boundary(RewardError, f"tokenizer on row {row}"):
        return (
            tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens),
            tokenizer.decode(response, skip_special_tokens=skip_special_tokens),
        )


def columns_of(items: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """Facts of single rows as arrays with one item per row, whatever keys each has; None where a row lacks one.

    Where all rows have a number, the array is one of numbers.
    """
    columns = {}
    for key in dict.fromkeys(key for item in items for key in item):
        values = [item.get(key) for item in items]
        if all(isinstance(value, bool | int | float | np.number | np.bool_) for value in values):
            columns[key] = np.array(values)
        else:
            columns[key] = np.empty(len(values), dtype=object)
            for row, value in enumerate(values):  # one by one: NumPy would make an axis of a value that is a list
                columns[key][row] = value
    return columns
