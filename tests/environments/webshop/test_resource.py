"""Test the shop resource: pages, actions, the expert, and the contract of resources."""

from __future__ import annotations

import random

import pytest

from reward_kit.checks import check_resource
from reward_kit.environments import WebshopResource, open_snapshot
from reward_kit.environments.webshop import Purchase, ShoppingGoal, catalog, draw_goal, match_purchase
from reward_kit.errors import ConfigError, ToolError

SIZE = 200


async def made(seed=0, **config) -> WebshopResource:
    resource = WebshopResource()
    await resource.setup({"products": SIZE, **config})
    await resource.reset(seed)
    return resource


async def call(resource, name, **arguments):
    return await resource.step(name, arguments)


async def open_first_product(resource):
    """Open the first product that the goal's search finds, and return its page."""
    await call(resource, "search", query=resource._goal.query)
    (first, *_) = await resource.admissible_actions()
    return (await resource.step(first["name"], first["arguments"])).observation


async def play_expert(resource):
    rewards = []
    while action := await resource.expert_action():
        outcome = await resource.step(action["name"], action["arguments"])
        rewards.append(outcome.reward)
    return rewards, outcome


@pytest.mark.parametrize("config", [{"products": 100}, {"products": 30, "page_size": 3, "index": 4}])
async def test_resource_passes_the_checker(config) -> None:
    for seed in range(3):
        assert await check_resource(WebshopResource, config, seed=seed, steps=15) == []


async def test_expert_earns_the_full_reward_for_sixty_goals() -> None:
    for seed in range(60):
        rewards, outcome = await play_expert(await made(seed, products=1000, page_size=3 if seed % 2 else 10))
        assert outcome.terminated
        assert rewards == [0.0] * (len(rewards) - 1) + [1.0]


async def test_expert_recovers_from_a_wrong_product_page_and_option() -> None:
    resource = await made(3, page_size=2)
    goal = resource._goal
    await call(resource, "search", query="green tea lip balm")
    (first, *_) = await resource.admissible_actions()
    await resource.step(first["name"], first["arguments"])
    await call(resource, "view", section="features")
    rewards, _ = await play_expert(await resource.fork())
    assert rewards[-1] == 1.0
    while (action := await resource.expert_action())["name"] != "choose":
        await resource.step(action["name"], action["arguments"])
    name, value = next(iter(goal.options.items()))
    wrong = next(other for other in resource._open_product().options[name] if other != value)
    await call(resource, "choose", option=name, value=wrong)
    rewards, _ = await play_expert(resource)
    assert rewards[-1] == 1.0


async def open_results_with_the_product_on_a_later_page() -> tuple[WebshopResource, int]:
    """Show one result per page; return the page of the first product that satisfies the goal."""
    for index in range(50):
        resource = await made(index=index, page_size=1)
        await call(resource, "search", query=resource._goal.query)
        page = next((rank for rank, number in enumerate(resource._visit.results) if resource._fits(number)), 0)
        if page > 0:
            return resource, page
    raise AssertionError("no such goal")


async def test_expert_turns_pages_in_both_directions() -> None:
    resource, page = await open_results_with_the_product_on_a_later_page()
    assert (await resource.expert_action())["name"] == "next_page"
    (wrong, *_) = await resource.admissible_actions()
    await resource.step(wrong["name"], wrong["arguments"])
    assert (await resource.expert_action())["name"] == "back"
    await call(resource, "back")
    for _ in range(page + 1):
        await call(resource, "next_page")
    assert (await resource.expert_action())["name"] == "previous_page"
    rewards, _ = await play_expert(resource)
    assert rewards[-1] == 1.0


async def test_random_actions_earn_little() -> None:
    total = 0.0
    for seed in range(30):
        resource, rng = await made(seed), random.Random(seed)
        for _ in range(15):
            if not (actions := await resource.admissible_actions()):
                break
            chosen = rng.choice(actions)
            total += (await resource.step(chosen["name"], chosen["arguments"])).reward
    assert total / 30 < 0.2


async def test_only_the_purchase_is_rewarded_and_ends_the_episode() -> None:
    resource = await made()
    page = await open_first_product(resource)
    assert page.splitlines()[2] == "Options:"
    outcome = await call(resource, "buy")
    assert outcome.terminated and outcome.observation.startswith("The order is placed")
    assert await resource.admissible_actions() == []
    assert await resource.expert_action() is None
    with pytest.raises(ToolError, match="the visit is over"):
        await call(resource, "back")


async def test_reward_can_be_recomputed_from_the_final_state() -> None:
    resource = await made(2)
    nothing = open_snapshot(await resource.final_state())
    assert (nothing["purchase"], nothing["reward"], nothing["actions"]) == (None, 0.0, 0)
    await open_first_product(resource)
    outcome = await call(resource, "buy")
    state = open_snapshot(await resource.final_state())
    match = match_purchase(ShoppingGoal(**state["goal"]), Purchase(**state["purchase"]))
    assert match.reward == state["reward"] == outcome.reward == outcome.info["reward"]
    assert 0.0 < match.reward < 1.0 and state["actions"] == 3


