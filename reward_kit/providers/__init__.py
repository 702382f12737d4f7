"""The one way out to model endpoints: transport, retries, prices, and who is called with which key.

Names are loaded when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_names

if TYPE_CHECKING:
    from reward_kit.providers.cassette import Cassette
    from reward_kit.providers.chat import ChatEndpoint, EncodedMessages
    from reward_kit.providers.completion import ChatCompletion, Usage
    from reward_kit.providers.keys import EndpointSettings, resolve_endpoint
    from reward_kit.providers.prices import Price, PriceTable, load_prices
    from reward_kit.providers.request_queue import Rates, RetryPolicy
    from reward_kit.providers.session import ProviderSession
    from reward_kit.providers.transport import Transport

__all__ = [
    "Cassette",
    "ChatCompletion",
    "ChatEndpoint",
    "EncodedMessages",
    "EndpointSettings",
    "Price",
    "PriceTable",
    "ProviderSession",
    "Rates",
    "RetryPolicy",
    "Transport",
    "Usage",
    "load_prices",
    "resolve_endpoint",
]
_HOMES = {
    "Cassette": "cassette",
    "ChatCompletion": "completion",
    "ChatEndpoint": "chat",
    "EncodedMessages": "chat",
    "EndpointSettings": "keys",
    "Price": "prices",
    "PriceTable": "prices",
    "Rates": "request_queue",
    "RetryPolicy": "request_queue",
    "ProviderSession": "session",
    "Transport": "transport",
    "Usage": "completion",
    "load_prices": "prices",
    "resolve_endpoint": "keys",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
