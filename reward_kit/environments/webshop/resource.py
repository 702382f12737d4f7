"""A small shop as a resource: search, open, choose, buy; the reward is WebShop's, and only the purchase earns it.

What differs from WebShop (Yao et al. 2022, arXiv 2207.01206): the products are generated, a search is open on every
page, and the tools are typed in place of `search[…]` and `click[…]`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field

from reward_kit.environments.base import (
    ForkableResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    hash_key,
    tool_spec,
)
from reward_kit.environments.config import read_config
from reward_kit.environments.webshop.catalogue import MAX_QUERY_CHARS, Product, catalogue
from reward_kit.environments.webshop.goals import draw_goal, queries, satisfies
from reward_kit.environments.webshop.reward import Goal, Purchase, match_purchase
from reward_kit.environments.webshop.visit import SECTIONS, Shop, Visit
from reward_kit.errors import ToolError, did_you_mean

_TEXT = {"type": "string"}


def _spec(name: str, description: str, **properties: dict[str, Any]) -> ToolSpec:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if properties:
        schema["required"] = list(properties)
    return tool_spec(name, description, schema)


_SPECS: dict[str, ToolSpec] = {
    "search": _spec(
        "search", "Search the shop; the best matches come first.", query={**_TEXT, "maxLength": MAX_QUERY_CHARS}
    ),
    "open": _spec("open", "Open one of the products that the page shows.", product_id=_TEXT),
    "view": _spec("view", "Read more about the open product.", section={**_TEXT, "enum": list(SECTIONS)}),
    "choose": _spec("choose", "Choose a value of an option of the open product.", option=_TEXT, value=_TEXT),
    "next_page": _spec("next_page", "Go to the next page of the results."),
    "previous_page": _spec("previous_page", "Go to the previous page of the results."),
    "back": _spec("back", "Go back: from a text to its product, to the results, to the start."),
    "buy": _spec("buy", "Buy the open product with the options chosen. This ends the visit."),
}


class WebshopConfig(BaseModel):
    """The configuration of `webshop`."""

    model_config = ConfigDict(extra="forbid")

    products: int = Field(default=1000, ge=10, le=20_000, description="how many the shop has")
    catalogue_seed: int = Field(default=0, description="other seeds give other products")
    page_size: int = Field(default=10, ge=1, le=50, description="how many results a page shows")
    index: int | None = Field(default=None, ge=0, description="which goal; by default the reset's seed picks one")


class WebshopResource(ForkableResource):
    """One visit with one goal, in a catalogue that all worlds of a process share."""

    fork_kind = "native"
    per_sample_keys = frozenset({"index"})

    def __init__(self) -> None:
        self._settings = WebshopConfig()
        self._shop: Shop
        self._goal: Goal
        self._goal_name = ""
        self._visit = Visit()
        self._actions = 0

    async def setup(self, config: Mapping[str, Any]) -> None:
        settings = self._settings = read_config(WebshopConfig, config, "webshop")
        products = await anyio.to_thread.run_sync(catalogue, settings.products, settings.catalogue_seed)
        self._shop = Shop(products, settings.page_size)
        await self.reset(0)

    async def reset(self, seed: int | None = None) -> None:
        settings = self._settings
        index = settings.index if settings.index is not None else random.Random(seed).randrange(2**32)
        self._goal = draw_goal(self._shop.catalogue, index)
        self._goal_name = hash_key(
            self._shop.catalogue.name, str(settings.page_size), canonical_json(asdict(self._goal))
        )
        self._visit, self._actions = Visit(), 0

    async def fork(self) -> ForkableResource:
        # The visit is replaced by every action, and all else never changes, so two worlds may hold the same values.
        return copy.copy(self)

    async def checkpoint(self) -> Any:
        return dict(vars(self))

    async def restore(self, state: Any) -> None:
        vars(self).update(state)

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        arguments = _checked(action_name, action_params)
        if self._visit.bought:
            raise ToolError("the visit is over; nothing can be changed")
        self._visit = await self._after(action_name, arguments)
        self._actions += 1
        page = self._shop.text(self._visit)
        if not self._visit.bought:
            return StepOutcome(page, 0.0)
        match = match_purchase(self._goal, self._purchase())
        return StepOutcome(page, match.reward, terminated=True, info={"reward": match.reward, **asdict(match)})

    async def get_observation(self) -> Any:
        return f"Instruction: {self._goal.instruction}\n\n{self._shop.text(self._visit)}"

    async def get_tools_spec(self) -> list[ToolSpec]:
        return list(_SPECS.values())

    async def state_key(self) -> str:
        return hash_key(self._goal_name, canonical_json(self._visit.to_json()))

    async def final_state(self) -> StateSnapshot:
        """The goal, the purchase (None where nothing was bought), its reward, and how many actions were taken."""
        facts: dict[str, Any] = {"goal": asdict(self._goal), "purchase": None, "reward": 0.0, "actions": self._actions}
        if self._visit.bought:
            purchase = self._purchase()
            facts |= {"purchase": asdict(purchase), "reward": match_purchase(self._goal, purchase).reward}
        return StateSnapshot.from_json(facts)

    async def admissible_actions(self) -> Sequence[Mapping[str, Any]]:
        """The links of the page; on the start page a search for each kind of product."""
        return list(self._shop.actions(self._visit))

    async def expert_action(self) -> Mapping[str, Any] | None:
        """The next action of one who searches for what the instruction says, and knows every product's attributes."""
        visit = self._visit
        if visit.bought:
            return None
        if visit.product is None or not self._fits(visit.product):
            return await self._towards_a_product()
        chosen = dict(visit.options)
        for name, value in self._goal.options.items():
            if chosen.get(name) != value:
                return _action("choose", option=name, value=value)
        return _action("buy")

    async def _after(self, name: str, arguments: Mapping[str, str]) -> Visit:
        shop, visit = self._shop, self._visit
        match name:
            case "search":
                return Visit(results=await anyio.to_thread.run_sync(shop.catalogue.search, arguments["query"]))
            case "open":
                return shop.open(visit, arguments["product_id"])
            case "view":
                return shop.view(visit, arguments["section"])
            case "choose":
                return shop.choose(visit, arguments["option"], arguments["value"])
            case "back":
                return shop.back(visit)
            case "buy":
                shop.opened(visit)
                return replace(visit, bought=True)
        return shop.turn(visit, 1 if name == "next_page" else -1)

    async def _towards_a_product(self) -> Mapping[str, Any] | None:
        """To the first product among the results that fits, or to results that have one."""
        visit = self._visit
        rank = next((rank for rank, number in enumerate(visit.results or ()) if self._fits(number)), None)
        if rank is None:
            query = await anyio.to_thread.run_sync(self._query)
            return None if query is None else _action("search", query=query)
        if visit.product is not None:
            return _action("back")
        page = rank // self._settings.page_size
        if page != visit.page:
            return _action("next_page" if page > visit.page else "previous_page")
        return _action("open", product_id=self._shop.catalogue.products[(visit.results or ())[rank]].id)

    def _query(self) -> str | None:
        shop = self._shop.catalogue
        asked = queries(self._goal, shop)
        return next((query for query in asked if any(map(self._fits, shop.search(query)))), None)

    def _fits(self, number: int) -> bool:
        return satisfies(self._shop.catalogue.products[number], self._goal)

    def _purchase(self) -> Purchase:
        return _purchase(self._shop.opened(self._visit), dict(self._visit.options))


