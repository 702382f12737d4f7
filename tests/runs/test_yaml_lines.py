"""YAML with line numbers, and errors of invalid files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.errors import ConfigError
from reward_kit.runs.task_file import LocatedYaml
from tests.profiles import examples

DOCUMENT = """\
# a comment
name: lake

limits:
  wall_time_s: 3
  deeper: {one: 1,
           two: 2}
rows:
  - id: a
    config:
      size: 4
  - id: b
"""


def located(folder: Path, text: str, name: str = "task.yaml") -> LocatedYaml:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return LocatedYaml(path)


@pytest.mark.parametrize(
    ("place", "line"),
    [
        (("name",), 2),
        (("limits",), 4),
        (("limits", "wall_time_s"), 5),
        (("limits", "deeper", "two"), 7),
        (("rows",), 8),
        (("rows", 0), 9),
        (("rows", 0, "config", "size"), 11),
        (("rows", 1), 12),
        (("limits", "nosuch", "inner"), 4),
        (("nosuch",), 1),
        ((), 1),
    ],
)
def test_location_falls_back_to_the_nearest_parent_key(tmp_path: Path, place: tuple[str | int, ...], line: int) -> None:
    assert located(tmp_path, DOCUMENT).where(place) == f"{tmp_path / 'task.yaml'}:{line}"


def test_data_equals_yaml_safe_load(tmp_path: Path) -> None:
    assert located(tmp_path, DOCUMENT).data == yaml.safe_load(DOCUMENT)
    assert located(tmp_path, "").data is None
    assert located(tmp_path, "# nothing\n").data is None


def test_dates_stay_strings(tmp_path: Path) -> None:
    found = located(tmp_path, "day: 2025-03-01\nmoment: 2025-03-01 10:00:00\nnumber: 3\nhalf: 0.5\nyes: true\n")
    assert found.data["day"] == "2025-03-01" and found.data["moment"] == "2025-03-01 10:00:00"
    assert (found.data["number"], found.data["half"]) == (3, 0.5)
    assert yaml.safe_load("day: 2025-03-01")["day"] != "2025-03-01", "other users of yaml see dates as before"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"task\.yaml:3: duplicate key 'a'"),
        ("a:\n  b: 1\n  b: 2\n", r"task\.yaml:3: duplicate key 'b'"),
        ("- x: 1\n- {y: 1,\n   y: 2}\n", r"task\.yaml:3: duplicate key 'y'"),
        ("a: [1,\nb: 2\n", r"task\.yaml:\d+: not YAML"),
        ("a: 1\n\tb: 2\n", r"task\.yaml:2: not YAML"),
        ("a: !!python/object:os.system x\n", r"task\.yaml:1: not YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", r"task\.yaml:2: not YAML: but found another document"),
        ("? [1, 2]\n: x\n", r"task\.yaml:1: not YAML: found unhashable key"),
        ("a: *nowhere\n", r"task\.yaml:1: not YAML"),
        ("a: 1\nb: \x01\n", r"task\.yaml:2: not YAML: unacceptable character"),
    ],
)
def test_invalid_yaml_is_one_line_with_its_location(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        located(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["a: &a\n  b: *a\n", "a: " + "[" * 500 + "]" * 500], ids=["itself", "depth"])
def test_endless_yaml_is_one_error_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.yaml:1: a value (contains itself|is nested more than 100 levels.*)$"):
        located(tmp_path, text)


def test_anchors_and_merges_can_be_used(tmp_path: Path) -> None:
    found = located(tmp_path, "base: &base {x: 1}\none: *base\ntwo:\n  <<: *base\n  y: 2\n")
    assert found.data["one"] == {"x": 1} and found.data["two"] == {"x": 1, "y": 2}
    assert found.where(("two", "y")).endswith(":5")


class TestUnreadableFiles:
    def test_missing_file_suggests_the_nearest_name(self, tmp_path: Path) -> None:
        (tmp_path / "task.yaml").touch()
        with pytest.raises(ConfigError, match=r"cannot read .*tsk\.yaml: No such file.*did you mean 'task\.yaml'\?"):
            LocatedYaml(tmp_path / "tsk.yaml")

    def test_missing_file_without_a_near_name_lists_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "zzz").touch()
        with pytest.raises(ConfigError) as caught:
            LocatedYaml(tmp_path / "task.yaml")
        assert "zzz" not in str(caught.value)
        with pytest.raises(ConfigError, match="No such file"):
            LocatedYaml(tmp_path / "no" / "folder.yaml")

    def test_folder_and_wrong_encoding_are_reported(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="is not a task: expected a task file, a Harbor task"):
            LocatedYaml(tmp_path)
        (tmp_path / "task.yaml").write_bytes("name: é".encode("latin-1"))
        with pytest.raises(ConfigError, match=r"cannot read .*task\.yaml: not UTF-8 text \('utf-8' codec"):
            LocatedYaml(tmp_path / "task.yaml")


values = st.recursive(
    st.integers() | st.booleans() | st.text("ab c:-#'\"", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=examples(40))
@given(st.dictionaries(st.text("abc", min_size=1), values))
def test_dumped_yaml_is_read_and_every_key_has_its_line(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    text = yaml.safe_dump(data, default_flow_style=False)
    found = located(tmp_path_factory.getbasetemp(), text, "drawn.yaml")
    assert found.data == data
    for key in data:
        line = int(found.where((key,)).rpartition(":")[2])
        (read,) = yaml.safe_load(f"{{{text.splitlines()[line - 1].partition(':')[0]}: 0}}") or [None]
        assert str(read) == key


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60))
LIMITED = {
    "laughs": (LAUGHS, ":18: the file has more than 500,000 values with its aliases expanded"),
    "merges": (MERGES, ":18: the file has more than 500,000 values with its aliases expanded"),
    "deep aliases": (
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 5000)),
        ":100: a value is nested more than 100 levels deep",
    ),
    "itself": ("a: 1\nb: &b [*b]\n", ":2: a value contains itself"),
    "deep flow": ("a: 1\nb: " + "[" * 100_000, ":2: a value is nested more than 100 levels deep"),
    "deep block": ("".join(" " * n + "a:\n" for n in range(500)), ":100: a value is nested more than 100 levels deep"),
    "long number": ("a: 1\nb: " + "1" * 5_000, ":2: not a number: Exceeds the limit"),
    "large": (
        "a: " + "x" * (8 * 2**20),
        ": the file is larger than the limit of 8 MiB; store a dataset as JSONL",
    ),
}


@pytest.mark.parametrize(("text", "message"), LIMITED.values(), ids=LIMITED)
def test_hostile_file_is_rejected_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        located(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path / 'task.yaml'}{message}")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_more_values_than_the_limit_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_kit.limited_yaml.YAML_VALUES", 100)
    with pytest.raises(ConfigError, match=r"task\.yaml:100: the file has more than 100 values"):
        located(tmp_path, "- 1\n" * 200)


def test_ordinary_aliases_and_merges_are_read(tmp_path: Path) -> None:
    text = "base: &base {a: 1, b: [1, 2]}\none: {<<: *base, a: 2}\ntwo: *base\n"
    assert located(tmp_path, text).data == yaml.safe_load(text)
