"""Test the checks of TRL rollouts and verifiers traces made from recorded episodes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reward_kit.checks.rows import check_foreign_file, check_trl_rollout, check_verifiers_trace
from reward_kit.errors import ConfigError
from tests.checks.recording import policy, record


def trl() -> dict[str, Any]:
    """Return the output of a `rollout_func` for the recorded episodes."""
    rows = [row for episode in record().episodes for row in episode.tokens.rows()]
    return {
        "prompt_ids": [row.prompt_ids.tolist() for row in rows],
        "completion_ids": [row.completion_ids.tolist() for row in rows],
        "logprobs": [row.logprobs.tolist() for row in rows],
        "env_mask": [row.action_mask.tolist() for row in rows],
    }


def trajectory() -> dict[str, Any]:
    """Return the long episode as a state of verifiers v0."""
    steps = []
    for turn in record().long.tokens.turns().values():
        assert turn.logprobs is not None
        tokens = {
            "prompt_ids": turn.prompt_ids.tolist(),
            "prompt_mask": [0] * len(turn.prompt_ids),
            "completion_ids": turn.token_ids.tolist(),
            "completion_mask": [1] * len(turn.token_ids),
            "completion_logprobs": turn.logprobs.tolist(),
        }
        steps.append({"prompt": [], "completion": [], "tokens": tokens, "reward": None, "advantage": 0.5})
    return {"trajectory": steps}


def trace() -> dict[str, Any]:
    """Return the long episode as a trace of verifiers v1, with a second branch from its first action."""
    tokens = record().long.tokens
    nodes: list[dict[str, Any]] = []
    before = 0
    for span in tokens.spans:
        for role, start, stop in (("user", before, span.start), ("assistant", span.start, span.stop)):
            is_sampled = role == "assistant"
            nodes.append(
                {
                    "parent": len(nodes) - 1 if nodes else None,
                    "message": {"role": role, "content": ""},
                    "sampled": is_sampled,
                    "token_ids": list(tokens.ids[start:stop]),
                    "mask": [is_sampled] * (stop - start),
                    "logprobs": list(tokens.logprobs[start:stop]) if is_sampled else [],
                    "advantages": [0.5] * (stop - start) if is_sampled else None,
                }
            )
        before = span.stop
    branch = {
        "parent": 1,
        "message": {"role": "user", "content": ""},
        "sampled": False,
        "token_ids": [3],
        "mask": [False],
    }
    return {"id": "t", "nodes": [*nodes, branch]}


def kinds(findings: list[Any]) -> list[str]:
    return [finding.kind for finding in findings]


def test_recorded_episodes_pass_in_every_format() -> None:
    own = policy().token_logprobs
    assert check_trl_rollout(trl(), token_logprobs=own) == []
    assert check_verifiers_trace(trajectory(), token_logprobs=own) == []
    assert check_verifiers_trace(trace(), token_logprobs=own) == []


def move(key: str, distance: int) -> Callable[[dict[str, Any]], None]:
    def plant(rollout: dict[str, Any]) -> None:
        rollout[key][0] = np.roll(rollout[key][0], distance).tolist()

    return plant


def join_prompts(rollout: dict[str, Any]) -> None:
    """Concatenate the prompts of all turns without a mask, as OpenEnv's harness does."""
    turns = record().episodes[0].tokens.turns().values()
    assert len(turns) >= 2
    rollout["prompt_ids"][0] = [token for turn in turns for token in turn.prompt_ids.tolist()]
    rollout["completion_ids"][0] = [token for turn in turns for token in turn.token_ids.tolist()]
    rollout["logprobs"][0] = [value for turn in turns for value in turn.logprobs.tolist()]  # type: ignore[union-attr]
    del rollout["env_mask"]
    for key in ("prompt_ids", "completion_ids", "logprobs"):
        del rollout[key][1:]


