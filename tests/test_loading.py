"""Loading of users' objects by reference; mistakes are reported as a ConfigError."""

import sys

import pytest

from reward_kit.errors import ConfigError
from reward_kit.loading import load_module, load_object


@pytest.fixture
def write(tmp_path):
    before = list(sys.path)

    def write_file(code, name="reward.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        return path

    yield write_file
    sys.path[:] = before


def test_object_is_loaded_from_a_file_reference(write, tmp_path):
    write("def score(): return 7\nclass Box:\n    inner = 8\n")
    assert load_object("reward.py:score", tmp_path)() == 7
    assert load_object("reward.py:Box.inner", tmp_path) == 8


@pytest.mark.parametrize("reference", ["json:dumps", "json.dumps"])
def test_object_is_loaded_from_a_dotted_path(reference):
    import json

    assert load_object(reference) is json.dumps


def test_files_of_equal_name_in_different_folders_are_separate_modules(write, tmp_path):
    write("X = 1", "a/reward.py")
    write("X = 2", "b/reward.py")
    assert [load_object(f"{folder}/reward.py:X", tmp_path) for folder in "ab"] == [1, 2]


def test_file_is_loaded_once_and_can_import_its_neighbors(write, tmp_path):
    write("VALUE = 5", "neighbour_of_loading_test.py")
    write("from neighbour_of_loading_test import VALUE")
    assert load_module("reward.py", tmp_path) is load_module("reward.py", tmp_path)


def test_file_that_failed_to_load_is_loaded_again(write, tmp_path):
    write("1 / 0")
    with pytest.raises(ConfigError):
        load_module("reward.py", tmp_path)
    write("X = 1")
    assert load_object("reward.py:X", tmp_path) == 1


@pytest.mark.parametrize("reference", ["", "name", ":score", "module:"])
def test_incomplete_reference_error_shows_the_expected_form(reference):
    with pytest.raises(ConfigError, match=r"file\.py:name or package\.module:name"):
        load_object(reference)


def test_reference_without_an_object_name_is_explained():
    with pytest.raises(ConfigError, match=r"^'reward\.py' does not name an object; write reward\.py:NAME$"):
        load_object("reward.py")


def test_missing_file_is_named_with_its_full_path(tmp_path):
    with pytest.raises(ConfigError, match=f"no such file: {tmp_path}/nowhere.py"):
        load_object("nowhere.py:x", tmp_path)


def test_missing_name_suggests_the_nearest_name(write, tmp_path):
    write("def score(): ...")
    with pytest.raises(ConfigError, match="has no 'scor'; did you mean 'score'"):
        load_object("reward.py:scor", tmp_path)


def test_known_names_are_those_that_the_file_defines(write, tmp_path):
    write(
        "from __future__ import annotations\nimport json\nfrom pathlib import Path\nfrom typing import Literal\n"
        "from json import dumps\nfrom reward_kit import ToolRegistry\n"
        "tools = ToolRegistry('t')\ndef score(): ...\nclass Box:\n    def lid(self): ...\n"
    )
    with pytest.raises(ConfigError, match=r"has no 'qqqqq'; known: Box, score, tools$"):
        load_object("reward.py:qqqqq", tmp_path)
    with pytest.raises(ConfigError, match=r"has no 'qqqqq'; known: lid$"):
        load_object("reward.py:Box.qqqqq", tmp_path)


def test_failed_import_shows_the_user_frame(write, tmp_path):
    path = write("import json\n\n1 / 0\n")
    with pytest.raises(ConfigError) as caught:
        load_object("reward.py:x", tmp_path)
    assert "cannot be imported: ZeroDivisionError: division by zero" in str(caught.value)
    assert f"{path}:3" in str(caught.value)


@pytest.mark.parametrize("code", ["import no_such_module_at_all", "def (", "raise SystemExit(0)"])
def test_error_in_a_loaded_file_is_a_config_error(write, tmp_path, code):
    write(code)
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_object("reward.py:x", tmp_path)


def test_missing_module_is_a_config_error():
    with pytest.raises(ConfigError, match="No module named 'no_such_module_at_all'"):
        load_object("no_such_module_at_all:x")


def test_config_error_raised_by_the_file_passes_unchanged(write, tmp_path):
    write("from reward_kit.errors import ConfigError\nraise ConfigError('mine')")
    with pytest.raises(ConfigError, match=r"^mine$"):
        load_module("reward.py", tmp_path)


def test_suggestions_come_from_the_public_names_of_a_module():
    with pytest.raises(ConfigError, match="did you mean 'math_answer'"):
        load_object("reward_kit.rewards:math_anwser")
    with pytest.raises(ConfigError) as caught:
        load_object("reward_kit.rewards:zzz")
    assert "exact_answer" in str(caught.value) and "HOMES" not in str(caught.value)
