"""Customers and orders as one JSON state, and the tools of the support desk.

The tools reject impossible requests. They do not enforce the rules of the shop, which is the agent's task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from reward_kit import ToolError, ToolRegistry
from reward_kit.environments import PythonStateResource

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "shop.json").read_text(encoding="utf-8"))


class Shop(PythonStateResource):
    """The state of `shop.json`. `expert_actions` in the configuration are the expert's calls and messages."""

    registry = ToolRegistry("shop")
    per_sample_keys = PythonStateResource.per_sample_keys | {"expert_actions"}

    async def setup(self, config: Mapping[str, Any]) -> None:
        self._script = list(config.get("expert_actions", ()))
        rest = {key: value for key, value in config.items() if key != "expert_actions"}
        await super().setup({"initial_state": DATA, **rest})

    async def expert_action(self) -> Mapping[str, Any] | None:
        return self._script.pop(0) if self._script else None


@Shop.registry.tool
def find_customer_by_email(shop: Shop, email: str) -> str:
    """Find a customer's id by e-mail address."""
    return first_id(id_ for id_, customer in shop.state["customers"].items() if customer["email"] == email.lower())


@Shop.registry.tool
def find_customer_by_name(shop: Shop, name: str, zip_code: str) -> str:
    """Find a customer's id by full name and zip code."""
    known = shop.state["customers"].items()
    return first_id(
        id_ for id_, customer in known if (customer["name"].lower(), customer["zip_code"]) == (name.lower(), zip_code)
    )


@Shop.registry.tool
def get_customer(shop: Shop, customer_id: str) -> dict[str, Any]:
    """Show a customer with the ids of their orders."""
    if customer_id not in shop.state["customers"]:
        raise ToolError(f"no customer {customer_id}")
    orders = [id_ for id_, order in shop.state["orders"].items() if order["customer"] == customer_id]
    return {**shop.state["customers"][customer_id], "orders": orders}


@Shop.registry.tool
def get_order(shop: Shop, order_id: str) -> dict[str, Any]:
    """Show an order. Amounts are in cents."""
    return existing_order(shop, order_id)


@Shop.registry.tool
def cancel_order(shop: Shop, order_id: str, reason: Literal["no longer needed", "ordered by mistake"]) -> str:
    """Cancel an order that is being processed."""
    order_with_status(shop, order_id, "processing")
    shop.state["orders"][order_id] |= {"status": "cancelled", "reason": reason}
    return f"{order_id} is cancelled"


@Shop.registry.tool
def change_address(shop: Shop, order_id: str, address: str) -> str:
    """Send an order that is being processed to another address.

    Args:
        order_id: the order.
        address: the whole address in one line, as "street number, city, zip code".
    """
    order_with_status(shop, order_id, "processing")
    shop.state["orders"][order_id]["address"] = address
    return f"{order_id} goes to {address}"


@Shop.registry.tool
def refund_order(shop: Shop, order_id: str, to: Literal["original payment", "store credit"]) -> str:
    """Refund a delivered order."""
    order = order_with_status(shop, order_id, "delivered")
    order |= {"status": "refunded", "refunded_to": to}
    if to == "store credit":
        shop.state["customers"][order["customer"]]["credit_cents"] += order["total_cents"]
    return f"{order_id}: {order['total_cents']} cents are refunded as {to}"


def first_id(ids: Any) -> str:
    """Return the first id, or raise a `ToolError`, which the agent reads."""
    for id_ in ids:
        return str(id_)
    raise ToolError("no such customer")


def existing_order(shop: Shop, order_id: str) -> dict[str, Any]:
    """Return an order, or raise a `ToolError`, which the agent reads."""
    if order_id not in shop.state["orders"]:
        raise ToolError(f"no order {order_id}")
    order: dict[str, Any] = shop.state["orders"][order_id]
    return order


def order_with_status(shop: Shop, order_id: str, status: str) -> dict[str, Any]:
    """Return an order with this status, or raise a `ToolError`, which the agent reads."""
    order = existing_order(shop, order_id)
    if order["status"] != status:
        raise ToolError(f"{order_id} is {order['status']}, not {status}")
    return order
