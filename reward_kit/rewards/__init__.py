"""Built-in rewards, in one module per family. Each reward is an ordinary reward function with keyword options.

Set options with `reward_options:` in a task file, or with `reward_kit.with_options` in code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_names

if TYPE_CHECKING:
    from reward_kit.rewards.answers import choice_answer as choice_answer
    from reward_kit.rewards.answers import exact_answer as exact_answer
    from reward_kit.rewards.answers import list_answer as list_answer
    from reward_kit.rewards.code import program_code as program_code
    from reward_kit.rewards.code import python_code as python_code
    from reward_kit.rewards.combinators import clip as clip
    from reward_kit.rewards.combinators import first_of as first_of
    from reward_kit.rewards.combinators import gate as gate
    from reward_kit.rewards.combinators import weighted as weighted
    from reward_kit.rewards.final_state import final_state_matches as final_state_matches
    from reward_kit.rewards.final_state import harbor_tests as harbor_tests
    from reward_kit.rewards.formats import contains_all as contains_all
    from reward_kit.rewards.formats import contains_none as contains_none
    from reward_kit.rewards.formats import no_repetition as no_repetition
    from reward_kit.rewards.formats import reasoning_steps as reasoning_steps
    from reward_kit.rewards.formats import regex_format as regex_format
    from reward_kit.rewards.formats import tag_format as tag_format
    from reward_kit.rewards.json_answers import json_answer as json_answer
    from reward_kit.rewards.json_answers import json_schema_answer as json_schema_answer
    from reward_kit.rewards.judges import grounded_judge as grounded_judge
    from reward_kit.rewards.judges import group_judge as group_judge
    from reward_kit.rewards.judges import llm_judge as llm_judge
    from reward_kit.rewards.judges import pairwise_judge as pairwise_judge
    from reward_kit.rewards.languages import same_language as same_language
    from reward_kit.rewards.lengths import cosine_length as cosine_length
    from reward_kit.rewards.lengths import length_within as length_within
    from reward_kit.rewards.lengths import shortest_in_group as shortest_in_group
    from reward_kit.rewards.math_answers import math_answer as math_answer
    from reward_kit.rewards.math_answers import number_answer as number_answer
    from reward_kit.rewards.sql import sql_result as sql_result
    from reward_kit.rewards.tool_calls import tool_calls_match as tool_calls_match
    from reward_kit.rewards.tool_paths import ToolAssertion as ToolAssertion
    from reward_kit.rewards.tool_paths import tool_path as tool_path
    from reward_kit.rewards.trajectory import Milestone as Milestone
    from reward_kit.rewards.trajectory import environment_score as environment_score
    from reward_kit.rewards.trajectory import few_steps as few_steps
    from reward_kit.rewards.trajectory import milestones as milestones
    from reward_kit.rewards.trajectory import no_tool_errors as no_tool_errors

_MODULES = {
    "answers": "choice_answer exact_answer list_answer",
    "code": "program_code python_code",
    "combinators": "clip first_of gate weighted",
    "final_state": "final_state_matches harbor_tests",
    "formats": "contains_all contains_none no_repetition reasoning_steps regex_format tag_format",
    "json_answers": "json_answer json_schema_answer",
    "judges": "grounded_judge group_judge llm_judge pairwise_judge",
    "languages": "same_language",
    "lengths": "cosine_length length_within shortest_in_group",
    "math_answers": "math_answer number_answer",
    "sql": "sql_result",
    "tool_calls": "tool_calls_match",
    "tool_paths": "ToolAssertion tool_path",
    "trajectory": "Milestone environment_score few_steps milestones no_tool_errors",
}
HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
"""Maps the name of each reward to its module."""
__all__ = sorted(HOMES)
__getattr__, __dir__ = lazy_names(__name__, HOMES)
