"""Test logs of inspect_ai: import, export, and equality of both. `make_inspect_logs.py` made the fixtures."""

from __future__ import annotations

import json
import random
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reward_kit.checks.run import check_run
from reward_kit.errors import ConfigError
from reward_kit.runs.export import Selection, selected
from reward_kit.runs.logs.documents import LogArchive
from reward_kit.runs.logs.exporting import export_logs
from reward_kit.runs.logs.importing import ImportedRun, import_logs
from reward_kit.runs.logs.inspect_log import read_header, read_samples
from reward_kit.runs.results import read_results
from reward_kit.runs.run_folder import RunFolder, RunHeader, read_episodes, read_scores
from tests.runs.stored_run import episode, make_run, score

FOLDER = Path(__file__).parent
SMALL, LARGE, PART = FOLDER / "inspect_small.eval", FOLDER / "inspect_large.eval", FOLDER / "inspect_part.json"


@pytest.fixture(scope="module")
def zstandard() -> None:
    pytest.importorskip("zstandard", reason="needs the extra 'logs'")


def export(run: Path, form: str, target: Path, **selection: Any) -> dict[str, int]:
    header = RunHeader.read(run)
    results = selected(run, Selection(header.pass_threshold, **selection))
    return dict(export_logs(run, header, results, form, target, is_private=False).dropped)


def content(path: Path) -> tuple[Any, list[Any]]:
    """Return the header and the samples of a log."""
    return read_header(path, to_end=True).data, [document.data for document in read_samples(path)]


def import_samples(tmp_path: Path, change: Callable[[dict[str, Any]], None], **options: Any) -> ImportedRun:
    """Import the samples of the JSON log after a change."""
    log = json.loads(PART.read_text())
    change(log)
    (tmp_path / "log.json").write_text(json.dumps(log))
    return import_logs([tmp_path / "log.json"], tmp_path / "runs", **options)


class TestImport:
    @pytest.fixture
    def run(self, zstandard: None, tmp_path: Path) -> ImportedRun:
        return import_logs([SMALL, LARGE], tmp_path)

    def test_each_model_is_a_policy_with_its_scores(self, run: ImportedRun) -> None:
        small, large = sorted(run.policies, key=lambda one: one.policy, reverse=True)
        assert (small.policy, large.policy) == ("mockllm/small", "mockllm/large")
        assert (small.episodes, small.errors) == (6, {"crash": 2})
        assert small.stop_reasons == {"error": 2, "max_steps": 2, "recorded": 2}
        assert {*small.metrics} == {"includes", "length", "style/short", "style/polite"}
        assert small.tool_errors > 0

    def test_run_passes_the_check_of_episodes(self, run: ImportedRun) -> None:
        assert not check_run(run.path).findings

    def test_values_are_those_of_the_log(self, run: ImportedRun) -> None:
        with LogArchive(SMALL) as log:
            sample = log.parse("samples/one_epoch_2.json")
        result = next(
            one for one in read_results(run.path)
            if (one.episode["policy"], one.episode["sample_id"], one.episode["rollout_index"])
            == ("mockllm/small", "one", 1)
        )  # fmt: skip
        record = result.episode
        usage = sample["model_usage"]["mockllm/small"]
        assert record["ground_truth"] == "2"
        assert record["sample"] == {"level": 1, "tags": ["easy"], "input": "What is 1 + 1?"}
        assert [message["role"] for message in record["messages"]] == [one["role"] for one in sample["messages"]]
        assert record["usage"]["prompt_tokens"] == usage["input_tokens"] + usage["input_tokens_cache_read"]
        assert record["usage"]["completion_tokens"] == usage["output_tokens"]
        assert record["timing"]["started_at"][:19] == sample["started_at"][:19]
        assert record["custom_data"]["log"]["fields"]["store"] == {"visited": [1, 2]}
        assert result.score is not None
        assert result.score["score"] == float(sample["scores"]["includes"]["value"] == "C")
        assert result.score["result"]["metrics"]["style/polite"]["score"] == 1.0
        call = next(message for message in record["messages"] if message.get("tool_calls"))["tool_calls"][0]
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"])["y"] == 1

    def test_fields_without_a_place_are_counted(self, run: ImportedRun) -> None:
        samples = [document.data for path in (SMALL, LARGE) for document in read_samples(path)]
        assert run.report.log_only["sample.events"] == sum(len(sample["events"]) for sample in samples)
        assert run.report.extra["sample.uuid"] == 12
        header = RunHeader.read(run.path).imported
        assert header is not None
        assert header["fields"]["log_only"] == dict(run.report.log_only)

    def test_score_option_selects_the_score(self, zstandard: None, tmp_path: Path) -> None:
        run = import_logs([SMALL], tmp_path, scorer="style/short")
        assert {line["score"] for line in read_scores(run.path)} == {0.5}
        with pytest.raises(ConfigError, match="did you mean 'length'"):
            import_logs([SMALL], tmp_path, scorer="lenght")

    def test_logs_of_one_model_get_different_names(self, zstandard: None, tmp_path: Path) -> None:
        (tmp_path / "again.eval").write_bytes(SMALL.read_bytes())
        run = import_logs([SMALL, tmp_path / "again.eval"], tmp_path / "runs")
        assert [one.policy for one in run.policies] == ["mockllm/small (again)", "mockllm/small (inspect_small)"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(("C", 1.0), ("P", 0.5), ("I", 0.0), ("N", 0.0), (True, 1.0), ("yes", 1.0), ("0.25", 0.25), (3, 3.0)),
        *((float("nan"), None), (10**400, None), ("unknown", None), ("1e999", None)),
    ],
)
def test_values_of_scores_become_numbers(tmp_path: Path, value: Any, expected: float | None) -> None:
    def change(log: dict[str, Any]) -> None:
        log["samples"] = [sample for sample in log["samples"] if not sample.get("error")]
        log["samples"][0]["scores"] = {"own": {"value": value}}

    run = import_samples(tmp_path, change)
    [line] = read_scores(run.path)
    assert line["score"] == expected
    assert (line["failure"] is None) == (expected is not None)


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "log.eval", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(20):
            sample = {"id": number, "epoch": 1, "events": [random.Random(number).randbytes(2**20).hex()]}
            archive.writestr(f"samples/{number}_epoch_1.json", json.dumps(sample))
        archive.writestr("header.json", json.dumps({"eval": {"task": "t", "model": "m"}}))
    assert (tmp_path / "log.eval").stat().st_size > 20 * 2**20
    import_logs([tmp_path / "log.eval"], tmp_path / "warm")  # imports modules
    tracemalloc.start()
    try:
        run = import_logs([tmp_path / "log.eval"], tmp_path / "runs")
        export(run.path, "inspect", tmp_path / "out.eval")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20


