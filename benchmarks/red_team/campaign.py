"""Run `reward-kit check` on the red-team corpus, and print how many weaknesses it finds and how many alarms it raises.

Exits with code 1 if fewer than 95% of the planted weaknesses are found, if a fixed verifier has an error or a warning,
or if a check takes more than 60 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import anyio

from reward_kit.checks.harbor import check_harbor_task
from reward_kit.checks.reward import Plan, check_reward, load
from reward_kit.checks.reward_bench import Given, RewardReport

FOLDER = Path(__file__).parent
ENOUGH = 0.95
MOST_S = 60.0


def check(entry: Path, version: str, given: dict) -> RewardReport:
    """Return the report on one version of an entry."""
    if entry.parent.name == "harbor":
        return anyio.run(check_harbor_task, entry / version)
    answers = Given(tuple(given.get("ground_truths", ())), tuple(given.get("golds", ())))
    plan = Plan(f"{entry / version}.py:verify", given=answers)
    loaded, _ = load(plan)
    return anyio.run(check_reward, plan, loaded)


def main(names: list[str]) -> int:
    entries = sorted(path.parent for path in FOLDER.glob("*/*/given.json"))
    if unknown := [name for name in names if name not in {entry.name for entry in entries}]:
        raise SystemExit(f"unknown entry {unknown[0]!r}; the entries are {', '.join(entry.name for entry in entries)}")
    entries = [entry for entry in entries if not names or entry.name in names]
    found, alarms, longest = 0, 0, 0.0
    for entry in entries:
        given = json.loads((entry / "given.json").read_text(encoding="utf-8"))
        for version in ("planted", "fixed"):
            began = time.monotonic()
            report = check(entry, version, given)
            seconds = time.monotonic() - began
            longest = max(longest, seconds)
            kinds = sorted({finding.kind for finding in report.findings if finding.level != "info"})
            if version == "planted":
                is_right = bool(set(kinds) & set(given["exploits"]))
                found += is_right
            else:
                is_right = not kinds
                alarms += not is_right
            name = f"{entry.parent.name}/{entry.name}"
            mark = "ok " if is_right else "BAD"
            print(f"{mark} {name:34} {version:8} {seconds:5.1f} s  {' '.join(kinds)}", flush=True)
    share = found / len(entries)
    print(
        f"{len(entries)} verifiers: {found} planted weaknesses found ({share:.0%}), {alarms} alarms on fixed versions"
    )
    print(f"longest check {longest:.1f} s")
    return int(share < ENOUGH or alarms > 0 or longest > MOST_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="an entry to check; default: all entries")
    sys.exit(main(parser.parse_args().names))
