"""Test the tree view of a group and the token heat map: positions, values and interaction."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from reward_kit.agent.models import episode_steps
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.models import Message
from reward_kit.report.rendering import bundle
from reward_kit.report.run_page import write_report
from reward_kit.rl_helpers import gigpo_credit
from reward_kit.runs.credit import assign_credit, write_section
from reward_kit.runs.run_folder import read_credit
from reward_kit.task_parts import CreditModel
from tests.browser.conftest import Opened
from tests.browser.window import PHONE, Window
from tests.runs.stored_run import make_run, score

Walk = Sequence[tuple[str, str]]
# The example of docs/concepts/credit.md, with one more who goes away and comes back.
WALKS: dict[str, Walk] = {
    "a": [("hall", "wait"), ("hall", "go"), ("fork", "right")],
    "b": [("hall", "go"), ("fork", "left")],
    "c": [("hall", "go"), ("fork", "right")],
    "d": [("hall", "up"), ("attic", "down"), ("fork", "right")],
}
SCORES = {"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.5}
FIELDS = {"reward": "base_reward", "G": "return_to_go", "A_E": "A_E", "A_S": "A_S", "A": "A"}


def walked(rollout_id: str, walk: Walk, index: int = 0) -> SingleAgentEpisode:
    """Return an episode that observes "at STATE" and acts in each of these states."""
    made = SingleAgentEpisode(rollout_id)
    seen = [f"at {state}" for state, _ in walk] + ["the end"]
    made.messages.append(Message(role="user", content=seen[0]))
    made.add_env_reset(seen[0], {"state_key": walk[0][0]})
    for t, (_, action) in enumerate(walk):
        made.assistant_turns.extend([len(made.messages)])
        made.messages += [Message(role="assistant", content=action), Message(role="user", content=seen[t + 1])]
        info = {"state_key": walk[t + 1][0]} if t + 1 < len(walk) else {}
        is_last = t + 1 == len(walk)
        reward = float(is_last and action == "right")
        made.add_env_step(seen[t + 1], {"type": "text", "content": action}, reward, info, terminated=is_last)
    made.custom_data.update(sample_id="x", group_id="g", rollout_index=index, attempt=0, policy="p", failure=None)
    made.custom_data["stop_reason"] = "environment_terminated"
    return made


def stored(folder: Path, walks: Mapping[str, Walk], scores: Mapping[str, float | None], *, credit: bool = True) -> Path:
    """Write a run of these episodes with credit and its page."""
    episodes = [walked(name, walk, place) for place, (name, walk) in enumerate(walks.items())]
    run = make_run(folder, episodes, [score(name, value) for name, value in scores.items()])
    if credit:
        write_section(run, assign_credit(run, CreditModel(estimator="gigpo", omega=0.5, gamma=0.9)))
    write_report(run)
    return run


def cells_of(window: Window) -> dict[tuple[int, int], dict[str, Any]]:
    """Return by episode and step the position, color, sign and numbers of each cell."""
    found = window.page.evaluate(
        """() => [...document.querySelectorAll(".tree-view .cell")].map((cell) => {
          const box = cell.querySelector(".box");
          const [x, y] = ["x", "y"].map((name) => Number(box.getAttribute(name)));
          const colour = [...box.classList].find((name) => name.startsWith("heat-"));
          return [cell.dataset.place, { x, y, colour, sign: cell.querySelector(".sign").getAttribute("d"),
                   told: cell.getAttribute("aria-label") }];
        })"""
    )
    cells = {}
    for place, cell in found:
        episode, step = map(int, place.split())
        numbers = re.findall(r"(reward|G|A_E|A_S|A) ([+−\d.–]+)", cell["told"])
        cells[episode, step] = cell | {name: number_of(text) for name, text in numbers}
    return cells


def drawn(window: Window, selector: str) -> list[str]:
    """Return the texts of these elements, including drawings."""
    return [str(text) for text in window.page.locator(selector).all_text_contents()]


def number_of(text: str) -> float | None:
    return None if text == "–" else float(text.replace("−", "-"))


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("forked"), WALKS, dict(SCORES))


def opened(window: Opened, run: Path, hash: str = "#/group/g", **options: Any) -> Window:
    shown = window(**options).open(run / "report.html", hash)
    shown.page.wait_for_selector(".tree-view .cell")
    return shown


class TestValues:
    def test_cells_show_the_values_of_the_credit_file(self, window: Opened, forked: Path) -> None:
        cells = cells_of(opened(window, forked))
        lines = {(list(WALKS).index(row["rollout_id"]), row["step"]): row for row in read_credit(forked)}
        assert cells.keys() == lines.keys()
        for place, row in lines.items():
            for name, key in FIELDS.items():
                assert cells[place][name] == pytest.approx(row[key], abs=6e-4), (place, name)

    @pytest.mark.campaign
    def test_cells_agree_with_gigpo_credit(self, window: Opened, forked: Path) -> None:
        cells = cells_of(opened(window, forked))
        batch = [episode_steps(walked(name, walk)) for name, walk in WALKS.items()]
        credit = gigpo_credit(batch, list(SCORES.values()), omega=0.5, gamma=0.9, state_hash="state_key")
        columns = [credit.returns_S, credit.episode_advantages_S, credit.step_advantages_S, credit.advantages_S]
        places = [(episode, step) for episode, steps in enumerate(batch) for step in range(len(steps))]
        for number, place in enumerate(places):
            for name, column in zip(("G", "A_E", "A_S", "A"), columns, strict=True):
                assert cells[place][name] == pytest.approx(column[number], abs=6e-4), (place, name)

    @pytest.mark.campaign
    def test_color_and_sign_match_the_advantage(self, window: Opened, forked: Path) -> None:
        shown = opened(window, forked)
        shown.page.select_option("[data-control=field]", "A")
        for place, cell in cells_of(shown).items():
            level = int(cell["colour"].removeprefix("heat-").replace("m", "-").replace("p", "+"))
            assert level * cell["A"] > 0 or level == cell["A"] == 0, place
            assert ("V" in cell["sign"]) == (cell["A"] > 0), "a plus has an upright line, a minus none"

    @pytest.mark.campaign
    def test_another_advantage_component_can_be_selected(self, window: Opened, forked: Path) -> None:
        shown = opened(window, forked)
        shown.page.select_option("[data-control=field]", "A_E")
        for cell in cells_of(shown).values():
            assert (cell["A_E"] > 0) == cell["colour"].startswith("heat-p")

    @pytest.mark.campaign
    def test_panel_lists_the_actions_of_the_state_with_mean_returns(self, window: Opened, forked: Path) -> None:
        shown = opened(window, forked, "#/episode/a/2")
        shown.page.locator(".tree-panel").wait_for()
        assert "Actions in this state: 4 steps of 4 episodes" in shown.page.inner_text(".tree-panel")
        first, second = drawn(shown, ".tree-panel tbody tr")
        assert re.fullmatch(r"rightthis step3× \+0\.833\S+#1 #3 #4 ", first), "the mean of 1, 1 and 0.5"
        assert re.fullmatch(r"left1× 0\.000\S+#2 ", second)

    @pytest.mark.campaign
    def test_text_summary_lists_the_branch_points(self, window: Opened, forked: Path) -> None:
        shown = opened(window, forked)
        shown.page.click(".tree-words summary")
        words = shown.texts(".tree-words li")
        assert len(words) == 2
        assert "right 3×, mean return +0.833; left 1×, mean return 0.000" in words[0]
        assert "#4: 3 steps, score 0.5" in shown.page.inner_text(".tree-words")


@pytest.mark.campaign
class TestPeers:
    def test_equal_scores_have_no_color_although_discounting_gives_advantages(
        self, window: Opened, tmp_path: Path
    ) -> None:
        run = stored(tmp_path, WALKS, dict.fromkeys(WALKS, 1.0))
        assert any(abs(row["A"]) > 0.1 for row in read_credit(run)), "shorter episodes have a higher discounted return"
        shown = opened(window, run, "#/episode/a/2")
        assert {cell["colour"] for cell in cells_of(shown).values()} <= {"heat-0", "heat-none"}
        assert shown.page.locator("[class*=heat-p], [class*=heat-m], .bar .more, .bar .less").count() == 0
        assert "All episodes of this group have the same score, so no step has credit." in shown.page.inner_text(
            ".tied"
        )
        assert "only because later rewards are discounted" in shown.page.inner_text(".tied")
        shown.page.goto(shown.page.url.split("#")[0] + "#/group/g")
        shown.page.locator("#view > .tied").wait_for()

    def test_different_scores_have_no_such_note(self, window: Opened, forked: Path) -> None:
        shown = opened(window, forked)
        assert shown.page.locator(".tied").count() == 0 and "null" not in shown.page.inner_text("#view")

    def test_ranking_follows_peers_rather_than_the_discount(self, window: Opened, tmp_path: Path) -> None:
        # The state of "good" never changes: only discounting makes its last step better than its first.
        walks = {"good": [("hall", "ask")] * 3 + [("fork", "left")], "bad": [("hall", "wait"), ("fork", "right")]}
        run = stored(tmp_path, walks, {"good": 1.0, "bad": 0.0})
        advantages = [row["A"] for row in read_credit(run) if row["rollout_id"] == "good"][:3]
        assert advantages == sorted(advantages) and advantages[0] < advantages[2]
        shown = opened(window, run, "#/episode/good/0")
        steps = [step["peer"] for step in shown.page.evaluate("(id) => RK.episode(id)", "good")["steps"]]
        # Five steps were taken in the hall or at the fork: 1 - 3/4 in the hall, 1 - 1/2 at the fork.
        assert steps == pytest.approx([0.25, 0.25, 0.25, 0.5])
        colors = [cells_of(shown)[0, step]["colour"] for step in range(4)]
        assert len(set(colors[:3])) == 1 and colors[0] < colors[3], "levels p1 to p4"

    def test_step_without_peers_is_not_colored(self, window: Opened, forked: Path) -> None:
        cells = cells_of(opened(window, forked))
        assert cells[3, 1]["colour"] == "heat-none", "only one episode was in the attic"

    def test_whole_episodes_are_compared_if_no_states_are_shared(self, window: Opened, tmp_path: Path) -> None:
        walks = {name: [(f"{name}{t}", "go") for t in range(2)] for name in "ab"}
        shown = opened(window, stored(tmp_path, walks, {"a": 1.0, "b": 0.0}))
        levels = {place: cell["colour"] for place, cell in cells_of(shown).items()}
        assert levels == {(0, 0): "heat-p4", (0, 1): "heat-p4", (1, 0): "heat-m4", (1, 1): "heat-m4"}

    def test_whole_episodes_are_compared_by_an_estimator_without_states(self, window: Opened, tmp_path: Path) -> None:
        run = stored(tmp_path, WALKS, dict(SCORES), credit=False)
        assign_credit(run, CreditModel(estimator="grpo"))
        write_report(run)
        for cell in cells_of(opened(window, run)).values():
            assert (cell["A"] > 0) == cell["colour"].startswith("heat-p")
            assert (cell["A"] < 0) == cell["colour"].startswith("heat-m")


@pytest.mark.campaign
class TestLayout:
    def test_lanes_start_together_and_meet_at_shared_states(self, window: Opened, forked: Path) -> None:
        shown = opened(window, forked)
        cells = cells_of(shown)
        assert len({cells[episode, 0]["x"] for episode in range(4)}) == 1, "all begin in the hall"
        fork = {cells[place]["x"] for place in [(0, 2), (1, 1), (2, 1), (3, 2)]}
        assert len(fork) == 1, "all meet at the fork, after two steps or three"
        assert cells[0, 1]["x"] == cells[3, 1]["x"] and abs(cells[0, 1]["y"] - cells[3, 1]["y"]) > 20
        assert shown.page.locator(".station").count() == 2

    def test_actions_are_labeled_where_lanes_branch(self, window: Opened, forked: Path) -> None:
        labels = drawn(opened(window, forked), ".tree-view .label")
        assert set(labels) == {"wait", "go", "up", "left", "right"}, "and down, in the attic, is done by one alone"

    def test_score_is_shown_at_the_end_of_each_lane(self, window: Opened, forked: Path) -> None:
        ends = drawn(opened(window, forked), ".tree-view .end")
        assert sorted(ends) == ["0#2", "0.5#4", "1#1", "1#3"]

    def test_lanes_never_overlap_and_only_go_forward(self, window: Opened, forked: Path) -> None:
        shown = opened(window, forked)
        rng = random.Random(0)
        for _ in range(40):
            group = drawn_group(rng)
            boxes = shown.page.evaluate(PLACED, group)
            for steps in boxes:
                assert all(one["x"] < other["x"] for one, other in pairwise(steps))
            flat = [box for steps in boxes for box in steps]
            for i, one in enumerate(flat):
                for other in flat[i + 1 :]:
                    assert one["x"] != other["x"] or abs(one["y"] - other["y"]) >= 15.9, group
            check_frames(boxes, group)

    def test_large_group_is_drawn_only_in_the_visible_part(self, window: Opened, tmp_path: Path) -> None:
        rng = random.Random(1)
        walks = {f"e{place:02d}": random_walk(rng, 80) for place in range(30)}
        shown = opened(window, stored(tmp_path, walks, {name: rng.random() for name in walks}))
        assert "24 of 30 episodes" in shown.page.inner_text(".tree-head")
        assert shown.page.locator(".tree-view .cell").count() < 24 * 40
        shown.page.evaluate("() => { document.querySelector('.tree-view').scrollLeft = 1e6; }")
        shown.page.locator(".tree-view .end").first.wait_for()
        shown.page.click("[data-control=all]")
        assert "all 30 episodes" in shown.page.inner_text(".tree-head")


PLACED = """(group) => {
  const shown = group.episodes.map((_, place) => place);
  const places = new RK.TreePlaces(group, shown, RK.actionNames(group));
  return shown.map((lane) => group.episodes[lane].steps.map((_, step) => (
    { ...places.cell(lane, step), node: places.nodeOf[lane][step].id })));
}"""


def random_walk(rng: random.Random, most: int) -> list[tuple[str, str]]:
    states = "abcdefghijkl"
    return [("start", "go"), *((rng.choice(states), rng.choice("lr")) for _ in range(rng.randint(0, most)))]


def drawn_group(rng: random.Random) -> dict[str, Any]:
    walks = [random_walk(rng, 12) for _ in range(rng.randint(1, 9))]
    steps = [[{"key": key, "action": action} for key, action in walk] for walk in walks]
    return {"episodes": [{"score": rng.choice([None, 0.0, 1.0]), "steps": one} for one in steps]}


def check_frames(boxes: list[list[dict[str, float]]], group: dict[str, Any]) -> None:
    """Check that each frame is one state, and that episodes with equal starts share frames."""
    keys: dict[float, str] = {}
    for steps, episode in zip(boxes, group["episodes"], strict=True):
        for box, step in zip(steps, episode["steps"], strict=True):
            assert keys.setdefault(box["node"], step["key"]) == step["key"]
    for one, first in zip(boxes, group["episodes"], strict=True):
        for other, second in zip(boxes, group["episodes"], strict=True):
            for here, there, mine, theirs in zip(one, other, first["steps"], second["steps"], strict=False):
                if mine["key"] != theirs["key"]:
                    break
                assert here["node"] == there["node"]


@pytest.mark.campaign
class TestInteraction:
    def test_click_opens_the_step(self, window: Opened, forked: Path) -> None:
        shown = opened(window, forked)
        shown.page.click('[data-place="3 1"]')
        shown.page.wait_for_url("**/report.html#/episode/d/1")
        shown.page.locator(".ring").wait_for()
        assert "Episode 4, step 1: down" in shown.page.inner_text(".tree-panel")

    def test_default_selection_is_the_widest_branch_point(self, window: Opened, forked: Path) -> None:
        shown = opened(window, forked)
        begin = "async () => { RK.tree(document.querySelector('.tree').parentElement, await RK.group('g')); }"
        shown.page.evaluate(begin)
        assert "Episode 1, step 2: right" in shown.page.inner_text(".tree-panel")

    def test_arrow_keys_move_along_and_across_lanes_and_enter_opens(self, window: Opened, forked: Path) -> None:
        shown = opened(window, forked, "#/episode/a/0")
        place = "document.activeElement.dataset.place"
        shown.page.locator(".tree-view [tabindex='0']").focus()
        assert shown.page.evaluate(place) == "0 0"
        visited = []
        for key in ("ArrowRight", "ArrowRight", "Home", "End", "ArrowLeft"):
            shown.page.keyboard.press(key)
            visited.append(shown.page.evaluate(place))
        assert visited == ["0 1", "0 2", "0 0", "0 2", "0 1"]
        shown.page.keyboard.press("Home")
        lanes = {shown.page.evaluate(place).split()[0]}
        for key in ["ArrowUp"] * 4 + ["ArrowDown"] * 4:
            shown.page.keyboard.press(key)
            lanes.add(shown.page.evaluate(place).split()[0])
        assert lanes == {"0", "1", "2", "3"}
        at = shown.page.evaluate(place).split()
        shown.page.keyboard.press("Enter")
        shown.page.wait_for_url(f"**/report.html#/episode/{'abcd'[int(at[0])]}/{at[1]}")

    def test_hover_frames_all_steps_of_the_state(self, window: Opened, forked: Path) -> None:
        shown = opened(window, forked)
        shown.page.hover('[data-place="0 2"]')
        assert shown.page.locator(".peer").count() == 1, "all four stand in one frame"
        shown.page.hover('[data-place="3 1"]')
        assert shown.page.locator(".peer").count() == 0, "no other episode visited the attic"
        assert "nothing to compare" in shown.page.inner_text(".tree-panel")

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("size", [PHONE, (1280, 800)])
    def test_tree_is_accessible_in_every_size_and_scheme(
        self, window: Opened, forked: Path, size: tuple[int, int], scheme: str
    ) -> None:
        shown = opened(window, forked, "#/episode/a/2", size=size, color_scheme=scheme)
        assert shown.sticking_out() == []
        assert shown.pale() == []
        assert shown.unreached() == []

    def test_untrusted_texts_are_escaped(self, window: Opened, tmp_path: Path) -> None:
        evil = "</script><img src=x onerror=alert(1)>\u202e\x1b[31m"
        walks = {"a": [(evil, evil), ("x", "y")], "b": [(evil, "go")]}
        shown = opened(window, stored(tmp_path, walks, {"a": 1.0, "b": 0.0}))
        assert shown.page.locator(".tree img").count() == 0
        told = shown.page.inner_text(".tree")
        assert "<img src=x onerror=alert(1)>" in told and "\\u202e\\x1b" in told and "\u202e" not in told

    def test_run_without_credit_shows_returns_and_unscored_episodes(self, window: Opened, tmp_path: Path) -> None:
        run = stored(tmp_path, WALKS, {**SCORES, "b": None}, credit=False)
        shown = opened(window, run)
        cells = cells_of(shown)
        assert all(cell["A"] is None for cell in cells.values())
        assert shown.page.input_value("[data-control=field]") == "peer"
        assert "unscored#2" in drawn(shown, ".tree-view .end")
        assert [cells[0, step]["G"] for step in range(3)] == [1.0, 1.0, 1.0], "the environment's, not discounted"


@pytest.mark.campaign
class TestTokens:
    @pytest.fixture
    def sampled(self, tmp_path: Path) -> Path:
        """Add tokens to the first episode of the run, as in a training run's kept episodes."""
        run = stored(tmp_path, WALKS, dict(SCORES))
        lines = (run / "episodes.jsonl").read_text().splitlines()
        record = json.loads(lines[0])
        tokens = walked("a", WALKS["a"]).tokens
        tokens.add_turn(0, [1, 2], [3, 4], [-0.05, -3.5], 0)
        tokens.add_turn(1, [1, 2, 3, 4, *range(100, 190)], [5], [-0.4], 0)
        record["tokens"] = tokens.get_state()
        record["training"] = {"advantages": [0.5, -1.0], "ratios": [[1.0, 1.25], [0.5]]}
        (run / "episodes.jsonl").write_text("\n".join([json.dumps(record, separators=(",", ":")), *lines[1:]]) + "\n")
        write_report(run)
        return run

    def shown(self, window: Opened, run: Path, step: int) -> Window:
        shown = window().open(run / "report.html", f"#/episode/a/{step}")
        shown.page.locator(".tree-panel").wait_for()
        return shown

    def tokens(self, window: Window) -> list[tuple[str, str, str]]:
        """Return the text, number and color of each token."""
        found = window.page.evaluate(
            """() => [...document.querySelectorAll(".token")].map((one) =>
              [one.children[0].textContent, one.children[1].textContent, one.className.replace("token ", "")])"""
        )
        return [tuple(one) for one in found]

    def test_sampled_tokens_have_logprobs_and_prompt_tokens_have_none(self, window: Opened, sampled: Path) -> None:
        tokens = self.tokens(self.shown(window, sampled, 0))
        assert tokens == [
            ("[1]", "", "seen"),
            ("[2]", "", "seen"),
            ("[3]", "−0.05", "rare-0"),
            ("[4]", "−3.50", "rare-4"),
        ]

    def test_mask_advantage_and_ratio_can_be_selected(self, window: Opened, sampled: Path) -> None:
        shown = self.shown(window, sampled, 0)
        found = {}
        for kind in ("mask", "advantage", "ratio"):
            shown.page.check(f"[name=token-kind][value={kind}]")
            found[kind] = self.tokens(shown)
        assert [token[1] for token in found["mask"]] == ["0", "0", "1", "1"]
        assert [token[1:] for token in found["advantage"][2:]] == [("+0.50", "heat-p2"), ("+0.50", "heat-p2")]
        assert [token[1:] for token in found["ratio"][2:]] == [("×1.000", "heat-0"), ("×1.250", "heat-p2")]
        titles = shown.page.locator(".token").last.get_attribute("title")
        assert titles is not None and "importance ratio ×1.250" in titles and "probability 0.0302" in titles

    def test_long_context_shows_its_end_and_expands_on_click(self, window: Opened, sampled: Path) -> None:
        shown = self.shown(window, sampled, 1)
        assert len(self.tokens(shown)) == 61
        shown.page.click(".tokens button")
        assert len(self.tokens(shown)) == 91

    def test_step_without_tokens_shows_a_note(self, window: Opened, sampled: Path) -> None:
        shown = self.shown(window, sampled, 2)
        assert "No tokens were recorded for this step." in shown.page.inner_text(".step.current")

    def test_page_includes_the_scripts(self) -> None:
        assert "RK.tokens = " in bundle(("tokens.js",)) and "RK.tree = " in bundle(("tree.js",))
