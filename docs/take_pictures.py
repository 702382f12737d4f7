"""Take the screenshots of the docs from real runs: `python docs/take_pictures.py [FOLDER]`.

The runs are of the examples with their seeds and take about three minutes on one core. With FOLDER they are kept and
reused. Requires Chromium (`apt install chromium`), Playwright and Pillow, which `make pictures` installs. Check the
result for overlapping or clipped elements.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from PIL import Image
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
PICTURES = HERE / "pictures"
HOUSEHOLD, LAKE = EXAMPLES / "alfworld_household", EXAMPLES / "frozen_lake_training"
CREDIT = ("-O", "step_rewards=environment", "-O", "gamma=0.95")
CHORE = ("run", str(HOUSEHOLD / "agent.yaml"), "-n", "8", "--limit", "40", "-T", "max_episode_steps=9")
DIVERGENCE = ("held-out-015", 1, 2)  # sample, rollout index, and the step at which its group diverges
LOST = "chores-2a59cbd5736e-4"  # the episode that guides/why.md examines
DESKTOP, TALL, PHONE = (1280, 860), (1280, 2600), (390, 844)
MAX_BYTES = 150_000
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


class PictureStep(NamedTuple):
    """A step to show, at which the episodes of a group diverge."""

    rollout_id: str
    group_id: str
    step: int


def reward_kit(*arguments: str) -> None:
    """Run the command line."""
    # The examples in this clone are trusted.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "REWARD_KIT_TRUST": "1"}
    subprocess.run([sys.executable, "-m", "reward_kit.cli.main", *arguments], check=True, env=environment)


def run_in(folder: Path, *arguments: str) -> Path:
    """Return the run in a folder; create it with these arguments if absent."""
    if not folder.exists():
        reward_kit(*arguments, "--log-dir", str(folder), "--display", "none")
        if arguments[0] == "run":
            reward_kit("credit", str(next(folder.iterdir())), *(() if folder.name == "chore" else CREDIT))
    (run,) = folder.iterdir()
    return run


def make_runs(folder: Path) -> dict[str, Path]:
    """Return the runs by name: household before and after training, short chores, lakes, and a training run."""
    household = ("run", str(HOUSEHOLD / "agent.yaml"), "-n", "8", "--limit", "16")
    return {
        "before": run_in(folder / "before", *household, "-T", f"policy.model={HOUSEHOLD / 'warm_start'}"),
        "chore": run_in(folder / "chore", *CHORE),
        "after": run_in(folder / "after", *household),
        "lake": run_in(folder / "lake", "run", str(LAKE / "agent.yaml"), "-n", "8", "--limit", "24"),
        "training": run_in(folder / "training", "train", str(LAKE / "train.yaml")),
        "why": examined_run(folder / "why"),
    }


def examined_run(folder: Path) -> Path:
    """Return the run of guides/why.md, whose files are in the page; create it if absent."""
    if is_new := not folder.exists():
        folder.mkdir()
        page = (HERE / "guides" / "why.md").read_text(encoding="utf-8")
        for name, text in re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```', page, re.DOTALL | re.MULTILINE):
            (folder / name).write_text(text, encoding="utf-8")
        reward_kit("run", str(folder / "task.yaml"), "--log-dir", str(folder / "runs"), "--display", "none")
    (run,) = (folder / "runs").iterdir()
    if is_new:
        reward_kit("why", str(run), LOST)
    return run


def best_step(run: Path) -> PictureStep:
    """Return the step with the highest step advantage in a best episode of the most diverse group."""
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").open(encoding="utf-8")]
    scores = {line["rollout_id"]: line["score"] for line in map(json.loads, (run / "scores.jsonl").open())}
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for episode in episodes:
        groups[episode["group_id"]].append(episode)
    steps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in map(json.loads, (run / "credit.jsonl").open(encoding="utf-8")):
        steps[line["rollout_id"]].append(line)

    def diversity(group: list[dict[str, Any]]) -> tuple[float, int, str]:
        mean = sum(scores[episode["rollout_id"]] or 0.0 for episode in group) / len(group)
        return (mean * (1 - mean), -sum(episode["num_steps"] for episode in group), group[0]["group_id"])

    group = max(groups.values(), key=diversity)
    highest = max(scores[episode["rollout_id"]] or 0.0 for episode in group)
    names = [episode["rollout_id"] for episode in group if scores[episode["rollout_id"]] == highest]
    best = max((line for name in names for line in steps[name]), key=lambda line: line["A_S"] or 0.0)
    return PictureStep(best["rollout_id"], group[0]["group_id"], best["step"])


def diverging_step(run: Path) -> PictureStep:
    """Return the step of the README, at which half of a group finds the object and the other half does not."""
    sample, episode, step = DIVERGENCE
    lines = map(json.loads, (run / "episodes.jsonl").open(encoding="utf-8"))
    record = next(line for line in lines if line["sample_id"] == sample and line["rollout_index"] == episode)
    return PictureStep(record["rollout_id"], record["group_id"], step)


@contextmanager
def running_viewer(folder: Path) -> Iterator[str]:
    """Start a viewer of a folder and yield its address."""
    command = [sys.executable, "-m", "reward_kit.cli.main", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def take_picture(page: Page, name: str, *parts: str) -> None:
    """Save the window, or some elements, as `pictures/NAME.png` with at most 256 colors."""
    page.wait_for_timeout(400)
    clip = _around(page, parts) if parts else None
    data = page.screenshot(clip=clip, full_page=clip is not None, animations="disabled")
    picture = Image.open(io.BytesIO(data)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    target = PICTURES / f"{name}.png"
    picture.save(target, optimize=True)
    size = target.stat().st_size
    sys.stdout.write(f"{target}  {picture.width} x {picture.height}  {size:,} bytes\n")
    if size > MAX_BYTES:
        raise SystemExit(f"{target} has more than {MAX_BYTES:,} bytes; show less of the page")


def _around(page: Page, parts: tuple[str, ...]) -> Any:
    """Return the bounding box of some elements with a margin, as wide as the window."""
    page.evaluate("() => window.scrollTo(0, 0)")
    boxes = [box for part in parts if (box := page.locator(part).last.bounding_box())]
    top = min(box["y"] for box in boxes) - 10
    bottom = max(box["y"] + box["height"] for box in boxes) + 10
    return {"x": 0, "y": top, "width": DESKTOP[0], "height": bottom - top}


def open_page(browser: Browser, url: str, size: tuple[int, int] = DESKTOP, scale: float = 1) -> Page:
    """Open a page in a window of this size."""
    viewport: Any = {"width": size[0], "height": size[1]}
    page = browser.new_page(viewport=viewport, device_scale_factor=scale, color_scheme="light")
    page.goto(url)
    page.locator("li.step[aria-current=step]" if "/episode/" in url else "h1, h2").first.wait_for()
    return page


def take_all(browser: Browser, runs: dict[str, Path], folder: Path) -> None:
    """Take all pictures."""
    reward_kit("compare", str(runs["before"]), str(runs["after"]), "-o", str(folder / "compare.html"))
    for run in runs.values():
        reward_kit("view", str(run), "-o", str(run / "report.html"))
    pages = {name: (run / "report.html").as_uri() for name, run in runs.items()}
    take_picture(open_page(browser, pages["before"]), "report")
    take_picture(open_page(browser, pages["before"], PHONE), "report-phone")
    lake, household = (best_step(runs[name]) for name in ("lake", "before"))
    at_step = open_page(browser, pages["chore"] + _hash_of(diverging_step(runs["chore"])), TALL, scale=2)
    at_step.get_by_label("full width").check()
    take_picture(at_step, "credit", ".group-part > summary", ".group-part .tree")
    at_step = open_page(browser, pages["lake"] + _hash_of(lake), TALL)
    take_picture(at_step, "tree", ".group-part")
    take_picture(at_step, "tokens", ".step-more h4", ".step-more > :last-child")
    at_step = open_page(browser, pages["before"] + _hash_of(household), TALL)
    take_picture(at_step, "step", "li.step[aria-current=step]")
    take_picture(open_page(browser, pages["before"] + _hash_of(household), PHONE), "step-phone")
    take_picture(open_page(browser, pages["before"] + f"#/group/{quote(household.group_id, safe='')}"), "group")
    take_picture(open_page(browser, pages["why"] + f"#/episode/{LOST}/6"), "why", ".success")
    take_picture(open_page(browser, pages["training"], (1280, 1000)), "training")
    take_picture(open_page(browser, (folder / "compare.html").as_uri()), "compare")
    with running_viewer(folder / "runs") as address:
        take_picture(open_page(browser, address, (1280, 620)), "viewer")


def _hash_of(step: PictureStep) -> str:
    return f"#/episode/{quote(step.rollout_id, safe='')}/{step.step}"


def gather(runs: dict[str, Path], folder: Path) -> None:
    """Copy the runs to one folder for the viewer."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for run in (runs[name] for name in ("before", "after", "lake", "training")):
        shutil.copytree(run, folder / run.name, ignore=shutil.ignore_patterns("checkpoints", "model", "states"))


def main() -> None:
    """Create missing runs and take the pictures."""
    chromium = next((path for name in NAMES if (path := shutil.which(name))), None)
    if chromium is None:
        raise SystemExit("Chromium not found; apt install chromium")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        runs = make_runs(folder)
        gather(runs, folder / "runs")
        browser = playwright.chromium.launch(executable_path=chromium)
        take_all(browser, runs, folder)
        browser.close()


if __name__ == "__main__":
    main()