class TestExport:
    @pytest.mark.parametrize("log", [SMALL, LARGE, PART], ids=lambda path: path.name)
    def test_imported_log_is_equal_after_export(self, zstandard: None, tmp_path: Path, log: Path) -> None:
        run = import_logs([log], tmp_path / "runs").path
        export(run, "inspect", tmp_path / f"out{log.suffix}")
        assert content(tmp_path / f"out{log.suffix}") == content(log)

    def test_logs_are_written_separately(self, zstandard: None, tmp_path: Path) -> None:
        run = import_logs([SMALL, LARGE], tmp_path / "runs").path
        export(run, "inspect", tmp_path / "out")
        assert {path.name for path in (tmp_path / "out").iterdir()} == {SMALL.name, LARGE.name}
        assert content(tmp_path / "out" / LARGE.name) == content(LARGE)
        with pytest.raises(ConfigError, match="more than one log"):
            export(run, "inspect", tmp_path / "out.eval")
        assert not (tmp_path / "out.eval").exists()

    def test_changed_scores_replace_those_of_the_log(self, tmp_path: Path) -> None:
        run = import_logs([PART], tmp_path / "runs").path
        store = RunFolder(run)
        with store:
            for record in read_episodes(run):
                if not record["failure"]:
                    changed = {**score(record["rollout_id"], 0.25), "scorer": {"id": "mine"}}
                    store.append_score(changed)
        export(run, "inspect", tmp_path / "out.json")
        (header, samples), (original, originals) = content(tmp_path / "out.json"), content(PART)
        scored = next(sample for sample in samples if sample["scores"])
        assert scored["scores"] == {"mine": {"value": 0.25, "explanation": None}}
        same = next(sample for sample in originals if sample["uuid"] == scored["uuid"])
        assert {**scored, "scores": None} == {**same, "scores": None}
        assert "results" in original
        assert "results" not in header

    def test_run_without_a_log_is_exported(self, tmp_path: Path) -> None:
        run = make_run(tmp_path, [episode("r0", ["a", "b"])], [score("r0", 0.5, s0=1.0)])
        dropped = export(run, "inspect", tmp_path / "out.eval")
        header, [sample] = content(tmp_path / "out.eval")
        assert header["eval"]["model"] == "p"
        assert sample["epoch"] == 1
        assert sample["messages"][0] == {"role": "user", "content": "at a"}
        assert sample["output"]["completion"] == "word " * 50
        assert dropped["steps.state_key"] == 2


