"""Users' objects by reference; every mistake is one ConfigError that says what to mend."""

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


def test_a_file_and_a_name(write, tmp_path):
    write("def score(): return 7\nclass Box:\n    inner = 8\n")
    assert load_object("reward.py:score", tmp_path)() == 7
    assert load_object("reward.py:Box.inner", tmp_path) == 8


@pytest.mark.parametrize("reference", ["json:dumps", "json.dumps"])
def test_a_dotted_path(reference):
    import json

    assert load_object(reference) is json.dumps


def test_two_files_of_one_name_do_not_meet(write, tmp_path):
    write("X = 1", "a/reward.py")
    write("X = 2", "b/reward.py")
    assert [load_object(f"{folder}/reward.py:X", tmp_path) for folder in "ab"] == [1, 2]


def test_a_file_is_loaded_once_and_finds_its_neighbours(write, tmp_path):
    write("VALUE = 5", "neighbour_of_loading_test.py")
    write("from neighbour_of_loading_test import VALUE")
    assert load_module("reward.py", tmp_path) is load_module("reward.py", tmp_path)


def test_a_file_that_failed_is_tried_again(write, tmp_path):
    write("1 / 0")
    with pytest.raises(ConfigError):
        load_module("reward.py", tmp_path)
    write("X = 1")
    assert load_object("reward.py:X", tmp_path) == 1


@pytest.mark.parametrize("reference", ["", "name", ":score", "module:"])
def test_a_reference_that_names_no_object_says_how_to_write_one(reference):
    with pytest.raises(ConfigError, match=r"file\.py:name or package\.module:name"):
        load_object(reference)


def test_a_file_alone_says_what_to_add():
    with pytest.raises(ConfigError, match=r"^'reward\.py' names a file without an object; write reward\.py:NAME$"):
        load_object("reward.py")


def test_a_missing_file_is_named_in_full(tmp_path):
    with pytest.raises(ConfigError, match=f"no such file: {tmp_path}/nowhere.py"):
        load_object("nowhere.py:x", tmp_path)


def test_a_missing_name_offers_the_nearest(write, tmp_path):
    write("def score(): ...")
    with pytest.raises(ConfigError, match="has no 'scor'; did you mean 'score'"):
        load_object("reward.py:scor", tmp_path)


def test_an_import_that_fails_shows_the_users_frame(write, tmp_path):
    path = write("import json\n\n1 / 0\n")
    with pytest.raises(ConfigError) as caught:
        load_object("reward.py:x", tmp_path)
    assert "cannot be imported: ZeroDivisionError: division by zero" in str(caught.value)
    assert f"{path}:3" in str(caught.value)


@pytest.mark.parametrize("code", ["import no_such_module_at_all", "def (", "raise SystemExit(0)"])
def test_whatever_the_file_does_it_is_a_config_error(write, tmp_path, code):
    write(code)
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_object("reward.py:x", tmp_path)


def test_a_module_that_does_not_exist_is_a_config_error():
    with pytest.raises(ConfigError, match="No module named 'no_such_module_at_all'"):
        load_object("no_such_module_at_all:x")


def test_our_own_config_error_passes_unchanged(write, tmp_path):
    write("from reward_kit.errors import ConfigError\nraise ConfigError('mine')")
    with pytest.raises(ConfigError, match=r"^mine$"):
        load_module("reward.py", tmp_path)


def test_a_module_that_says_what_is_public_offers_that():
    with pytest.raises(ConfigError, match="did you mean 'math_answer'"):
        load_object("reward_kit.rewards:math_anwser")
    with pytest.raises(ConfigError) as caught:
        load_object("reward_kit.rewards:zzz")
    assert "exact_answer" in str(caught.value) and "HOMES" not in str(caught.value)