async def test_result_pages_lead_forward_and_back() -> None:
    resource = await made(page_size=10)
    outcome = await call(resource, "search", query="rain jacket boots tea")
    first = outcome.observation
    assert first.startswith("Results, page 1 of ") and len(first.splitlines()) == 11
    second = (await call(resource, "next_page")).observation
    assert second.startswith("Results, page 2 of ")
    assert set(first.splitlines()[1:]).isdisjoint(second.splitlines()[1:])
    shown_before = first.splitlines()[1].split(" | ")[0]
    with pytest.raises(ToolError, match="is not on this page"):
        await call(resource, "open", product_id=shown_before)
    assert (await call(resource, "previous_page")).observation == first
    with pytest.raises(ToolError, match="no previous page"):
        await call(resource, "previous_page")
    assert "Start page" in (await call(resource, "back")).observation


async def test_product_page_shows_its_details_and_forgets_choices_when_left() -> None:
    resource = await made()
    page = await open_first_product(resource)
    option, value = page.splitlines()[3].removeprefix("- ").split(", ")[0].split(": ")
    chosen = (await call(resource, "choose", option=option, value=value)).observation
    assert f"(chosen: {value})" in chosen
    assert "Features:\n- " in (await call(resource, "view", section="features")).observation
    assert "Description: " in (await call(resource, "view", section="description")).observation
    assert (await call(resource, "back")).observation == chosen
    await call(resource, "view", section="features")
    assert (await call(resource, "choose", option=option, value=value)).observation == chosen
    await call(resource, "back")
    (first, *_) = await resource.admissible_actions()
    assert (await resource.step(first["name"], first["arguments"])).observation == page


async def test_every_admissible_action_is_accepted() -> None:
    resource = await made(page_size=5)
    for _ in range(3):
        for action in await resource.admissible_actions():
            await (await resource.fork()).step(action["name"], action["arguments"])
        expert = await resource.expert_action()
        await resource.step(expert["name"], expert["arguments"])
        assert len(await resource.admissible_actions()) <= 60


async def test_state_key_depends_on_the_page_only() -> None:
    resource = await made()
    start = await resource.state_key()
    assert await (await made(seed=1)).state_key() != start
    assert await (await made(page_size=5)).state_key() != start
    await open_first_product(resource)
    before = await resource.state_key()
    await call(resource, "view", section="features")
    assert await resource.state_key() != before
    await call(resource, "back")
    assert await resource.state_key() == before
    await call(resource, "back")
    await call(resource, "back")
    assert await resource.state_key() == start


async def test_choices_of_a_fork_do_not_change_its_origin() -> None:
    resource = await made()
    page = await open_first_product(resource)
    fork, saved = await resource.fork(), await resource.checkpoint()
    await call(fork, "buy")
    assert page in await resource.get_observation()
    await call(resource, "back")
    await resource.restore(saved)
    assert page in await resource.get_observation()


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("serach", {"query": "x"}, "did you mean 'search'"),
        ("search", {}, "query: missing"),
        ("search", {"query": 3}, "query: must be a string, got 3"),
        ("search", {"query": "rain " * 100}, "500 characters, but the limit is 300"),
        ("search", {"query": "rain", "page": 2}, "unknown argument 'page'"),
        ("open", {"product_id": "B000000000"}, "is not on this page"),
        ("view", {"section": "features"}, "no product is open"),
        ("choose", {"option": "color", "value": "red"}, "no product is open"),
        ("next_page", {}, "no results on this page"),
        ("back", {}, "this is the start page"),
        ("buy", {}, "no product is open"),
    ],
)
async def test_invalid_call_is_rejected_and_changes_nothing(tool, arguments, message) -> None:
    resource = await made()
    before = await resource.state_key()
    with pytest.raises(ToolError, match=message):
        await resource.step(tool, arguments)
    assert await resource.state_key() == before
    assert open_snapshot(await resource.final_state())["actions"] == 0


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("choose", {"option": "colour", "value": "red"}, "option: 'colour'"),
        ("choose", {"option": "color", "value": "plaid"}, "'plaid' is not a color; known:"),
        ("view", {"section": "reviews"}, "section: 'reviews'"),
        ("next_page", {}, "no results on this page"),
    ],
)
async def test_invalid_product_choice_lists_the_options(tool, arguments, message) -> None:
    resource = await made(index=next(i for i in range(99) if "color" in draw_goal(catalog(SIZE, 0), i).options))
    await open_first_product(resource)
    with pytest.raises(ToolError, match=message):
        await resource.step(tool, arguments)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"product": 50}, "did you mean 'products'"),
        ({"products": 5}, "products"),
        ({"page_size": 0}, "page_size"),
    ],
)
async def test_invalid_configuration_is_one_clear_error(config, message) -> None:
    with pytest.raises(ConfigError, match=message):
        await WebshopResource().setup(config)
