"""Figures of processes: from a task to a record, from records to a policy, and the choice of an estimator."""

from __future__ import annotations

import ast
from pathlib import Path

from figures.drawing import Sheet
from figures.pages import names_until

HOUSE = Path(__file__).parents[2] / "tests" / "test_house.py"

WAY = (
    ("task", "task.yaml and its samples", "box"),
    ("episode", "episodes.jsonl", "blue"),
    ("score", "scores.jsonl", "green"),
    ("advantage", "credit.jsonl", "gold"),
    ("policy", "checkpoints/, model/", "violet"),
)
BETWEEN = (
    ("agent/", "a policy acts in an environment: environments/, providers/"),
    ("reward_agent/", "rewards/ or your own, in the sandbox/"),
    ("rl_processing, rl_helpers", "step rewards onto steps; estimators of credit/"),
    ("tokens/, then rl/", "rows of tokens; losses; the PPO step"),
)
LAYER_NOTES = (
    "errors, small helpers",
    "data models, loading, limits on input",
    "child processes, YAML",
    "reward decorator, endpoints, episodes, resources",
    "rollouts; confined execution",
    "scoring, credit, tokens",
    "runs on disk and what is read from them",
    "torch: losses, PPO, training",
    "other tools; the command line",
)


def draw_architecture(path: Path) -> None:
    """Draw tasks, episodes, scores, advantages and policy, with their files and units."""
    sheet = Sheet(
        "From a task to a better policy",
        "Tasks become episodes in agent, episodes become scores in reward_agent, scores become advantages in "
        "rl_processing and rl_helpers, advantages become a better policy in rl. The policy then acts again.",
    )
    for place, (name, kept, kind) in enumerate(WAY):
        y = 16 + place * 96
        sheet.rect(54, y, 368, 40, kind)
        sheet.text(70, y + 26, name, "bold")
        sheet.text(408, y + 26, kept, "code", "end")
        if place < len(BETWEEN):
            unit, text = BETWEEN[place]
            sheet.arrow((84, y + 40), (84, y + 96))
            sheet.text(98, y + 64, unit, "code bold")
            sheet.text(98, y + 82, text, "small soft")
    bottom = 16 + 4 * 96
    sheet.arrow((54, bottom + 20), (26, bottom + 20), (26, 92), (54 + 30, 92), kind="line dash")
    sheet.text(98, bottom + 62, "publish(version): the policy acts with its new weights", "small soft")
    sheet.path([(26, bottom + 20), (26, bottom + 58), (92, bottom + 58)], "line dash")
    sheet.write(path, bottom + 76)


def layers() -> list[list[str]]:
    """Return the layers from the test that guards them, lowest first."""
    tree = ast.parse(HOUSE.read_text(encoding="utf-8"))
    found = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "LAYERS" for t in node.targets)
    )
    rows: list[list[str]] = ast.literal_eval(found)
    return rows


def draw_layers(path: Path) -> None:
    """Draw the layers, the lowest at the bottom."""
    rows = layers()
    sheet = Sheet(
        "Who may import whom",
        "Eight rows of units. A unit imports from rows below it, and from units to its left in its own row: "
        + "; ".join(", ".join(row) for row in rows),
    )
    y = 14.0
    for row, text in zip(reversed(rows), reversed(LAYER_NOTES), strict=True):
        lines = _wrapped(row, 46)
        height = 32 + 17 * len(lines)
        sheet.rect(40, y, 386, height, "box")
        sheet.text(52, y + 18, text, "small soft")
        sheet.lines(52, y + 37, lines, "code")
        y += height + 8
    sheet.arrow((24, 20), (24, y - 12))
    turned = f"translate(16 {y / 2:.0f}) rotate(-90)"
    sheet.parts.append(f'<text class="small soft" text-anchor="middle" transform="{turned}">imports</text>')
    sheet.write(path, y + 6)


def _wrapped(units: list[str], most: int) -> list[str]:
    lines = [units[0]]
    for unit in units[1:]:
        if len(lines[-1]) + len(unit) + 2 > most:
            lines[-1] += ","
            lines.append(unit)
        else:
            lines[-1] += f", {unit}"
    return lines


def draw_episode(path: Path) -> None:
    """Draw the way from a task to the record of an episode, its tracks, scores and credit."""
    sheet = Sheet(
        "What an episode is",
        "A task, a sample of it and a policy give an episode: an observation, then action after action with a reward "
        "and the next observation each, until it stops for a reason. Messages, tokens and steps are views of that "
        "record; the score and the credit are joined to it by rollout_id.",
    )
    for x, words in ((14, "task"), (154, "sample"), (294, "policy")):
        sheet.labelled((x, 14, 132, 30), words, "box", "bold")
    sheet.arrow((220, 44), (220, 74))
    sheet.rect(14, 74, 412, 244, "frame", 8)
    sheet.text(26, 96, "episode", "bold")
    sheet.text(414, 96, "rollout_id, group_id", "code", "end")
    _tracks(sheet)
    sheet.text(26, 250, "views of the same record:", "small soft")
    for x, words in ((26, "messages"), (158, "tokens"), (290, "steps")):
        sheet.labelled((x, 260, 124, 46), f"{words}\n{VIEWS[words]}", "violet", "small")
    sheet.path([(220, 318), (220, 352)], "line dash")
    sheet.text(230, 340, "joined by rollout_id", "small soft")
    sheet.labelled((14, 352, 198, 46), "score\nof a reward function", "green")
    sheet.labelled((228, 352, 198, 46), "credit\nof an estimator", "gold")
    sheet.write(path, 412)