def invert(rollout: dict[str, Any]) -> None:
    rollout["env_mask"][0] = [1 - value for value in rollout["env_mask"][0]]


def forget_the_mask(rollout: dict[str, Any]) -> None:
    rollout["env_mask"] = [[0] * len(row) for row in rollout["env_mask"][:1]]
    for key in ("prompt_ids", "completion_ids"):
        del rollout[key][1:]
    del rollout["logprobs"]


def swap(rollout: dict[str, Any]) -> None:
    rollout["logprobs"][0] = [value and value - 1.0 for value in rollout["logprobs"][0]]


def empty(rollout: dict[str, Any]) -> None:
    for key in ("completion_ids", "logprobs", "env_mask"):
        rollout[key][0] = []


TRL_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "OpenEnv's concatenated prompts": (join_prompts, "concatenated-prompts"),
    "the mask is one token late": (move("env_mask", 1), "shifted-mask"),
    "the mask is the other way round": (invert, "inverted-mask"),
    "nothing is the model's": (forget_the_mask, "inverted-mask"),
    "logprobs of other weights": (swap, "logprob-differs"),
    "one logprob too few": (lambda rollout: rollout["logprobs"][0].pop(), "length-mismatch"),
    "unique prompts in place of one for each row": (lambda rollout: rollout["prompt_ids"].pop(), "length-mismatch"),
    "an empty completion": (empty, "empty-completion"),
    "a label of -100": (lambda rollout: rollout["completion_ids"][0].__setitem__(0, -100), "token-id"),
}


@pytest.mark.parametrize("name", TRL_FAULTS)
def test_fault_in_a_trl_rollout_is_reported(name: str) -> None:
    plant, kind = TRL_FAULTS[name]
    rollout = trl()
    plant(rollout)
    assert kinds(check_trl_rollout(rollout, token_logprobs=policy().token_logprobs)) == [kind]


def test_unscored_trl_row_is_skipped() -> None:
    rollout = trl()
    forget_the_mask(rollout)
    assert kinds(check_trl_rollout({**rollout, "score": [0.0]})) == ["inverted-mask"]
    assert check_trl_rollout({**rollout, "score": [None]}) == []


def test_repetitive_prompt_is_not_split_into_several_prompts() -> None:
    rollout = {"prompt_ids": [[5, 5, 7, 1, 5, 5, 7, 1]], "completion_ids": [[7, 2]], "logprobs": [[-1.0, -1.0]]}
    assert check_trl_rollout(rollout) == []


