"""Reward managers of verl and reward-kit on verl's `DataProto`; runs in verl's Python with reward-kit on the path."""

from __future__ import annotations

from typing import Any

import numpy as np
from omegaconf import OmegaConf
from request_loop import answer_all
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from verl.protocol import DataProto
from verl.workers.reward_manager import get_reward_manager_cls

from reward_kit.rl.reward_manager import load_reward_manager

WORDS = {"<pad>": 0, "<eos>": 1, **{f"word{number}": number for number in range(2, 13)}}
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(WORDS, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
)
BUFFER = {"enable": True, "len": 3, "penalty_factor": 0.5, "log": True}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """Return a score that depends on every argument of the manager."""
    words = solution_str.split()
    return {"score": words.count(ground_truth) + len(words) / 16.0 + 0.25 * (data_source == "b"), "words": len(words)}


def compute_scores(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any = None) -> list[Any]:
    """Return the scores of a whole batch."""
    return [compute_score(*each) for each in zip(data_sources, solution_strs, ground_truths, strict=True)]


def compute_number(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return a plain number; for other values verl's prime manager returns zeros for all rows."""
    return float(compute_score(data_source, solution_str, ground_truth)["score"])


def proto(tensors: dict[str, Tensor], others: dict[str, Any]) -> DataProto:
    """Return a new batch for each call, since verl's managers modify their input."""
    objects = {}
    for name, values in others.items():
        objects[name] = np.empty(len(values), dtype=object)
        objects[name][:] = [dict(value) if isinstance(value, dict) else value for value in values]
    return DataProto.from_dict(tensors=tensors, non_tensors=objects)


def episode(tensors: dict[str, Tensor], others: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the rewards of the `episode` manager of reward-kit."""
    found = load_reward_manager("episode", TOKENIZER, 0, **options)(proto(tensors, others), return_dict=True)
    return {"rewards": found["reward_tensor"], "is_scored": found["reward_extra_info"]["is_scored"].tolist()}


def single_turn(name: str, tensors: dict[str, Tensor], others: dict[str, Any], longest: int = 0) -> dict[str, Any]:
    """Return the rewards of a verl manager and of its counterpart."""
    score = {"batch": compute_scores, "prime": compute_number}.get(name, compute_score)
    of_verl: dict[str, Any] = {}
    of_ours: dict[str, Any] = {}
    if name == "dapo":
        of_verl = {"max_resp_len": longest, "overlong_buffer_cfg": OmegaConf.create(BUFFER)}
        of_ours = {"max_response_length": longest, "overlong_buffer_len": 3, "overlong_penalty_factor": 0.5}
    theirs = get_reward_manager_cls(name)(TOKENIZER, 0, score, **of_verl)(proto(tensors, others), return_dict=True)
    ours = load_reward_manager(name, TOKENIZER, 0, compute_score=score, **of_ours)
    found = ours(proto(tensors, others), return_dict=True)
    return {"theirs": theirs["reward_tensor"], "ours": found["reward_tensor"]}


if __name__ == "__main__":
    answer_all({"episode": episode, "single_turn": single_turn})
