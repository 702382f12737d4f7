"""Token prices from a file that the user maintains, because prices change more often than this package.

The file has lines such as `gpt-4.1-mini: {input: 0.40, output: 1.60, cached: 0.10}`, in US dollars per million tokens.
If a model is not in the file, its cost is `None`, never 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError, describe_read_error, did_you_mean

_FIELDS = ("input", "output", "cached", "cache_write")


@dataclass(frozen=True, slots=True)
class Price:
    """Prices in US dollars per million tokens.

    Attributes:
        input: the price of prompt tokens.
        output: the price of completion tokens, including reasoning.
        cached: the price of prompt tokens that the provider read from its cache.
        cache_write: the price of prompt tokens that the provider wrote to its cache. If None, the `input` price
            applies.
    """

    input: float
    output: float
    cached: float
    cache_write: float | None = None


@dataclass(frozen=True, slots=True)
class PriceTable:
    """The prices of each model, keyed by model name."""

    models: Mapping[str, Price]

    def cost(
        self,
        model: str,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int = 0,
        cache_write_tokens: int = 0,
    ) -> float | None:
        """Return the cost of a completion in US dollars, or None if the model is not in the table.

        `prompt_tokens` includes the tokens that were read from or written to the cache.
        """
        price = self.models.get(model)
        if price is None:
            return None
        cached = min(cached_tokens, prompt_tokens)
        written = min(cache_write_tokens, prompt_tokens - cached)
        write_price = price.input if price.cache_write is None else price.cache_write
        dollars = (prompt_tokens - cached - written) * price.input + cached * price.cached + written * write_price
        return (dollars + completion_tokens * price.output) / 1e6


def load_prices(path: str | Path) -> PriceTable:
    """Load a YAML or JSON file that maps each model to its prices.

    `input` and `output` are required. The default for `cached` and `cache_write` is the `input` price.

    Raises:
        ConfigError: If the file cannot be read or is invalid. The message names the file and the field.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"price file {path} cannot be read: {describe_read_error(path, error)}") from error
    if path.suffix == ".json":
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON: {error}") from error
    else:
        import yaml

        from reward_kit.limited_yaml import load_yaml

        try:
            data = load_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected a mapping of model names to prices, got {type(data).__name__}")
    return PriceTable({str(model): _price(value, f"{path}: {model}") for model, value in data.items()})


def _price(value: Any, where: str) -> Price:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected {{input: …, output: …}} in US dollars per million tokens, got {value!r}")
    for key in value:
        if key not in _FIELDS:
            raise ConfigError(f"{where}.{key}: unknown key{did_you_mean(str(key), _FIELDS)}")
    dollars: dict[str, float] = {}
    for key in _FIELDS:
        price = value.get(key, value["input"] if key.startswith("cache") else None)
        if price is None:
            raise ConfigError(f"{where}.{key}: missing; set a price in US dollars per million tokens")
        is_number = isinstance(price, int | float) and not isinstance(price, bool)
        if not (is_number and math.isfinite(price) and price >= 0):
            wanted = "expected a non-negative price in US dollars per million tokens"
            raise ConfigError(f"{where}.{key}: {wanted}, got {price!r}")
        dollars[key] = float(price)
    return Price(**dollars)
