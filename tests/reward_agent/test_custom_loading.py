"""Which `compute_score` is refused when it is loaded: slips in names, what cannot be called, judges behind walls."""

from __future__ import annotations

from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.reward_agent.custom_rewards import build_spec
from reward_kit.reward_agent.loading import SandboxChoice, load_custom_reward
from reward_kit.reward_agent.scoring import check_parameters
from reward_kit.reward_agent.sources import refuse_network

IN_PROCESS = SandboxChoice(level="in_process")

BAD = {
    "def compute_score(solution): ...": "does not take 'solution_str'",
    "def compute_score(solution_str, /): ...": "passed by name",
    "def compute_score(solution_str: 'Nowhere'): ...": "cannot be resolved",
    "class compute_score:\n def __init__(self, url): ...\n def compute_score(self, solution_str): ...": "without arg",
    "class compute_score:\n def compute_score(self, solution): ...": "does not take 'solution_str'",
    "class compute_score:\n def compute_score(self, solution_str): ...\n async def log(self, score): ...": "is async",
    "compute_score = 3": "a reward must be a function",
    "": "has no 'compute_score'",
}


@pytest.mark.parametrize("text", BAD)
def test_a_form_that_cannot_be_called_is_refused_when_it_is_loaded(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.py").write_text(text)
    with pytest.raises(ConfigError, match=BAD[text]):
        load_custom_reward("reward.py", folder=tmp_path, choice=IN_PROCESS)


SLIPS = {
    "def mine(solution_string): ...": "f.py:1: mine takes 'solution_string' instead of 'solution_str'",
    "def mine(solution_str, groundtruth=None): ...": "unknown parameter 'groundtruth'; .*'ground_truth'",
    "def mine(solution_str, extra_infos=None): ...": "'extra_infos' cannot be combined with .*; write 'extra_info'",
    "def mine(solution_str, solution_strs): ...": "'solution_str' cannot be combined with 'solution_strs'",
    "class mine:\n def computescore(self, solution_str): ...": "'computescore'; did you mean 'comp",
    "class mine:\n def compute_score(solution_str): ...": "is 'solution_str'; the first parameter of a method is self",
}
GROUP_SLIPS = {
    "def postprocess_scores(self, scores): ...": "unused method 'postprocess_scores'",
    "def post_process_scores(self): ...": r"post_process_scores\(self, scores\) takes the scores: too many positional",
    "def post_process_scores(self, scores, group): ...": "takes the scores: missing a required argument: 'group'",
    "post_process_scores = 3": "post_process_scores must be a method, not an? int; write def",
}


@pytest.mark.parametrize("text", SLIPS)
def test_a_slip_in_a_name_is_told_and_never_a_parameter_that_keeps_its_default(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.py").write_text(text)
    with pytest.raises(ConfigError, match=SLIPS[text]):
        load_custom_reward("f.py", "mine", folder=tmp_path, choice=IN_PROCESS)


@pytest.mark.parametrize("text", GROUP_SLIPS)
def test_a_post_processing_that_would_not_or_could_not_be_called_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.py").write_text(f"class mine:\n def compute_score(self, solution_str): ...\n {text}")
    with pytest.raises(ConfigError, match=GROUP_SLIPS[text]):
        load_custom_reward("f.py", "mine", folder=tmp_path, choice=IN_PROCESS)


def test_names_that_are_only_alike_are_options_and_helpers() -> None:
    class Alike:
        def compute_score(self, solution_str: str, source: str = "", extra_args: str = "", truth: str = "") -> float:
            return 1.0

        @staticmethod
        def post_process_scores(scores: list[float]) -> list[float]:
            return self_scores(scores)

        def _post_process_score(self) -> None: ...

    def self_scores(scores: list[float]) -> list[float]:
        return scores

    assert build_spec(Alike).mode == "batch"
    assert {"source", "extra_args", "truth"} <= build_spec(Alike).parameters


def test_an_unnamed_file_or_function_is_told_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"custom_reward_function\.path is ''"):
        load_custom_reward("")
    with pytest.raises(ConfigError, match=r"custom_reward_function\.name is ' '"):
        load_custom_reward("reward.py", " ")


def test_a_required_ground_truth_and_a_required_option_are_asked_for() -> None:
    def compute_score(solution_str: str, ground_truth: str, model: str) -> float:
        return 1.0

    spec = build_spec(compute_score)
    assert spec.required == {"ground_truth", "model"}
    with pytest.raises(ConfigError, match="-O model="):
        check_parameters(spec)


JUDGES = (
    "import openai\ndef compute_score(solution_str): ...",
    "def compute_score(solution_str):\n from urllib.request import urlopen",
    "from openai import OpenAI\nclass compute_score:\n def compute_score(self, solution_str): ...",
)


@pytest.mark.parametrize("text", JUDGES)
def test_a_judge_behind_walls_is_refused_with_the_key_that_lets_it_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.py").write_text(text)
    with pytest.raises(ConfigError, match=r"unavailable at the level warm: .*--sandbox in_process"):
        load_custom_reward("reward.py", folder=tmp_path)
    assert load_custom_reward("reward.py", folder=tmp_path, choice=IN_PROCESS).reward.id == "compute_score"


def test_other_rewards_may_import_what_they_like() -> None:
    refuse_network("import requests\ndef mine(messages): ...", "mine", "f.py", "warm")
    refuse_network("import urllib.parse\ndef mine(solution_str): ...", "mine", "f.py", "warm")
    refuse_network("def mine(solution_str: …", "mine", "f.py", "warm")
