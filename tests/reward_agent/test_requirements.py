"""What a reward requires is checked and, where the user says so, installed in an environment of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.models import Message
from reward_kit.reward_agent import ScoringRequest
from reward_kit.reward_agent.confined import ConfinedReward, ConfinedScorer
from reward_kit.reward_agent.levels import SandboxChoice, load_reward
from reward_kit.reward_agent.package_environment import environment_for, environments_folder
from reward_kit.reward_agent.requirements import Declared, check_installed, declared_in
from reward_kit.reward_agent.scoring import check_parameters
from tests.reward_agent.wheels import pack_installed, pip_settings, write_wheel
from tests.sandbox.behind_walls import missing

REQUEST = ScoringRequest("r1", [Message(role="user", content="2+2?")])


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    pack_installed(folder, tmp_path_factory.mktemp("unpacked"))
    for version in ("1.0", "2.0"):
        write_wheel(folder, "tiny-words", version, {"tiny_words.py": f"VERSION = {version!r}\n"})
    peek = f"import os\nfound = os.listdir({sysconfig.get_path('purelib')!r})\n"
    write_wheel(folder, "peeking", "1.0", {"peeking/__init__.py": peek})
    write_wheel(folder, "shadowing", "1.0", {"shadowing.py": "", "pydantic/_more.py": ""})
    write_wheel(folder, "old-models", "1.0", {"old_models.py": ""}, ["pydantic<2"])
    return folder


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory) -> Path:
    """Where the environments of several tests are made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def only_this_index(index, shared_cache, monkeypatch) -> None:
    """No test asks another index, or touches the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    for name, value in pip_settings(index).items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch) -> Path:
    """A cache that is empty."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def write(folder: Path, requirements: str, body: str = "return {'score': float(tiny_words.VERSION)}", top="") -> None:
    text = f"{top or 'import tiny_words'}\nfrom reward_kit import reward_function\n"
    text += f"@reward_function(requirements={requirements})\ndef reward(messages):\n{textwrap.indent(body, '    ')}\n"
    (folder / "reward.py").write_text(text)


def load(folder: Path, level: str = "warm", install: bool = True):
    return load_reward("reward.py:reward", folder, SandboxChoice(level=level, install_requirements=install))


async def score(reward, strength: str = "auto"):
    async with ConfinedScorer(reward, strength=strength) as scorer:
        return await scorer.score(REQUEST)


class TestReading:
    @pytest.mark.parametrize(
        ("text", "name", "requirements", "may_take_steps"),
        [
            ("@reward_function(requirements=['a>=1', 'b'])\ndef f(messages): pass", "f", ("a>=1", "b"), False),
            ("@rk.rf(id='x', requirements=('a',))\nasync def f(messages, *, step_data): pass", "f", ("a",), True),
            ("@reward_function\ndef f(messages, **others): pass", "f", (), True),
            ("@reward_function(requirements=None)\ndef f(messages): pass", "f", (), False),
            (
                "class A:\n  @r(requirements=['a'])\n  class B:\n    def score(self, messages): pass",
                "A.B",
                ("a",),
                False,
            ),
            ("@r(requirements=['a'])\nclass B(Parent): pass", "B", ("a",), True),
            (
                "try:\n  import x\nexcept ImportError:\n  @r(requirements=['a'])\n  def f(messages): pass",
                "f",
                ("a",),
                False,
            ),
            ("@r(requirements=['a'])\ndef f(messages): pass\n@r\ndef f(messages): pass", "f", (), False),
            ("@r(requirements=NEEDS)\ndef f(messages): pass", "f", None, False),
            ("@r(requirements=['a' + version])\ndef f(messages): pass", "f", None, False),
            ("@r(requirements='a')\ndef f(messages): pass", "f", None, False),
            ("@r(**options)\ndef f(messages): pass", "f", None, False),
        ],
    )
    def test_of_a_definition(self, text, name, requirements, may_take_steps):
        assert declared_in(text, name) == Declared(requirements, may_take_steps)

    @pytest.mark.parametrize("text", ["f = r(requirements=['a'])(g)", "from b import f", "def f(:", "def g(): pass"])
    def test_of_none(self, text):
        assert declared_in(text, "f") is None