VIEWS = {"messages": "the chat, once", "tokens": "as sampled", "steps": "StepData"}


def _tracks(sheet: Sheet) -> None:
    """Draw T + 1 observations and infos, T actions and rewards, and the end."""
    for t in range(3):
        x = 26 + t * 128
        sheet.labelled((x, 112, 58, 44), f"obs. {t}\ninfo {t}", "box", "small")
        if t < 2:
            sheet.arrow((x + 29, 156), (x + 29, 192), (x + 64, 192))
            sheet.labelled((x + 64, 170, 56, 44), f"action\n{t}", "blue", "small")
            sheet.arrow((x + 92, 170), (x + 92, 134), (x + 128, 134))
            sheet.text(x + 93, 127, f"reward {t}", "small", "middle")
    sheet.text(230, 63, "reset: one start for a whole group", "small soft")
    sheet.arrow((311, 156), (311, 178))
    sheet.labelled((282, 178, 132, 36), "stop_reason", "orange", "code")


QUESTIONS = (
    ("Several actions\nin an episode?", "no", "rloo, grpo", "whole answers"),
    ("Do episodes of a group meet\nin the same states?", "yes", "gigpo", "within a state"),
    ("Does the policy\nhave a critic?", "yes", "gae", "against its forecast"),
    ("Do turns correspond, with a\nreward for each?", "yes", "turn_level_grpo", "turn by turn"),
)


def draw_choosing(path: Path) -> None:
    """Draw the decision tree of four questions to an estimator."""
    sheet = Sheet(
        "Which estimator",
        "Without several actions in an episode rloo or grpo; where episodes meet in the same states gigpo; with a "
        "critic gae; where turns correspond and have rewards turn_level_grpo; else rloo or grpo over whole episodes.",
    )
    for place, (question, way_out, names, why) in enumerate(QUESTIONS):
        y = 14 + place * 84
        sheet.labelled((14, y, 218, 52), question, "box")
        sheet.arrow((232, y + 26), (282, y + 26))
        sheet.text(256, y + 20, way_out, "small soft", "middle")
        sheet.rect(282, y, 144, 52, "green")
        sheet.text(354, y + 22, names, "code bold", "middle")
        sheet.lines(354, y + 40, [why], "tiny soft", "middle")
        sheet.arrow((123, y + 52), (123, y + 84))
        sheet.text(133, y + 72, "yes" if way_out == "no" else "no", "small soft")
    y = 14 + len(QUESTIONS) * 84
    sheet.labelled((14, y, 218, 52), "rloo, grpo\nwhole episodes", "green")
    sheet.write(path, y + 66)


def draw_lookback(path: Path) -> None:
    """Draw the page's chunks with their steps, lookback steps and indices."""
    names = names_until("episodes.md", "second")
    whole, chunk = names["first"], names["second"]
    back = chunk.actions.lookback
    sheet = Sheet(
        "A chunk and its successor",
        f"An episode of {len(whole)} steps. Its successor begins where it ended; its last {back} steps stand before "
        "index 0 of the successor, as lookback.",
    )
    sheet.text(14, 30, "first", "bold")
    sheet.text(14, 134, "second", "bold")
    for t, action in enumerate(whole.get_actions()):
        _step(sheet, 84 + 68 * t, 14, f"action {action}", "blue", str(t))
    for behind in range(-back, 0):
        action = chunk.get_actions(behind, neg_index_as_lookback=True)
        x = 84 + 68 * (chunk.t_started + behind)
        _step(sheet, x, 118, f"action {action}", "box", f"−{-behind}")
    for ahead in range(2):
        _step(sheet, 84 + 68 * (chunk.t_started + ahead), 118, "to come", "grid", str(ahead))
    cut = 84 + 68 * chunk.t_started - 4
    sheet.path([(cut, 10), (cut, 176)], "line dash")
    sheet.text(cut + 8, 36, "cut(2)", "code")
    sheet.text(cut - 8, 194, "lookback: seen, not counted", "small soft", "end")
    sheet.text(cut + 8, 194, "the chunk", "small soft")
    sheet.text(14, 68, "index", "small soft")
    sheet.text(14, 172, "index", "small soft")
    sheet.write(path, 208)


def _step(sheet: Sheet, x: float, y: float, words: str, kind: str, index: str) -> None:
    sheet.labelled((x, y, 60, 36), words, kind, "small")
    sheet.text(x + 30, y + 54, index, "soft", "middle")
