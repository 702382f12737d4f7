"""Resolution of a reward given by name or as an object."""

from __future__ import annotations

import logging

import pytest

from reward_kit.errors import ConfigError
from reward_kit.reward_agent.loading import SandboxChoice, resolve_reward
from reward_kit.reward_agent.sandboxed import SandboxedReward
from reward_kit.typed_interface import reward_function, reward_spec

REWARD = """
from reward_kit import reward_function
print("a line for the user")

@reward_function
def graded(messages, bonus: float = 0.0):
    return {"score": bonus}
"""


@reward_function(id="given", sandbox="isolated")
def wants_walls(messages, bonus: float = 0.0):
    return {"score": bonus}


def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return bonus


@reward_function(requirements=["no-such-package"])
def wants_packages(messages):
    return {"score": 0.0}


def test_reward_given_by_name_is_sandboxed_and_its_notes_are_logged(tmp_path, caplog):
    (tmp_path / "graded.py").write_text(REWARD)
    with caplog.at_level(logging.WARNING, logger="reward_kit"):
        found = resolve_reward("graded.py:graded", tmp_path, options={"bonus": 0.5})
    assert isinstance(found, SandboxedReward)
    assert "a line for the user" in caplog.text
    here = resolve_reward("graded.py:graded", tmp_path, SandboxChoice(level="in_process"), {"bonus": 0.5})
    assert here.options == {"bonus": 0.5}


@pytest.mark.parametrize("given", [compute_score, wants_walls, reward_spec(wants_walls)])
def test_every_reward_form_accepts_options_and_a_time_limit(given):
    found = resolve_reward(given, choice=SandboxChoice(reward_time_s=5.0), options={"bonus": 0.5})
    assert found.options == {"bonus": 0.5}


def test_missing_sandbox_is_logged(caplog):
    @reward_function(id="given alone", sandbox="isolated")
    def alone(messages):
        return {"score": 0.0}

    with caplog.at_level(logging.WARNING, logger="reward_kit"):
        resolve_reward(alone)
    assert "requests isolated but runs in_process" in caplog.text


@pytest.mark.parametrize(
    ("given", "values", "message"),
    [
        (wants_walls, {"folder": "."}, "folder has no effect on a loaded reward; pass a reference such as 'file"),
        (wants_walls, {"choice": SandboxChoice(level="warm")}, "choice has no effect on a loaded reward"),
        (wants_walls, {"choice": SandboxChoice(level="warm"), "choice_is": "sandbox"}, "sandbox has no effect"),
        (wants_walls, {"options": {"bonsu": 1}}, "no option 'bonsu'; did you mean 'bonus'"),
        (wants_packages, {}, "requires 'no-such-package'"),
    ],
)
def test_arguments_without_effect_and_missing_values_are_rejected(given, values, message):
    with pytest.raises(ConfigError, match=message):
        resolve_reward(given, **values)
