"""Requirements of a reward are read without running it and checked."""

from __future__ import annotations

import textwrap
from importlib import metadata
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.models import Message
from reward_kit.reward_agent import ScoringRequest
from reward_kit.reward_agent.loading import SandboxChoice, load_reward
from reward_kit.reward_agent.requirements import check_installed
from reward_kit.reward_agent.scoring import check_parameters
from reward_kit.reward_agent.sources import declared_requirements

REQUEST = ScoringRequest("r1", [Message(role="user", content="2+2?")])


def write(folder: Path, requirements: str, body: str = "return {'score': float(tiny_words.VERSION)}", top="") -> None:
    text = f"{top or 'import tiny_words'}\nfrom reward_kit import reward_function\n"
    text += f"@reward_function(requirements={requirements})\ndef reward(messages):\n{textwrap.indent(body, '    ')}\n"
    (folder / "reward.py").write_text(text)


def load(folder: Path, level: str = "warm"):
    return load_reward("reward.py:reward", folder, SandboxChoice(level=level))


class TestReading:
    @pytest.mark.parametrize(
        ("text", "name", "requirements"),
        [
            ("@reward_function(requirements=['a>=1', 'b'])\ndef f(messages): pass", "f", ("a>=1", "b")),
            ("@rk.rf(id='x', requirements=('a',))\nasync def f(messages, *, step_data): pass", "f", ("a",)),
            ("@reward_function(requirements=None)\ndef f(messages): pass", "f", ()),
            ("class A:\n  @r(requirements=['a'])\n  class B:\n    def score(self, messages): pass", "A.B", ("a",)),
            ("try:\n  import x\nexcept E:\n  @r(requirements=['a'])\n  def f(messages): pass", "f", ("a",)),
            ("@r(requirements=['a'])\ndef f(messages): pass\n@r\ndef f(messages): pass", "f", ()),
            # These can only be known by running the text, and are checked after it was described.
            ("@r(requirements=NEEDS)\ndef f(messages): pass", "f", ()),
            ("@r(requirements=['a' + version])\ndef f(messages): pass", "f", ()),
            ("@r(requirements='a')\ndef f(messages): pass", "f", ()),
            ("@r(**options)\ndef f(messages): pass", "f", ()),
            ("f = r(requirements=['a'])(g)", "f", ()),
            ("def f(:", "f", ()),
        ],
    )
    def test_requirements_are_read_from_a_definition(self, text, name, requirements):
        assert declared_requirements(text, name) == requirements


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
    def test_installed_requirements_are_accepted(self, requirement):
        check_installed([requirement], "reward 'r'")

    @pytest.mark.parametrize(
        ("requirement", "message"),
        [
            ("no-such-package>=3", r"requires 'no-such-package>=3', but no-such-package is not installed; run"),
            ("pydantic<1.5", rf"pydantic {metadata.version('pydantic')} is installed; run"),
            ("no-such-package; python_version > '3'", "no-such-package is not installed"),
            ("numpy>=1 <2", r"'numpy>=1 <2' is malformed: .*; write a package and its versions"),
            ("-r more.txt", r"'-r more.txt' is malformed"),
            ("", "'' is malformed"),
        ],
    )
    def test_missing_requirements_are_rejected(self, requirement, message):
        with pytest.raises(ConfigError, match=f"reward 'r'.*{message}"):
            check_installed([requirement], "reward 'r'")

    def test_requirements_of_extras_are_checked(self, tmp_path, monkeypatch):
        told = "Metadata-Version: 2.1\nName: with-extras\nVersion: 1\n"
        told += "Requires-Dist: no-such-package ; extra == 'one'\nRequires-Dist: pydantic ; extra == 'two'\n"
        told += "Requires-Dist: with-extras[one,all] ; extra == 'all'\n"
        (tmp_path / "with_extras-1.dist-info").mkdir()
        (tmp_path / "with_extras-1.dist-info" / "METADATA").write_text(told)
        monkeypatch.syspath_prepend(tmp_path)
        check_installed(["with-extras", "with-extras[two]"], "r")
        with pytest.raises(ConfigError, match="its extra 'one' requires 'no-such-package': no-such-package is not"):
            check_installed(["with-extras[one]"], "r")
        with pytest.raises(ConfigError, match="no-such-package is not"):
            check_installed(["with-extras[all]"], "r")

    @pytest.mark.parametrize("level", ["in_process", "warm", "isolated"])
    def test_missing_requirement_is_reported_at_loading_with_both_remedies(self, tmp_path, level):
        write(tmp_path, "['pydantic', 'tiny-words>=1']", top="x = 1")
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, level)
        assert "requires 'tiny-words>=1', but tiny-words is not installed" in str(caught.value)
        assert "python -m pip install 'tiny-words>=1'" in str(caught.value)
        assert "reward-kit serve" in str(caught.value)

    def test_dynamic_requirements_are_checked_after_loading(self, tmp_path):
        write(tmp_path, "NEEDS", top="NEEDS = ['tiny-words']")
        loaded = load(tmp_path)
        with pytest.raises(ConfigError, match="tiny-words is not installed"):
            check_parameters(loaded.reward)

    def test_requirements_must_be_a_list(self, tmp_path):
        write(tmp_path, "'pydantic'", top="x = 1")
        with pytest.raises(ConfigError, match=r"requirements must be a list of strings, .* got 'pydantic'"):
            load(tmp_path)