def test_single_row_is_a_valid_trl_rollout() -> None:
    row = {"prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [0.5]}
    assert kinds(check_trl_rollout(row)) == ["logprob-positive"]


def of_step(number: int, key: str, change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def plant(state: dict[str, Any]) -> None:
        change(state["trajectory"][number]["tokens"][key])

    return plant


def drift(state: dict[str, Any]) -> None:
    del state["trajectory"][2:]
    last = state["trajectory"][1]["tokens"]
    start = len(state["trajectory"][0]["tokens"]["prompt_ids"])
    last["prompt_ids"][start : start + 3] = [7, 8]
    last["prompt_mask"].pop()
    ids = np.array([*last["prompt_ids"], *last["completion_ids"]])
    last["completion_logprobs"] = policy().token_logprobs(ids)[len(last["prompt_ids"]) :].tolist()


def learn_the_prompt(state: dict[str, Any]) -> None:
    tokens = state["trajectory"][1]["tokens"]
    tokens["prompt_mask"] = [1] * len(tokens["prompt_mask"])


STEP_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "drifted prefix": (drift, "drifted-prefix"),
    "the prompt is learnt too": (learn_the_prompt, "mask-on-prompt"),
    "one logprob too few": (of_step(1, "completion_logprobs", list.pop), "length-mismatch"),
    "a logprob above 0": (of_step(1, "completion_logprobs", lambda x: x.__setitem__(0, 0.5)), "logprob-positive"),
    "an id of -1": (of_step(0, "prompt_ids", lambda x: x.__setitem__(0, -1)), "token-id"),
    "a mask of 2": (of_step(0, "completion_mask", lambda x: x.__setitem__(0, 2)), "mask-values"),
    "a reward of NaN": (lambda state: state["trajectory"][0].update(reward=float("nan")), "reward-not-finite"),
    "a step without tokens": (lambda state: state["trajectory"][-1].update(tokens=None), "no-tokens"),
}


@pytest.mark.parametrize("name", STEP_FAULTS)
def test_fault_in_a_verifiers_trajectory_is_reported(name: str) -> None:
    plant, kind = STEP_FAULTS[name]
    state = trajectory()
    plant(state)
    assert kinds(check_verifiers_trace(state, token_logprobs=policy().token_logprobs)) == [kind]


def of_node(number: int, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda trace: trace["nodes"][number].update(values)


NODE_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "an unsampled message is trained on": (of_node(1, sampled=False), "mask-on-prompt"),
    "the mask is too long": (of_node(1, mask=[True] * 3 + [False]), "length-mismatch"),
    "logprobs off the actions": (of_node(1, logprobs=[-1.0] * 4), "length-mismatch"),
    "advantages of another node": (of_node(1, advantages=[0.5]), "length-mismatch"),
    "an advantage of NaN": (of_node(1, advantages=[float("nan")] * 3), "credit-not-finite"),
    "a parent that comes later": (of_node(1, parent=3), "tree"),
    "logprobs above 0, said once for both branches": (of_node(1, logprobs=[0.5] * 3), "logprob-positive"),
    "logprobs of other weights": (of_node(1, logprobs=[-9.0] * 3), "logprob-differs"),
}


@pytest.mark.parametrize("name", NODE_FAULTS)
def test_fault_in_a_verifiers_trace_is_reported(name: str) -> None:
    plant, kind = NODE_FAULTS[name]
    broken = trace()
    plant(broken)
    found = kinds(check_verifiers_trace(broken, token_logprobs=policy().token_logprobs))
    assert found == [kind]


@pytest.mark.parametrize(
    ("check", "given"),
    [
        (check_trl_rollout, {"prompt": []}),
        (check_trl_rollout, {**trl(), "logprobs": [[[-1.0, -2.0]]]}),
        (check_trl_rollout, {**trl(), "env_mask": "no"}),
        (check_verifiers_trace, {"completion": []}),
        (check_verifiers_trace, {"trajectory": [{"tokens": {"prompt_ids": [1]}}]}),
        (check_verifiers_trace, {"nodes": 3}),
    ],
)
def test_record_of_another_format_is_rejected(check: Callable[..., Any], given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"here\.json"):
        check(given, what="here.json")


def test_files_are_read_record_by_record(tmp_path: Path) -> None:
    wrong = copy.deepcopy(trl())
    invert(wrong)
    lines, whole = tmp_path / "r.jsonl", tmp_path / "r.json"
    lines.write_text("".join(json.dumps(record) + "\n\n" for record in (trl(), wrong)), encoding="utf-8")
    whole.write_text(json.dumps([wrong, trl()]), encoding="utf-8")
    first, second = check_foreign_file(lines, "trl")
    assert (first, kinds(second)) == ([], ["inverted-mask"]) and second[0].message.startswith("r.jsonl:3, row 0")
    assert [kinds(found) for found in check_foreign_file(whole, "trl")] == [["inverted-mask"], []]
    lines.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="not JSON"):
        list(check_foreign_file(lines, "verifiers"))
    with pytest.raises(ConfigError, match=r"did you mean 'r\.jsonl'"):
        list(check_foreign_file(tmp_path / "r.jsonll", "verifiers"))
    with pytest.raises(ConfigError, match="did you mean 'trl'"):
        list(check_foreign_file(whole, "trll"))