class TestInvalidLogs:
    @pytest.fixture(autouse=True)
    def nothing_is_written(self, tmp_path: Path) -> Any:
        yield
        assert not list((tmp_path / "runs").glob("*")) + list((tmp_path / "runs").glob(".*"))

    def import_zip(self, tmp_path: Path, members: dict[str, bytes]) -> None:
        with zipfile.ZipFile(tmp_path / "log.eval", "w", zipfile.ZIP_DEFLATED) as archive:
            header = {"eval": {"task": "t", "model": "m"}}
            archive.writestr("header.json", json.dumps(header))
            for name, data in members.items():
                archive.writestr(name, data)
        import_logs([tmp_path / "log.eval"], tmp_path / "runs")

    @pytest.mark.parametrize(
        ("data", "problem"),
        [
            (b"{", r"samples/a_epoch_1.json: not JSON"),
            (b"[" * 100_000, r"samples/a_epoch_1.json: (values are nested too deeply|not JSON)"),
            (b'{"id": ' + b"9" * 5_000 + b"}", "samples/a_epoch_1.json"),
            (b'{"epoch": 1}', r"samples/a_epoch_1.json: id: a sample must have an id"),
            (b'{"id": 1, "messages": {}}', "messages: expected a list of objects"),
            (b'{"id": 1, "messages": [{"role": "robot"}]}', r"messages: \[0\].role|messages: 0.role|role"),
            (b'{"id": 1, "scores": {"a": 1}}', "scores.a: expected an object"),
            (b'{"id": 1, "metadata": ' + b'{"a":' * 150 + b"1" + b"}" * 151, "more than 100 levels"),
        ],
    )
    def test_invalid_sample_is_reported_with_its_name(self, tmp_path: Path, data: bytes, problem: str) -> None:
        with pytest.raises(ConfigError, match=problem) as error:
            self.import_zip(tmp_path, {"samples/ok_epoch_1.json": b'{"id": "ok"}', "samples/a_epoch_1.json": data})
        assert "log.eval" in str(error.value)
        assert ";" in str(error.value)

    def test_zip_bomb_is_rejected(self, tmp_path: Path) -> None:
        bomb = bytes(300 * 2**20)
        with pytest.raises(ConfigError, match="times its size"):
            self.import_zip(tmp_path, {"samples/a_epoch_1.json": bomb})

    def test_cut_archive_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / "cut.eval").write_bytes(SMALL.read_bytes()[:-200])
        with pytest.raises(ConfigError, match="not a complete zip archive"):
            import_logs([tmp_path / "cut.eval"], tmp_path / "runs")

    def test_damaged_member_is_rejected(self, zstandard: None, tmp_path: Path) -> None:
        data = bytearray(SMALL.read_bytes())
        with zipfile.ZipFile(SMALL) as archive:
            info = archive.getinfo("samples/one_epoch_1.json")
        middle = info.header_offset + info.compress_size // 2
        data[middle : middle + 8] = bytes(8)
        (tmp_path / "damaged.eval").write_bytes(data)
        with pytest.raises(ConfigError, match=r"one_epoch_1.json: cannot be decompressed"):
            import_logs([tmp_path / "damaged.eval"], tmp_path / "runs")

    def test_missing_file_is_reported_with_a_near_name(self, tmp_path: Path) -> None:
        (tmp_path / "log.eval").write_bytes(b"PK")
        with pytest.raises(ConfigError, match=r"did you mean 'log.eval'"):
            import_logs([tmp_path / "logs.eval"], tmp_path / "runs")

    def test_json_cut_in_the_samples_is_reported_with_its_line(self, tmp_path: Path) -> None:
        (tmp_path / "log.json").write_bytes(PART.read_bytes()[:9_000])
        with pytest.raises(ConfigError, match=r"log.json:\d+: not JSON"):
            import_logs([tmp_path / "log.json"], tmp_path / "runs")
