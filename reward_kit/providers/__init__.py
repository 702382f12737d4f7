"""The one way out to model endpoints: transport, retries, prices, and who is called with which key.

Names are loaded when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_names

if TYPE_CHECKING:
    from reward_kit.providers.cassette import Cassette
    from reward_kit.providers.chat import ChatEndpoint
    from reward_kit.providers.completion import ChatCompletion, Usage
    from reward_kit.providers.encoding import EncodedMessages
    from reward_kit.providers.environment import EndpointSettings, resolve_endpoint
    from reward_kit.providers.prices import Price, PriceTable, load_prices
    from reward_kit.providers.rates import Rates
    from reward_kit.providers.retry import RetryPolicy
    from reward_kit.providers.traffic import Traffic
    from reward_kit.providers.transport import Transport

__all__ = [
    "Cassette",
    "ChatCompletion",
    "ChatEndpoint",
    "EncodedMessages",
    "EndpointSettings",
    "Price",
    "PriceTable",
    "Rates",
    "RetryPolicy",
    "Traffic",
    "Transport",
    "Usage",
    "load_prices",
    "resolve_endpoint",
]

_HOMES = {
    "Cassette": "cassette",
    "ChatCompletion": "completion",
    "ChatEndpoint": "chat",
    "EncodedMessages": "encoding",
    "EndpointSettings": "environment",
    "Price": "prices",
    "PriceTable": "prices",
    "Rates": "rates",
    "RetryPolicy": "retry",
    "Traffic": "traffic",
    "Transport": "transport",
    "Usage": "completion",
    "load_prices": "prices",
    "resolve_endpoint": "environment",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
