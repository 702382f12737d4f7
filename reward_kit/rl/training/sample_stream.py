"""The order in which samples are trained on: shuffled anew each time round, and the same for every run of one seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reward_kit.agent.samples import Sample, derive_seed
from reward_kit.errors import ConfigError


class SampleStream:
    """All samples, over and over. Where it stands is one number, so that a resume goes on with the next sample.

    Args:
        samples: what is trained on.
        seed: of the order.

    Attributes:
        position: how many samples were taken.

    Raises:
        ConfigError: there are none.
    """

    def __init__(self, samples: Sequence[Sample], seed: int) -> None:
        if not samples:
            raise ConfigError("there are no samples to train on")
        self._samples, self._seed = list(samples), seed
        self.position = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, count: int) -> list[Sample]:
        """The next so many."""
        return [self._next() for _ in range(count)]

    @property
    def epoch(self) -> float:
        """How often all of them were taken."""
        return self.position / len(self._samples)

    def _next(self) -> Sample:
        round_, place = divmod(self.position, len(self._samples))
        if self._order[0] != round_:
            generator = np.random.default_rng(derive_seed("samples", self._seed, round_))
            self._order = (round_, generator.permutation(len(self._samples)).tolist())
        self.position += 1
        return self._samples[self._order[1][place]]
