"""A random program for any class with RLlib's `MultiAgentEpisode` interface, and a summary of its result.

Run with RLlib's Python, it plays the same programs against RLlib's class and ours and prints the differences.
"""

from __future__ import annotations

import random
import sys
from collections import Counter


class Stage:
    """An environment of several agents in which some wait: each acts on an observation and is rewarded later."""

    def __init__(self, rng, *, ends_early=False, agents="abcd"):
        self.rng, self.ends_early, self.agents, self.count = rng, ends_early, list(agents), 0
        self.fresh, self.waiting, self.done = set(), set(), set()
        self.is_open = True

    def value(self):
        self.count += 1
        return self.count

    def reset(self):
        seen = [agent for agent in self.agents if self.rng.random() < 0.7] or [self.agents[0]]
        self.fresh = set(seen)
        return {agent: self.value() for agent in seen}, {agent: {"info": self.value()} for agent in seen}

    def step(self, *, is_last=False):
        """Return the arguments of `add_env_step`."""
        rng = self.rng
        acting, alive = sorted(self.fresh), sorted(self.fresh | self.waiting)
        strangers = [a for a in self.agents if a not in alive and a not in self.done]
        sees = {a for a in alive if is_last or rng.random() < 0.6} or {rng.choice(alive)}
        enters = {a for a in strangers if self.is_open and rng.random() < 0.2 and not is_last}
        rewarded = sees | {a for a in (*alive, *strangers) if rng.random() < 0.5 and not (is_last and a in strangers)}
        ends = {a for a in sees if rng.random() < 0.15} if self.ends_early and len(alive) > 2 else set()
        ends = set(sorted(ends)[: len(alive) - 1])
        terminateds = dict.fromkeys(sorted(ends), True) | {"__all__": is_last}
        seeing = sorted(sees | enters)
        arguments = {
            "observations": {a: self.value() for a in seeing},
            "actions": {a: self.value() for a in acting},
            "rewards": {a: self.value() / 4 for a in sorted(rewarded)},
            "infos": {a: {"info": self.value()} for a in seeing if rng.random() < 0.7},
            "terminateds": terminateds,
            "extra_model_outputs": {a: {"value": self.value()} for a in acting},
        }
        self.done |= ends
        self.waiting = set(alive) - sees - ends
        self.fresh = (sees | enters) - ends
        return arguments


