"""Programs written for RLlib's `SingleAgentEpisode`, run on both classes with only the import changed.

    python rllib_programs.py MODULE    prints what the class of that module gave, as JSON

What RLlib gives stands in `rllib_outputs.json`. Left out is what is known to differ: see docs/concepts/episodes.md.
"""

import importlib
import json
import sys

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

SPACES = {
    "number": (Discrete(7), Discrete(3)),
    "vector": (Box(-9, 9, (2,), np.float32), MultiDiscrete([2, 3])),
    "dict": (Dict({"image": Box(-9, 9, (2, 2), np.float32), "n": Discrete(7)}), Tuple((Discrete(3), Discrete(2)))),
}
OBSERVATIONS = {
    "number": lambda t: t % 7,
    "vector": lambda t: np.full(2, t / 2, np.float32),
    "dict": lambda t: {"image": np.full((2, 2), t, np.float32), "n": t % 7},
}
ACTIONS = {
    "number": lambda t: t % 3,
    "vector": lambda t: np.array([t % 2, t % 3]),
    "dict": lambda t: (t % 3, t % 2),
}


def plain(value):
    """Convert arrays and numbers to JSON; an array by its items and number kind."""
    if isinstance(value, np.ndarray) and value.ndim:
        return {"kind": value.dtype.kind, "items": value.tolist()}
    if isinstance(value, np.ndarray | np.generic):
        return value.item()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def tried(call, *args, **kwargs):
    """Return the result of the call, or that it raises IndexError."""
    try:
        return plain(call(*args, **kwargs))
    except IndexError:
        return "IndexError"


def filled(Episode, kind, steps, spaces=False, **kwargs):
    """Return an episode filled as by an environment runner."""
    if spaces:
        kwargs |= {"observation_space": SPACES[kind][0], "action_space": SPACES[kind][1]}
    episode = Episode("e", **kwargs)
    episode.add_env_reset(OBSERVATIONS[kind](0), {"t": 0})
    add(episode, kind, 0, steps)
    return episode


def add(episode, kind, start, stop, last=None):
    for t in range(start, stop):
        episode.add_env_step(
            OBSERVATIONS[kind](t + 1),
            ACTIONS[kind](t),
            t / 4,
            {"t": t + 1},
            terminated=t + 1 == last,
            extra_model_outputs={"logp": -t / 8, "logits": np.array([t, 1.0])},
        )


def summary(episode):
    """Return the results of all getters without arguments."""
    return plain(
        {
            "id": episode.id_,
            "len": len(episode),
            "t": [episode.t_started, episode.t],
            "done": [episode.is_terminated, episode.is_truncated, episode.is_done, episode.is_reset],
            "steps": [episode.env_steps(), episode.agent_steps()],
            "return": float(episode.get_return()),
            "observations": episode.get_observations(),
            "infos": episode.get_infos(),
            "actions": episode.get_actions(),
            "rewards": episode.get_rewards(),
            "outputs": {key: episode.get_extra_model_outputs(key) for key in sorted(episode.extra_model_outputs)},
        }
    )


def states(make):
    """Return the episode as it is, and stored as arrays."""
    return [make(), make().to_numpy()]


def lookback_of_three(Episode, kind):
    """Return five steps, the first three of them lookback."""
    whole = filled(Episode, kind, 3)
    chunk = whole.cut(3)
    chunk.observation_space, chunk.action_space = SPACES[kind]
    add(chunk, kind, 3, 5)
    return chunk


def getters(Episode, kind):
    found = {}
    parts = [slice(a, b) for a in (None, -4, -1, 0, 1, 7) for b in (None, -2, 0, 1, 2, 8)]
    parts += [slice(0, 4, 2), slice(3, 0, -1), slice(-1, -4, -2)]
    for name, make in {
        "plain": lambda: filled(Episode, kind, 4),
        "lookback": lambda: lookback_of_three(Episode, kind),
    }.items():
        for state, episode in zip(("list", "numpy"), states(make), strict=True):
            asked = {
                "ints": [tried(episode.get_observations, i) for i in range(-5, 9)],
                "rewards": [tried(episode.get_rewards, i) for i in range(-5, 9)],
                "slices": [tried(episode.get_actions, part) for part in parts],
                "lists": [tried(episode.get_observations, [0, -1, 1]), tried(episode.get_infos, [1, 0, -1])],
                "outputs": [tried(episode.get_extra_model_outputs, "logits", i) for i in (-1, 0, slice(0, 2), [1, 0])],
                "infos": [tried(episode.get_infos, i) for i in (-1, 0, slice(-2, None))],
            }
            if name == "lookback":
                asked["back"] = [tried(episode.get_rewards, i, neg_index_as_lookback=True) for i in range(-3, 2)]
                back = [slice(-2, 0), slice(-3, 1), slice(-1, None), slice(0, 2)]
                asked["back slices"] = [tried(episode.get_actions, i, neg_index_as_lookback=True) for i in back]
                asked["stack"] = [
                    tried(episode.get_observations, slice(t - 4, t), neg_index_as_lookback=True, fill=0.0)
                    for t in range(3)
                ]
                asked["filled"] = [tried(episode.get_observations, i, fill=0) for i in (-1, 0, 9)]
            found[f"{name} {state}"] = asked
    return found


