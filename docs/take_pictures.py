"""Takes the pictures of these docs from real runs: `python docs/take_pictures.py [FOLDER OF THE RUNS]`.

The runs are those of the examples, with their seeds, about three minutes of one core; in a folder that is named they
are kept, and not made again. Needs Chromium (`apt install chromium`), playwright and Pillow (`make docs` and the
development tools bring them). Look at what it made: that nothing overlaps or is cut off is for eyes to say.
"""

from __future__ import annotations

import io
import json
import os
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
PARTING = ("held-out-015", 1, 2)  # a sample, an episode of its group, and the step in which the group parts
DESK, TALL, PHONE = (1280, 860), (1280, 2600), (390, 844)
MOST_BYTES = 150_000
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


class Chosen(NamedTuple):
    """A step worth a picture: where episodes of one group part, and one goes well that others do not."""

    rollout_id: str
    group_id: str
    step: int


def reward_kit(*arguments: str) -> None:
    """Call the command line."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    subprocess.run([sys.executable, "-m", "reward_kit.cli.main", *arguments], check=True, env=environment)


def run_in(folder: Path, *arguments: str) -> Path:
    """The run in a folder, made by these arguments where none is there."""
    if not folder.exists():
        reward_kit(*arguments, "--log-dir", str(folder), "--display", "none")
        if arguments[0] == "run":
            reward_kit("credit", str(next(folder.iterdir())), *(() if folder.name == "chore" else CREDIT))
    (found,) = folder.iterdir()
    return found


def make_runs(folder: Path) -> dict[str, Path]:
    """The runs by name: a model before and after it was trained, one in a hurry, one on lakes, and a training."""
    household = ("run", str(HOUSEHOLD / "agent.yaml"), "-n", "8", "--limit", "16")
    return {
        "before": run_in(folder / "before", *household, "-T", f"policy.model={HOUSEHOLD / 'warm_start'}"),
        "chore": run_in(folder / "chore", *CHORE),
        "after": run_in(folder / "after", *household),
        "lake": run_in(folder / "lake", "run", str(LAKE / "agent.yaml"), "-n", "8", "--limit", "24"),
        "training": run_in(folder / "training", "train", str(LAKE / "train.yaml")),
    }


def telling_step(run: Path) -> Chosen:
    """Of the group whose scores differ most, the step of an episode that went well which was best among its peers."""
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").open(encoding="utf-8")]
    scores = {line["rollout_id"]: line["score"] for line in map(json.loads, (run / "scores.jsonl").open())}
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for episode in episodes:
        groups[episode["group_id"]].append(episode)
    steps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in map(json.loads, (run / "credit.jsonl").open(encoding="utf-8")):
        steps[line["rollout_id"]].append(line)

    def told(group: list[dict[str, Any]]) -> tuple[float, int, str]:
        won = sum(scores[one["rollout_id"]] or 0.0 for one in group) / len(group)
        return (won * (1 - won), -sum(one["num_steps"] for one in group), group[0]["group_id"])

    group = max(groups.values(), key=told)
    most = max(scores[one["rollout_id"]] or 0.0 for one in group)
    good = [one["rollout_id"] for one in group if scores[one["rollout_id"]] == most]
    best = max((line for name in good for line in steps[name]), key=lambda line: line["A_S"] or 0.0)
    return Chosen(best["rollout_id"], group[0]["group_id"], best["step"])


def parting_step(run: Path) -> Chosen:
    """The step at which half of a group finds what the other half goes past: what the README shows."""
    sample, episode, step = PARTING
    lines = map(json.loads, (run / "episodes.jsonl").open(encoding="utf-8"))
    found = next(line for line in lines if line["sample_id"] == sample and line["rollout_index"] == episode)
    return Chosen(found["rollout_id"], found["group_id"], step)


@contextmanager
def viewed(folder: Path) -> Iterator[str]:
    """The address of a viewer of a folder."""
    command = [sys.executable, "-m", "reward_kit.cli.main", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def take(page: Page, name: str, *parts: str) -> None:
    """What the window shows, in at most 256 colours, as `pictures/NAME.png`; or some parts of it."""
    page.wait_for_timeout(400)
    clip = _around(page, parts) if parts else None
    data = page.screenshot(clip=clip, full_page=clip is not None, animations="disabled")
    picture = Image.open(io.BytesIO(data)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    target = PICTURES / f"{name}.png"
    picture.save(target, optimize=True)
    size = target.stat().st_size
    sys.stdout.write(f"{target}  {picture.width} x {picture.height}  {size:,} bytes\n")
    if size > MOST_BYTES:
        raise SystemExit(f"{target} has more than {MOST_BYTES:,} bytes: show less of the page")


def _around(page: Page, parts: tuple[str, ...]) -> Any:
    """The smallest box around some elements, a little larger and as wide as the window, of a page at its top."""
    page.evaluate("() => window.scrollTo(0, 0)")
    boxes = [box for part in parts if (box := page.locator(part).last.bounding_box())]
    top = min(box["y"] for box in boxes) - 10
    bottom = max(box["y"] + box["height"] for box in boxes) + 10
    return {"x": 0, "y": top, "width": DESK[0], "height": bottom - top}


def opened(browser: Browser, url: str, size: tuple[int, int] = DESK, scale: float = 1) -> Page:
    """A page in a window of this size."""
    viewport: Any = {"width": size[0], "height": size[1]}
    page = browser.new_page(viewport=viewport, device_scale_factor=scale, color_scheme="light")
    page.goto(url)
    page.locator("li.step[aria-current=step]" if "/episode/" in url else "h1, h2").first.wait_for()
    return page


def take_all(browser: Browser, runs: dict[str, Path], folder: Path) -> None:
    """All pictures, each named after what it shows."""
    reward_kit("compare", str(runs["before"]), str(runs["after"]), "-o", str(folder / "compare.html"))
    for run in runs.values():
        reward_kit("report", str(run))
    page = {name: (run / "report.html").as_uri() for name, run in runs.items()}
    take(opened(browser, page["before"]), "report")
    take(opened(browser, page["before"], PHONE), "report-phone")
    lake, household = (telling_step(runs[name]) for name in ("lake", "before"))
    at_step = opened(browser, page["chore"] + _hash_of(parting_step(runs["chore"])), TALL, scale=2)
    at_step.get_by_label("full width").check()
    take(at_step, "credit", ".group-part > summary", ".group-part .tree")
    at_step = opened(browser, page["lake"] + _hash_of(lake), TALL)
    take(at_step, "tree", ".group-part")
    take(at_step, "tokens", ".step-more h4", ".step-more > :last-child")
    at_step = opened(browser, page["before"] + _hash_of(household), TALL)
    take(at_step, "step", "li.step[aria-current=step]")
    take(opened(browser, page["before"] + _hash_of(household), PHONE), "step-phone")
    take(opened(browser, page["before"] + f"#/group/{quote(household.group_id, safe='')}"), "group")
    take(opened(browser, page["training"], (1280, 1000)), "training")
    take(opened(browser, (folder / "compare.html").as_uri()), "compare")
    with viewed(folder / "runs") as address:
        take(opened(browser, address, (1280, 620)), "viewer")


def _hash_of(step: Chosen) -> str:
    return f"#/episode/{quote(step.rollout_id, safe='')}/{step.step}"


def gather(runs: dict[str, Path], folder: Path) -> None:
    """All runs in one folder, for the viewer."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for run in (runs[name] for name in ("before", "after", "lake", "training")):
        shutil.copytree(run, folder / run.name, ignore=shutil.ignore_patterns("checkpoints", "model", "states"))


def main() -> None:
    """Make the runs where they are not there, and take the pictures."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise SystemExit("no Chromium was found; apt install chromium")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        runs = make_runs(folder)
        gather(runs, folder / "runs")
        browser = playwright.chromium.launch(executable_path=found)
        take_all(browser, runs, folder)
        browser.close()


if __name__ == "__main__":
    main()
