"""The page of a training run: content, size and escaping of untrusted text."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.report.rendering import digest
from reward_kit.report.run_page import write_report
from reward_kit.runs.run_folder import RunFolder
from tests.report.run_factory import Parsed, episode
from tests.report.training.training_run_factory import make_training, update

HOSTILE = '</script><img src=x onerror="alert(1)">\x1b[31m\u202e'


def page_of(run: Path) -> Parsed:
    return Parsed(write_report(run).read_text(encoding="utf-8"))


def pictures(page: Parsed) -> list[str]:
    return [told for tag, given in page.tags if tag == "svg" and (told := given.get("data-chart"))]


def test_page_shows_progress_and_best_update(tmp_path: Path) -> None:
    scores = [0.25, 0.75, 0.5]
    lines = [(n, update(n, held_out__score=s, held_out__standard_error=0.05)) for n, s in enumerate(scores)]
    page = page_of(make_training(tmp_path, lines))
    for told in ("2 of 10 updates", "best held-out score 0.750 after update 1, ± 0.098", "last held-out score 0.500"):
        assert told in " ".join(page.text.split())
    assert pictures(page)[0] == "score" and "policy-0" in pictures(page)
    marks = [
        given for tag, given in page.tags if tag == "path" and given.get("class") == "best" and "data-update" in given
    ]
    assert {mark["data-update"] for mark in marks} == {"1"} and len(marks) == len(pictures(page))


def test_script_data_contains_points_and_axes(tmp_path: Path) -> None:
    page = page_of(make_training(tmp_path, [(n, update(n)) for n in (1, 2)]))
    data = json.loads(page.blocks["script"][0])
    assert data["charts"]["policy-0"]["lines"] == [{"label": "within the update", "u": [1, 2], "v": [0.01, 0.01]}]
    assert data["axes"]["environment steps"] == {"u": [0, 1, 2], "v": [0.0, 32.0, 64.0]}


def test_content_security_policy_allows_only_the_own_script_and_style(tmp_path: Path) -> None:
    run = make_training(tmp_path, [(1, update(1))], task_name=HOSTILE, config={"note": HOSTILE})
    (run / "episodes").mkdir()
    said = {"role": HOSTILE, "content": HOSTILE, "tool_calls": [{"function": {"name": HOSTILE, "arguments": "{}"}}]}
    line = episode(HOSTILE, sample=HOSTILE, stop_reason=HOSTILE, messages=[said])
    (run / "episodes/update-000001.jsonl").write_text(json.dumps(line) + "\n")
    page = page_of(run)
    assert not [tag for tag, _ in page.tags if tag in ("img", "iframe", "object", "a") and "src" in _]
    assert [tag for tag, given in page.tags if any(name.startswith("on") or name == "style" for name in given)] == []
    assert "\x1b" not in page.text and "\u202e" not in page.text and "onerror" in page.text
    (policy,) = [given["content"] for tag, given in page.tags if given.get("http-equiv")]
    assert policy is not None
    assert f"script-src '{digest(page.blocks['script'][1])}'" in policy and "default-src 'none'" in policy
    assert f"style-src '{digest(page.blocks['style'][0])}'" in policy


def test_alarms_are_listed_with_count_and_worst_value(tmp_path: Path) -> None:
    alarm = "learner__alarm__ratio_max"
    lines = [(n, update(n, **({alarm: 1e4 * n} if n in (2, 4) else {}))) for n in range(1, 6)]
    lines.append((6, update(6, learner__alarm__effective_share=0.125)))
    page = page_of(make_training(tmp_path, lines))
    text = " ".join(page.text.split())
    assert "ratio_max 2 2 4 40,000" in text and "effective_share 1 6 6 0.125" in text


def test_page_begins_with_warnings(tmp_path: Path) -> None:
    lines = [(1, update(1)), (2, update(2, learner__loss=None)), (3, update(3, reward_agent__done=1.0))]
    text = page_of(make_training(tmp_path, lines, status="interrupted")).text
    assert "Training ended before the last update. Resume with: reward-kit train --resume" in text
    assert "First non-finite values: learner/loss (update 2)." in text
    assert "Training was resumed 1 times, at update 3" in text and "No samples are held out" in text


def test_page_of_a_killed_training_run_shows_the_status_and_the_command_that_resumes_it(tmp_path: Path) -> None:
    run = make_training(tmp_path, [(1, update(1))], status="running")
    with RunFolder(run):
        assert "killed" not in page_of(run).text and "--resume" not in page_of(run).text
    text = page_of(run).text
    assert "killed" in text and f"reward-kit train --resume {run}" in text


def test_kept_episodes_are_shown_over_time(tmp_path: Path) -> None:
    run = make_training(tmp_path, [(n, update(n)) for n in (1, 2)])
    (run / "episodes").mkdir()
    for number in range(1, 31):
        messages = [{"role": "user", "content": f"go {place} " + "x" * 3_000} for place in range(40)]
        lines = [episode(f"lake-{number}-{e}", messages=messages) for e in range(5)]
        (run / f"episodes/update-{number:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(run)
    shown = sorted({int(text.split("-")[1]) for text in page.texts if text.startswith("lake-")})
    assert shown[0] == 1 and shown[-1] == 30 and len(shown) == 8
    assert "lake-1-1" in page.text and "lake-1-2" not in page.text and "16 messages omitted" in page.text
    assert "go 0 " in page.text and "go 39 " in page.text and "… (3,005 characters)" in page.text


def test_run_without_metrics_has_a_page(tmp_path: Path) -> None:
    text = page_of(make_training(tmp_path, [], status="failed")).text
    assert "No score yet." in text and "0 of 10 updates" in text


def test_page_of_ten_thousand_updates_is_small(tmp_path: Path) -> None:
    draw = random.Random(1)
    names = [
        f"learner__{name}" for name in ("grad_norm", "grad_norm_max", "clip_fraction", "lr", "ratio_max", "lag_mean")
    ]
    lines = [
        (n, update(n, score__mean=draw.random(), **{name: draw.random() for name in names})) for n in range(10_000)
    ]
    run = make_training(tmp_path, lines, config={"updates": 10_000})
    page = page_of(run)
    assert (run / "report.html").stat().st_size < 3_000_000
    assert "lines are means of about 50 updates" in page.text
    points = json.loads(page.blocks["script"][0])["charts"]["score"]["lines"][0]
    assert len(points["u"]) == len(points["low"]) == len(points["high"]) == 200


def test_folder_that_is_not_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        write_report(tmp_path)
    run = make_training(tmp_path, [])
    with pytest.raises(ConfigError, match="does not exist; create it first"):
        write_report(run, tmp_path / "no" / "page.html")