class TestChecking:
    @pytest.mark.parametrize(
        "requirement",
        [
            "pydantic",
            "PyDantic>=2,<99",
            "typing_extensions",
            "no-such-package; python_version < '3'",
            "pydantic[email]; sys_platform == 'nowhere'",
            "pydantic @ https://example.invalid/pydantic.whl",
        ],
    )
    def test_what_is_met(self, requirement):
        check_installed([requirement], "reward 'r'")

    @pytest.mark.parametrize(
        ("requirement", "message"),
        [
            ("no-such-package>=3", r"requires 'no-such-package>=3', and no-such-package is not installed; install it"),
            ("pydantic<1.5", rf"pydantic {metadata.version('pydantic')} is installed; .* --install-requirements"),
            ("no-such-package; python_version > '3'", "no-such-package is not installed"),
            ("numpy>=1 <2", r"'numpy>=1 <2' is none: .*; write a package and its versions"),
            ("-r more.txt", r"'-r more.txt' is none"),
            ("", "'' is none"),
        ],
    )
    def test_what_is_not(self, requirement, message):
        with pytest.raises(ConfigError, match=f"reward 'r'.*{message}"):
            check_installed([requirement], "reward 'r'")

    def test_extras(self, tmp_path, monkeypatch):
        told = "Metadata-Version: 2.1\nName: with-extras\nVersion: 1\n"
        told += "Requires-Dist: no-such-package ; extra == 'one'\nRequires-Dist: pydantic ; extra == 'two'\n"
        told += "Requires-Dist: with-extras[one,all] ; extra == 'all'\n"
        (tmp_path / "with_extras-1.dist-info").mkdir()
        (tmp_path / "with_extras-1.dist-info" / "METADATA").write_text(told)
        monkeypatch.syspath_prepend(tmp_path)
        check_installed(["with-extras", "with-extras[two]"], "r")
        with pytest.raises(ConfigError, match="its extra 'one' wants 'no-such-package': no-such-package is not"):
            check_installed(["with-extras[one]"], "r")
        with pytest.raises(ConfigError, match="no-such-package is not"):
            check_installed(["with-extras[all]"], "r")

    @pytest.mark.parametrize("level", ["in_process", "warm", "isolated"])
    def test_unmet_ones_are_told_when_the_file_loads_and_with_both_ways_out(self, tmp_path, level):
        write(tmp_path, "['pydantic', 'tiny-words>=1']", top="x = 1")
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, level, install=False)
        assert "requires 'tiny-words>=1', and tiny-words is not installed" in str(caught.value)
        assert "python -m pip install 'tiny-words>=1'" in str(caught.value)
        assert "--install-requirements" in str(caught.value)

    def test_in_this_process_nothing_is_installed_though_it_is_allowed(self, tmp_path, own_cache):
        write(tmp_path, "['tiny-words']", top="x = 1")
        with pytest.raises(ConfigError, match="at the level warm or isolated"):
            load(tmp_path, "in_process")
        assert not list(own_cache.iterdir())

    def test_what_cannot_be_read_is_known_once_it_is_described(self, tmp_path):
        write(tmp_path, "NEEDS", top="NEEDS = ['tiny-words']")
        loaded = load(tmp_path, install=False)
        with pytest.raises(ConfigError, match="tiny-words is not installed"):
            check_parameters(loaded.reward)

    def test_a_text_is_no_list_of_texts(self, tmp_path):
        write(tmp_path, "'pydantic'", top="x = 1")
        with pytest.raises(ConfigError, match=r"requirements is a list of texts, .* not 'pydantic'"):
            load(tmp_path, install=False)


class TestInAnEnvironmentOfItsOwn:
    def load_both(self, folder: Path) -> list[ConfinedReward]:
        rewards = []
        for version in ("1", "2"):
            (folder / version).mkdir()
            write(folder / version, f"['tiny-words=={version}.*']")
            rewards.append(load(folder / version).reward)
        return rewards

    @pytest.mark.parametrize("strength", ["namespaces", "landlock"])
    @pytest.mark.parametrize("level", ["warm", "isolated"])
    def test_two_sets_do_not_mix(self, tmp_path, level, strength):
        if why := missing(strength):
            pytest.skip(why)
        rewards = [replace(reward, level=level) for reward in self.load_both(tmp_path)]
        scored = [asyncio.run(score(reward, strength)) for reward in rewards]
        assert [one.score for one in scored] == [1.0, 2.0]
        ids = [reward.environment.id for reward in rewards]
        assert len(set(ids)) == 2
        assert [one.sandbox for one in scored] == [
            {"level": level, "strength": strength, "environment": one} for one in ids
        ]

    def test_nothing_comes_into_the_running_interpreter(self, tmp_path):
        path, packages = list(sys.path), sorted(str(one.name) for one in metadata.distributions())
        for version, reward in zip(("1.0", "2.0"), self.load_both(tmp_path), strict=True):
            assert f"tiny-words=={version}" in reward.environment.packages
            check_parameters(reward)
        assert (sys.path, sorted(str(one.name) for one in metadata.distributions())) == (path, packages)
        assert "tiny_words" not in sys.modules
        with pytest.raises(metadata.PackageNotFoundError):
            metadata.version("tiny-words")

    def test_one_that_is_there_is_used_again_without_any_index(self, tmp_path, monkeypatch, caplog):
        made = self.load_both(tmp_path)[0].environment
        caplog.clear()
        monkeypatch.setenv("PIP_FIND_LINKS", "/not/there")
        write(tmp_path, "['Tiny_Words == 1.*', 'no-such-package; python_version < \"3\"']")
        assert load(tmp_path).reward.environment == made
        assert not caplog.records
        assert json.loads((made.folder.parent / "environment.json").read_text()) == made.to_json()

    def test_it_sees_its_requirements_and_no_other_package(self, tmp_path):
        write(tmp_path, "['tiny-words==1.*']", top="import tiny_words, yaml")
        with pytest.raises(ConfigError, match=r"No module named 'yaml'(.|\n)*name what it imports in requirements"):
            load(tmp_path)

    def test_a_package_cannot_read_those_of_the_running_interpreter(self, tmp_path):
        write(tmp_path, "['peeking']", top="import peeking")
        with pytest.raises(ConfigError, match=r"(FileNotFound|Permission)Error"):
            load(tmp_path)

    def test_without_requirements_there_is_none(self, tmp_path):
        write(tmp_path, "[]", "return {'score': 1.0}", top="import yaml")
        assert load(tmp_path).reward.environment is None

    @pytest.mark.parametrize("top", ["NEEDS = ['tiny-words']", "NEEDS = None\ntiny = ['tiny-words']"])
    def test_what_cannot_be_read_without_running_it_is_not_installed(self, tmp_path, top):
        write(tmp_path, "NEEDS", top=top)
        with pytest.raises(ConfigError, match=r"cannot be read from .*reward\.py without running it"):
            load(tmp_path)
        (tmp_path / "reward.py").write_text(
            "from reward_kit import reward_function\ndef f(messages): pass\n"
            "reward = reward_function(requirements=['tiny-words'])(f)\n"
        )
        with pytest.raises(ConfigError, match=r"cannot be read from .*reward\.py without running it"):
            load(tmp_path)