def _purchase(product: Product, chosen: Mapping[str, str]) -> Purchase:
    return Purchase(
        product_id=product.id,
        title=product.title,
        query=product.query,
        category=product.category,
        nouns=product.nouns,
        attributes=product.attributes,
        features=product.features,
        description=product.description,
        options=dict(chosen),
        price=product.price,
    )


def _checked(name: str, arguments: Mapping[str, Any]) -> Mapping[str, str]:
    """The arguments of a call, all of which are texts."""
    if name not in _SPECS:
        raise ToolError(f"unknown tool {name!r}{did_you_mean(name, _SPECS)}")
    known: Mapping[str, Any] = _SPECS[name]["function"]["parameters"]["properties"]
    for key in arguments:
        if key not in known:
            raise ToolError(f"{name}: unknown argument {key!r}{did_you_mean(str(key), known)}")
    for key in known:
        if key not in arguments:
            raise ToolError(f"{name}: {key}: missing")
        if not isinstance(arguments[key], str):
            raise ToolError(f"{name}: {key}: must be text, got {arguments[key]!r:.80}")
        if len(arguments[key]) > MAX_QUERY_CHARS:
            raise ToolError(f"{name}: {key}: {len(arguments[key])} characters; at most {MAX_QUERY_CHARS}")
    return arguments


def _action(name: str, **arguments: str) -> dict[str, Any]:
    return {"type": "tool_call", "name": name, "arguments": arguments}
