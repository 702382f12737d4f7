"""Validation of `compute_score` functions at loading."""

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
    "def compute_score(solution): ...": "has no parameter 'solution_str'",
    "def compute_score(solution_str, /): ...": "passed by name",
    "def compute_score(solution_str: 'Nowhere'): ...": "cannot be resolved",
    "class compute_score:\n def __init__(self, url): ...\n def compute_score(self, solution_str): ...": "without arg",
    "class compute_score:\n def compute_score(self, solution): ...": "has no parameter 'solution_str'",
    "class compute_score:\n def compute_score(self, solution_str): ...\n async def log(self, score): ...": "is async",
    "compute_score = 3": "a reward must be a function",
    "": "has no 'compute_score'",
}


@pytest.mark.parametrize("text", BAD)
def test_uncallable_form_is_rejected_at_loading(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.py").write_text(text)
    with pytest.raises(ConfigError, match=BAD[text]):
        load_custom_reward("reward.py", folder=tmp_path, choice=IN_PROCESS)


SLIPS = {
    "def mine(solution_string): ...": "f.py:1: mine has the parameter 'solution_string' instead of 'solution_str'",
    "def mine(solution_str, groundtruth=None): ...": "unknown parameter 'groundtruth'; .*'ground_truth'",
    "def mine(solution_str, extra_infos=None): ...": "'extra_infos' cannot be combined with .*; write 'extra_info'",
    "def mine(solution_str, solution_strs): ...": "'solution_str' cannot be combined with 'solution_strs'",
    "class mine:\n def computescore(self, solution_str): ...": "'computescore'; did you mean 'comp",
    "class mine:\n def compute_score(solution_str): ...": "the first parameter of a method must be self",
}
GROUP_SLIPS = {
    "def postprocess_scores(self, scores): ...": "unused method 'postprocess_scores'",
    "def post_process_scores(self): ...": r"post_process_scores\(self, scores\) must accept the scores: too many pos",
    "def post_process_scores(self, scores, group): ...": "must accept the scores: missing a required argument: 'group'",
    "post_process_scores = 3": "post_process_scores must be a method, not an? int; write def",
}


@pytest.mark.parametrize("text", SLIPS)
def test_misspelled_parameter_is_rejected_even_with_a_default(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.py").write_text(text)
    with pytest.raises(ConfigError, match=SLIPS[text]):
        load_custom_reward("f.py", "mine", folder=tmp_path, choice=IN_PROCESS)


@pytest.mark.parametrize("text", GROUP_SLIPS)
def test_invalid_post_process_scores_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.py").write_text(f"class mine:\n def compute_score(self, solution_str): ...\n {text}")
    with pytest.raises(ConfigError, match=GROUP_SLIPS[text]):
        load_custom_reward("f.py", "mine", folder=tmp_path, choice=IN_PROCESS)


def test_similar_names_are_accepted_as_options_and_helpers() -> None:
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


def test_empty_path_or_name_is_reported_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"custom_reward_function\.path must be the file of the reward, got ''"):
        load_custom_reward("")
    with pytest.raises(ConfigError, match=r"custom_reward_function\.name must be the .*, got ' '"):
        load_custom_reward("reward.py", " ")


def test_required_ground_truth_and_option_are_enforced() -> None:
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
def test_judge_in_a_sandbox_is_rejected_with_a_hint(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.py").write_text(text)
    with pytest.raises(ConfigError, match=r"the level warm has no network; .*--sandbox in_process"):
        load_custom_reward("reward.py", folder=tmp_path)
    assert load_custom_reward("reward.py", folder=tmp_path, choice=IN_PROCESS).reward.id == "compute_score"


def test_imports_without_network_clients_are_accepted() -> None:
    refuse_network("import requests\ndef mine(messages): ...", "mine", "f.py", "warm")
    refuse_network("import urllib.parse\ndef mine(solution_str): ...", "mine", "f.py", "warm")
    refuse_network("def mine(solution_str: …", "mine", "f.py", "warm")
