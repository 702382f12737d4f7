"""The report page matches `summary.json`, loads nothing and escapes untrusted text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError, StoreError
from reward_kit.report.run_data import read_run
from reward_kit.report.run_page import write_report
from reward_kit.report.timeline import MOST_BARS
from reward_kit.runs.results import index_results
from reward_kit.runs.run_folder import RunFolder
from reward_kit.runs.summary import summarize, summary_to_json
from tests.report.run_factory import Parsed, episode, make_run, page_of, random_run, score

HOSTILE = [
    "</script><script>document.title='owned'</script>",
    '<img src=x onerror="document.title=1">',
    "</title></style></textarea><!-- <script>",
    "\x1b[31mred\x1b[0m \x07 \x00 \x9b",
    "half \ud83d a pair \udc00",
    "\u05e9\u05dc\u05d5\u05dd \u202egnp.exe\u202c",
    "{{ 7 * 7 }} {% raw %} &lt;b&gt; \" ' `",
    "\u2028\u2029\ufeff\ufffe",
]


def texts_of(cells: list) -> list[str]:
    """Return the shown text of each cell; abbreviated cells also have the full text."""
    return [cell[0] if isinstance(cell, list) else cell for cell in cells]


def summary_of(run: Path) -> dict:
    facts = read_run(run)
    return summary_to_json(summarize((one.row for one in facts.episodes), facts.pass_threshold))


def test_headline_figures_match_the_summary(tmp_path: Path) -> None:
    run = random_run(tmp_path, 100)
    page = page_of(run)
    for policy in summary_of(run)["policies"]:
        shown = page.figures[policy["policy"]]
        assert [shown[key] for key in ("mean", "low", "high")] == [
            policy["score"][key] for key in ("mean", "low", "high")
        ]
        assert [shown[key] for key in ("episodes", "scored", "failures")] == [
            policy[key] for key in ("episodes", "scored", "failures")
        ]
        assert shown["errors"] == sum(policy["errors"].values()) > 0
        assert shown["unscored"] == policy["episodes"] - policy["scored"] == policy["score"]["n_unscored"] > 0


def test_cost_table_shows_the_cost_of_the_judge_and_the_total_beside_that_of_the_policy(tmp_path: Path) -> None:
    def judged(name: str, cost: str) -> dict:
        metrics = {"judge_usage": {"reason": f"calls=1 cost_usd={cost}"}}
        return score(name, 1.0, result={"score": 1.0, "reason": "", "metrics": metrics})

    def costs(folder: str, policy_cost: dict, *judge_costs: str) -> tuple[list[str], list[str]]:
        names = [f"r{number}" for number in range(max(1, len(judge_costs)))]
        usage = {"prompt_tokens": 10, **policy_cost}
        scores = [judged(*pair) for pair in zip(names, judge_costs, strict=False)]
        (tmp_path / folder).mkdir()
        run = make_run(tmp_path / folder, [episode(name, usage=usage) for name in names], scores)
        text = write_report(run).read_text(encoding="utf-8")
        table = text.partition('data-live="spent"')[2].partition("</section>")[0]
        heads = re.findall(r"<th[^>]*>([^<]*cost)</th>", table)
        return heads, re.findall(r'<td class="n">([^<]*)</td>', table)[2 : 2 + len(heads)]

    heads, cells = costs("priced", {"cost": 0.5}, "0.25", "0.125")
    assert heads == ["cost", "judge cost", "total cost"] and cells == ["$1.0000", "$0.3750", "$1.3750"]
    _, cells = costs("unpriced", {"cost": 0.5}, "0.25", "unknown")
    assert cells == ["$1.0000", "at least $0.2500 (1 without a price)", "at least $1.2500 (1 without a price)"]
    _, cells = costs("unknown", {}, "unknown")
    assert cells == ["unknown", "unknown", "unknown"]
    assert costs("alone", {"cost": 0.5}) == (["cost"], ["$0.5000"])


def test_cost_table_shows_the_kinds_of_tokens_that_are_known(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 1000, "completion_tokens": 10, "cached_tokens": 900, "reasoning_tokens": 8}
    episodes = [episode("a", usage=usage), episode("b", policy="q", usage={"prompt_tokens": 5, "completion_tokens": 6})]
    text = write_report(make_run(tmp_path, episodes, [])).read_text(encoding="utf-8")
    table = text.partition('data-live="spent"')[2].partition("</section>")[0]
    heads = re.findall(r"<th[^>]*>([^<]*tokens)</th>", table)
    assert heads == ["prompt tokens", "completion tokens", "cached tokens", "reasoning tokens"]
    rows = [re.findall(r'<td class="n">([^<]*)</td>', row)[:4] for row in table.split("<tr>")[2:]]
    assert rows == [["1,000", "10", "900", "8"], ["5", "6", "–", "–"]]


def test_counts_match_the_summary(tmp_path: Path) -> None:
    run = random_run(tmp_path, 100)
    page, policies = page_of(run), summary_of(run)["policies"]
    for table, key in (("stop", "stop_reasons"), ("error", "errors")):
        names = {name for policy in policies for name in policy[key]}
        assert page.counts[table] == {name: sum(p[key].get(name, 0) for p in policies) for name in names}


def test_tables_list_every_episode_and_sample(tmp_path: Path) -> None:
    run = random_run(tmp_path, 100)
    page, facts = page_of(run), read_run(run)
    assert page.column("episodes", "rollout") == sorted(one.row.rollout_id for one in facts.episodes)
    assert sum(page.column("samples", "episodes")) == 100
    assert page.column("episodes", "outcome").count("error") == sum(one.row.is_error for one in facts.episodes)
    unscored = [score for score in page.column("episodes", "score") if score is None]
    assert len(unscored) == sum(one.row.score is None for one in facts.episodes) > 0, "unscored is no number"


def test_page_loads_no_external_resources(tmp_path: Path) -> None:
    run = random_run(tmp_path, 60)
    page = page_of(run)
    for tag, given in page.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form", "audio", "video", "use", "image")
        assert not [name for name in given if name.startswith("on") or name == "style"], (
            "the page's own rules forbid it"
        )
        for name in ("src", "href", "srcset", "action", "data", "xlink:href"):
            assert (given.get(name) or "#").startswith(("#", "data:,")), f"{tag} {name}={given.get(name)}"
    own = "".join(page.blocks["style"] + page.blocks["script"][-1:]).replace("http://www.w3.org/2000/svg", "a name")
    assert not re.search(r"https?:|//[a-z]|@import|XMLHttp|WebSocket|import\(|innerHTML|eval\(", own)
    assert own.count("fetch(") == 1, "for a page from a server; the rules of this one allow no connection"
    assert "connect-src" not in next(given["content"] or "" for _, given in page.tags if given.get("http-equiv"))
    assert set(re.findall(r"url\(([^)]*)\)", own)) <= {"#hatch"}


def test_content_security_policy_allows_only_the_own_script_and_style(tmp_path: Path) -> None:
    page = page_of(random_run(tmp_path, 20))
    (policy,) = [given["content"] for tag, given in page.tags if given.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for kind, block in (("script-src", page.blocks["script"][-1]), ("style-src", page.blocks["style"][0])):
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"


@pytest.mark.parametrize("text", HOSTILE)
def test_untrusted_text_is_shown_as_text(tmp_path: Path, text: str) -> None:
    usage = {"judge_usage": {"reason": "calls=1"}}
    calm_score = score("r", 0.0, (1.0, 2.0), result={"score": 0.0, "reason": "calm", "metrics": usage})
    calm = page_of(make_run(tmp_path / "calm", [episode("r")], [calm_score]))
    broke = {"class": "crash", "where": "ToolError", "message": text}
    episodes = [episode(text, sample=text, policy=text, group_id=text)]
    result = {"score": 0.0, "reason": text, "metrics": {"judge_usage": {"reason": text}}}
    scores = [score(text, 0.0, (1.0, 2.0), result=result)]
    path = write_report(make_run(tmp_path, episodes, scores, task_name=text, run_id=text))
    page = Parsed(path.read_text(encoding="utf-8"))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in calm.tags], "no element more than for a calm run"
    assert page.blocks["script"][-1] == calm.blocks["script"][-1]
    assert page.column("episodes", "reason")[0] == texts_of(page.column("episodes", "rollout"))[0]
    raw = path.read_bytes().decode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe]", raw)
    broken = page_of(make_run(tmp_path / "broken", [episode("r", failure=broke, stop_reason="error")], []))
    assert page.column("episodes", "reason") == broken.column("episodes", "reason")


def test_text_of_five_megabytes_is_cut_and_its_length_shown(tmp_path: Path) -> None:
    long = "x" * 5_000_000
    run = make_run(tmp_path, [episode("r")], [score("r", 0.0, result={"score": 0.0, "reason": long})])
    path = write_report(run)
    assert path.stat().st_size < 250_000
    assert "… (5,000,000 characters)" in Parsed(path.read_text()).text


def test_page_of_ten_thousand_episodes_has_bounded_size(tmp_path: Path) -> None:
    run = random_run(tmp_path, 10_000, width=64)
    path = write_report(run)
    page = Parsed(path.read_text(encoding="utf-8"))
    assert len(page.column("episodes", "rollout")) == 10_000
    assert path.stat().st_size < 4_000_000
    assert sum(tag == "rect" for tag, _ in page.tags) < MOST_BARS, "sums in place of bars"
    assert "Only totals are drawn" in page.text
    assert page.figures["a"]["episodes"] + page.figures["b"]["episodes"] == 10_000


def test_page_of_a_run_without_score_times_reports_missing_times(tmp_path: Path) -> None:
    page = page_of(
        make_run(tmp_path, [episode("r", 0.0, 2.0), episode("s", 1.0, 2.0)], [score("r", 1.0), score("s", 0.0)])
    )
    assert "2 scores have no request and arrival times" in page.text
    assert [given["class"] for tag, given in page.tags if tag == "rect" and given.get("class") == "episode"] != []
    assert page.figures["p"]["mean"] == 0.5


def test_page_without_times_explains_the_missing_timeline(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, [episode("r", timing=None)], [score("r", 1.0, timing=None)]))
    assert "contain no times, so there is no timeline" in page.text
    assert "timeline" not in [given.get("class") for _, given in page.tags]


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, [], [], total=8))
    assert "No episodes yet." in page.text and "8 of 8 episodes are missing" in page.text


def test_rerun_episode_is_ordered_by_its_latest_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("r1"), episode("r2"), episode("r1", attempt=1)], [], total=2)
    assert [facts.row.rollout_id for facts in read_run(run).episodes] == ["r2", "r1"]
    assert list(index_results(run).episodes) == ["r2", "r1"]


def test_only_latest_attempts_count_and_episodes_cut_off_by_a_limit_do_not(tmp_path: Path) -> None:
    cut = episode("s", stop_reason="run_limit")
    lines = [episode("r"), cut, episode("r", attempt=1)]
    page = page_of(make_run(tmp_path, lines, [score("r", 0.0), score("r", 1.0, attempt=1)], total=2))
    assert page.column("episodes", "score") == [1.0]
    assert "1 attempts were replaced" in page.text and "1 episodes were cut off by a run limit" in page.text


def test_scores_of_any_magnitude_are_shown(tmp_path: Path) -> None:
    values = [-1e308, 1e308, 0.0, -3.5]
    names = [f"r{place}" for place in range(len(values))]
    episodes = [episode(name, sample=name) for name in names]
    page = page_of(
        make_run(tmp_path, episodes, [score(name, value) for name, value in zip(names, values, strict=True)])
    )
    assert page.column("episodes", "score") == values


def test_a_damaged_score_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("r")], [score("r", 1.0)])
    (run / "scores.jsonl").write_text(json.dumps(score("r", 1.0) | {"score": "good"}) + "\n")
    with pytest.raises(StoreError, match=r"scores\.jsonl:1: the score of r must be a finite number or null"):
        write_report(run)


def test_a_damaged_episode_is_named(tmp_path: Path) -> None:
    line = episode("r")
    del line["num_steps"]
    with pytest.raises(StoreError, match=r"episodes\.jsonl: r cannot be read as an episode.*num_steps"):
        write_report(make_run(tmp_path, [line], []))


def test_folder_that_is_not_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no run\.json"):
        write_report(tmp_path)


def test_training_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a training run, which has metrics\.jsonl"):
        read_run(make_run(tmp_path, [], [], training={"train_path": "t.yaml"}))


def test_target_in_a_missing_folder_is_rejected(tmp_path: Path) -> None:
    run = make_run(tmp_path, [], [])
    with pytest.raises(ConfigError, match=r"directory .*nowhere does not exist; create it first"):
        write_report(run, tmp_path / "nowhere" / "page.html")


def test_page_of_a_killed_run_shows_the_status_and_the_command_that_resumes_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("r")], [], total=8, status="running")
    with RunFolder(run):
        assert "killed" not in page_of(run).text and "--resume" not in page_of(run).text
    page = page_of(run)
    assert "killed" in page.text and f"reward-kit run --resume {run}" in page.text