@pytest.mark.usefixtures("own_cache")
class TestABuildThatFails:
    @pytest.mark.parametrize(
        ("requirement", "message"),
        [
            ("no-such-package", "No matching distribution found for no-such-package"),
            ("tiny-words>2", r"(?s)tiny-words.*1\.0.*2\.0"),
            ("old-models", r"(?s)conflict.*old-models 1\.0 depends on pydantic<2"),
            ("shadowing", r"the package shadowing brings pydantic/_more\.py, which belongs to pydantic"),
            ("tiny-words @ file:///x.whl", "names an address, from which nothing is installed"),
        ],
    )
    def test_is_one_error_and_leaves_no_folder(self, requirement, message):
        with pytest.raises(ConfigError, match=message):
            environment_for([requirement], "reward 'r'", with_steps=False)
        assert [path.suffix for path in environments_folder().glob("*")] in ([], [".lock"])

    def test_source_packages_are_not_built(self, tmp_path, index, monkeypatch):
        (tmp_path / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        subprocess.run(["tar", "czf", tmp_path / "sourced-1.0.tar.gz", "-C", tmp_path, "setup.py"], check=True)
        monkeypatch.setenv("PIP_FIND_LINKS", f"{index} {tmp_path}")
        monkeypatch.setenv("PIP_NO_BINARY", ":all:")
        with pytest.raises(ConfigError, match="No matching distribution found for sourced"):
            environment_for(["sourced"], "reward 'r'", with_steps=False)
        assert not (tmp_path / "ran").exists()

    def test_a_cache_that_cannot_be_written_is_named(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.raises(ConfigError, match="set XDG_CACHE_HOME to a folder that can be written"):
            environment_for(["tiny-words"], "reward 'r'", with_steps=False)

    def test_a_build_that_is_killed_is_not_used_and_stands_in_nobodys_way(self):
        code = "from reward_kit.reward_agent.package_environment import environment_for\n"
        code += "environment_for(['tiny-words'], 'r', with_steps=False)"
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.settimeout(60)
            address = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
            waits = {name: value for name, value in os.environ.items() if name != "PIP_NO_INDEX"}
            process = subprocess.Popen([sys.executable, "-c", code], env=waits | {"PIP_INDEX_URL": address})
            connection, _ = silent.accept()
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert [path for path in environments_folder().iterdir() if path.suffix == ".partial"]
            assert not list(environments_folder().glob("*/environment.json"))
            # Its pip was killed too, and so nobody holds the lock.
            made = environment_for(["tiny-words"], "r", with_steps=False)
            connection.close()
        assert made.folder.is_dir()
        assert sorted(path.suffix for path in environments_folder().iterdir()) == ["", ".lock"]

    def test_one_that_was_changed_afterwards_is_made_again(self):
        made = environment_for(["tiny-words"], "r", with_steps=False)
        (made.folder / "tiny_words-2.0.dist-info" / "METADATA").unlink()
        assert environment_for(["tiny-words"], "r", with_steps=False) == made
        assert (made.folder / "tiny_words-2.0.dist-info" / "METADATA").exists()


@pytest.mark.usefixtures("own_cache")
def test_of_several_at_once_one_makes_it(caplog):
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: environment_for(["tiny-words"], "r", with_steps=False), range(4)))
    assert all(one == made[0] for one in made)
    assert len(caplog.records) == 1


@pytest.mark.campaign
@pytest.mark.usefixtures("own_cache")
def test_an_interpreter_without_pip_borrows_one(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    made = environment_for(["tiny-words"], "r", with_steps=False)
    assert "tiny-words==2.0" in made.packages
    assert sorted(path.name for path in made.folder.parent.iterdir()) == ["environment.json", "packages"]


def test_steps_bring_numpy():
    with pytest.raises(ConfigError, match="numpy"):  # which this index has not
        environment_for(["tiny-words"], "r", with_steps=True)