def built(kind, seed, steps, *, chunked=False, ends=False, ends_early=False, enters_late=False):
    """Return an episode of this class, or its two chunks."""
    stage = Stage(random.Random(seed), ends_early=ends_early)
    episode = kind("e")
    observations, infos = stage.reset()
    episode.add_env_reset(observations=observations, infos=infos)
    chunks = [episode]
    for t in range(steps):
        if chunked and t == max(1, steps // 2):
            chunks.append(chunks[-1].cut(len_lookback_buffer=min(1 + seed % 3, t)))
            stage.is_open = enters_late
        chunks[-1].add_env_step(**stage.step(is_last=ends and t == steps - 1))
    return chunks if chunked else episode


def readings(episode, rng, count=60):
    """Return the results of getters and counters: (call, result or the error's type)."""
    yield "len", len(episode)
    for name in ("env_t", "env_t_started", "is_terminated", "is_truncated"):
        yield name, getattr(episode, name)
    for name in ("agent_steps", "env_steps", "get_agents_to_act", "get_agents_that_stepped", "get_terminateds"):
        yield name, getattr(episode, name)()
    yield "get_return", (episode.get_return(), episode.get_return(include_hanging_rewards=True))
    for agent, single in sorted(episode.agent_episodes.items()):
        tracks = ("get_observations", "get_infos", "get_actions", "get_rewards")
        everything = slice(-single.observations.lookback, None)
        for name in tracks:
            rest = slice(-single.observations.lookback, None) if name in tracks[:2] else everything
            yield (agent, name), plain(getattr(single, name)(rest, neg_index_as_lookback=True))
        yield (agent, "times"), (single.t_started, single.t, len(single), single.is_done, single.module_id)
        times = episode.env_t_to_agent_t[agent]
        seen = [str(t) for t in times.data]
        yield (agent, "map"), (seen, times.lookback)
    for _ in range(count):
        name, arguments = call(rng, len(episode))
        yield (name, str(arguments)), outcome(getattr(episode, name), arguments)


def call(rng, steps):
    """Return a getter and its arguments."""
    name = rng.choice(["get_observations", "get_infos", "get_actions", "get_rewards", "get_extra_model_outputs"])
    end = steps + (name in ("get_observations", "get_infos"))
    arguments = {"neg_index_as_lookback": rng.random() < 0.3}
    if name == "get_extra_model_outputs":
        arguments["key"] = "value"
    if rng.random() < 0.3:
        arguments["agent_ids"] = rng.choice(["a", ["a", "b"], ("b", "c")])
    kind = rng.choice(["all", "int", "slice", "list", "items", "own"])
    inside = [rng.randrange(end) for _ in range(3)] if end else []
    if kind == "int":
        arguments["indices"] = rng.choice(inside) if inside else None
        arguments["fill"] = rng.choice([None, -9])
    elif kind in ("slice", "items") and end:
        low, high = sorted(rng.choices(range(end + 1), k=2))
        arguments["indices"] = slice(low, high) if kind == "items" or rng.random() < 0.7 else slice(low, high + 2)
        arguments |= {"fill": rng.choice([None, -9])} if kind == "slice" else {"return_list": True, "agent_ids": None}
    elif kind == "list":
        arguments["indices"] = inside
        arguments["fill"] = rng.choice([None, -9])
    elif kind == "own":
        arguments |= {"env_steps": False, "indices": rng.choice([-1, 0, slice(-2, None), slice(0, 1), None])}
        arguments["neg_index_as_lookback"] = False
    return name, arguments


def outcome(method, arguments):
    try:
        return plain(method(**arguments))
    except Exception as error:  # noqa: BLE001 - RLlib's errors are of every kind
        return type(error).__name__


RLLIB_RAISES = ("TypeError", "KeyError", "AttributeError", "RuntimeError", "AssertionError", "ValueError")


def is_known(stage, key, theirs, ours, episode):
    """Return whether `docs/concepts/episodes.md` lists the difference: RLlib fails or loses data.

    It loses infos in slices and the rewards of agents that have not entered yet, and shows 0.0 where nobody gave a
    reward. By the environment's steps in a chunk that does not begin at 0 it loses the item whose absolute time is the
    chunk's length. Of two chunks that it has joined it shows the first one's hanging actions once more.
    """
    name = key[0] if isinstance(key, tuple) else key
    if isinstance(theirs, str) and theirs.startswith(RLLIB_RAISES) and not (isinstance(ours, str) and key == "raised"):
        return True
    if "get_infos" in str(key) and stage.startswith("slice"):
        return True
    if name in episode.agent_ids and key[1] in ("times", "map") and stage.startswith("slice"):
        # Of an agent that saw nothing in the slice RLlib takes the time of what it saw next.
        times = episode.env_t_to_agent_t[name]
        return times.get().count("S") == len(times)
    if name in episode.agent_ids and key[1] in ("times", "map"):
        return episode.agent_episodes[name].is_done and stage == "second chunk"  # It ended before, and RLlib says 0.
    if theirs == "IndexError" and any(single.is_done for single in episode.agent_episodes.values()):
        return True  # The times of an agent that ended before stop early.
    if theirs == [] and not episode.agent_ids:
        return True  # We have a dict for each step nevertheless.
    if name == "get_rewards" and "'env_steps': False" in key[1]:
        return "'indices': None" not in key[1]
    if name == "get_return":
        return theirs[0] == ours[0]
    by_step = name in ("get_actions", "get_rewards", "get_extra_model_outputs")
    if by_step and "'env_steps': False" in key[1]:
        return "'indices': None" not in key[1] and (stage == "joined" or bool(episode.hanging_actions))
    return by_step and (episode.env_t_started > 0 or stage == "joined")


def attempt(method, *given, **arguments):
    try:
        return method(*given, **arguments)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def plain(value):
    """Return the value without arrays, and without a fill's dtype."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def differences(kinds, seed, *, numpy):
    """Return (what, RLlib's, ours) wherever the classes differ for the programs of this seed."""
    found = []

    def compare(stage, pair):
        if any(isinstance(each, str) for each in pair):
            if not is_known(stage, "raised", *pair, None):
                found.append((stage, "raised", *pair))
            return
        texts = [dict(readings(episode, random.Random(seed))) for episode in pair]
        for key in dict.fromkeys([*texts[0], *texts[1]]):
            theirs, ours = texts[0].get(key), texts[1].get(key)
            if theirs != ours and not is_known(stage, key, theirs, ours, pair[1]):
                found.append((stage, key, theirs, ours))

    steps, ends_early = 2 + seed % 9, seed % 3 == 0
    whole = [built(kind, seed, steps, ends=seed % 2 == 0, ends_early=ends_early) for kind in kinds]
    chunks = [built(kind, seed, steps, chunked=True, ends_early=ends_early) for kind in kinds]
    if numpy:
        for episode in (*whole, *(chunk for each in chunks for chunk in each)):
            episode.to_numpy()
    compare("whole", whole)
    compare("first chunk", [each[0] for each in chunks])
    # RLlib's search for what a waiting agent has seen may go back further than it needs to.
    lookbacks = [{column.lookback for column in each[1].env_t_to_agent_t.values()} for each in chunks]
    if lookbacks[0] == lookbacks[1]:
        compare("second chunk", [each[1] for each in chunks])
    rng = random.Random(seed)
    for _ in range(0 if ends_early else 4):  # RLlib's slices take an agent that ended early for one that goes on.
        # Its slices leave out an agent that only sees the end in them.
        low, high = sorted(rng.choices(range(steps + seed % 2), k=2))
        lookback = rng.choice([None, 0, 1, 2])
        parts = [attempt(episode.slice, slice(low, high), len_lookback_buffer=lookback) for episode in whole]
        compare(f"slice {low}:{high} lookback {lookback}", parts)
    # RLlib takes the wrong times for an agent that enters in the second chunk, so none does.
    # Where one ended in the first, it takes that agent's last observation for the newest.
    if not ends_early:
        compare("joined", [attempt(each[0].concat_episode, each[1]) or each[0] for each in chunks])
    return found


def main(seeds):
    from ray.rllib.env.multi_agent_episode import MultiAgentEpisode as Theirs

    from reward_kit.episodes.multi_agent_episode import MultiAgentEpisode as Ours

    counts = Counter()
    for seed in range(seeds):
        for numpy in (False, True):
            for stage, key, theirs, ours in differences((Theirs, Ours), seed, numpy=numpy):
                counts[key[0] if isinstance(key, tuple) else key] += 1
                print(f"seed {seed} numpy {numpy} {stage}: {key}\n    RLlib {theirs}\n    ours  {ours}")
    print(f"{seeds} seeds, {sum(counts.values())} differences {dict(counts)}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