def one_hot(Episode, kind):
    found = []
    for episode in states(lambda: filled(Episode, kind, 4, spaces=True)):
        found.append(tried(episode.get_actions, slice(0, 3), one_hot_discrete=True))
        found.append(
            tried(episode.get_actions, slice(-2, 2), one_hot_discrete=True, neg_index_as_lookback=True, fill=0)
        )
        found.append(tried(episode.get_actions, 9, one_hot_discrete=True, fill=0.0))
        found.append(tried(episode.get_observations, slice(1, 7), fill=0.0))
    return found


def runner(Episode, kind):
    """Cut fragments of three steps as an environment runner does, store them as arrays, and concatenate them."""
    found, done, chunks = [], 0, []
    episode = filled(Episode, kind, 0)
    for horizon in (1, 0, 5, 2):
        stop = done + 3
        for t in range(done, stop):
            found.append(plain([episode.get_observations(-1), episode.get_infos(-1)]))
            if t:
                found.append(tried(episode.get_rewards, slice(-2, None), fill=0.0))
            add(episode, kind, t, t + 1, last=12)
        done = stop
        going_on = episode.cut(len_lookback_buffer=horizon) if not episode.is_done else None
        episode.custom_data["fragment"] = done
        episode.validate()
        chunks.append(episode)
        found.append(summary(episode))
        if going_on is not None:
            found.append(summary(going_on))
            found.append(tried(going_on.get_actions, slice(-2, 0), neg_index_as_lookback=True))
            episode = going_on
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole.concat_episode(chunk)
    found.append(summary(whole))
    found.append(plain(dict(whole.custom_data)))
    found.append(summary(whole.to_numpy()))
    return found


def slices(Episode, kind):
    found = []
    for make in (lambda: filled(Episode, kind, 5), lambda: lookback_of_three(Episode, kind)):
        # RLlib fails on a slice with a lookback of dicts that are stored as arrays.
        for episode in [make()] if kind == "dict" else states(make):
            for part in (slice(1, 2), slice(None), slice(0, 2), slice(1, None), slice(-1, None), slice(None, -1)):
                for lookback in (None, 0, 1, 2):
                    chunk = episode.slice(part, len_lookback_buffer=lookback)
                    found.append(summary(chunk))
                    found.append(tried(chunk.get_rewards, slice(-2, 0), neg_index_as_lookback=True))
                found.append(summary(episode[part]))
    return found


def learner(Episode, kind):
    """Read and write as a learner does."""
    found = []
    for episode in states(lambda: filled(Episode, kind, 4)):
        columns = dict(episode.get_data_dict())
        columns["eps_id"] = list(columns["eps_id"])
        found.append(plain(columns))
        rewards = np.asarray(episode.get_rewards())
        returns = np.cumsum(rewards[::-1] * 0.5)[::-1]
        data = np.asarray if episode.is_numpy else list
        episode.set_rewards(new_data=data(returns))
        episode.set_rewards(new_data=9.0, at_indices=1)
        episode.set_rewards(new_data=data([7.0, 8.0]), at_indices=slice(2, 4))
        episode.set_rewards(new_data=[6.0, 5.0], at_indices=[0, -1])
        episode.set_actions(new_data=ACTIONS[kind](2), at_indices=-1)
        episode.set_observations(new_data=OBSERVATIONS[kind](5), at_indices=0)
        episode.set_extra_model_outputs(key="logp", new_data=-5.0, at_indices=0)
        found.append(tried(episode.set_rewards, new_data=data([1.0]), at_indices=slice(0, 2)))
        found.append(summary(episode))
    return found


def outputs_of(Episode):
    """Return the output of every program, by program and kind of data."""
    programs = (getters, one_hot, runner, slices, learner)
    return {f"{run.__name__} {kind}": run(Episode, kind) for run in programs for kind in SPACES}


if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    print(json.dumps(outputs_of(module.SingleAgentEpisode), sort_keys=True))
