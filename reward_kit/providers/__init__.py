"""Access to model endpoints: the transport, retries, prices, and the keys that each server may receive.

Names are imported on first use, so importing this package is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules

if TYPE_CHECKING:
    from reward_kit.providers.cassette import Cassette as Cassette
    from reward_kit.providers.chat import ChatEndpoint as ChatEndpoint
    from reward_kit.providers.completion import ChatCompletion as ChatCompletion
    from reward_kit.providers.completion import Usage as Usage
    from reward_kit.providers.dialect import EncodedMessages as EncodedMessages
    from reward_kit.providers.keys import EndpointSettings as EndpointSettings
    from reward_kit.providers.keys import resolve_endpoint as resolve_endpoint
    from reward_kit.providers.prices import Price as Price
    from reward_kit.providers.prices import PriceTable as PriceTable
    from reward_kit.providers.prices import load_prices as load_prices
    from reward_kit.providers.request_queue import Rates as Rates
    from reward_kit.providers.request_queue import RetryPolicy as RetryPolicy
    from reward_kit.providers.session import ProviderSession as ProviderSession
    from reward_kit.providers.transport import Transport as Transport

_MODULES = {
    "cassette": "Cassette",
    "chat": "ChatEndpoint",
    "completion": "ChatCompletion Usage",
    "dialect": "EncodedMessages",
    "keys": "EndpointSettings resolve_endpoint",
    "prices": "Price PriceTable load_prices",
    "request_queue": "Rates RetryPolicy",
    "session": "ProviderSession",
    "transport": "Transport",
}
__all__ = sorted(" ".join(_MODULES.values()).split())
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)
