"""Time and memory of one package's episodes, printed as JSON. Run by `episodes.py` for reward-kit and for RLlib.

    python episode_costs.py PACKAGE ROUNDS

Times are microseconds, minimum over the rounds. Sizes are bytes as counted by tracemalloc, or the length of a pickle.
"""

import gc
import importlib
import json
import pickle
import random
import resource
import sys
import time
import tracemalloc

import numpy as np

began = time.perf_counter()
module = importlib.import_module(f"{sys.argv[1]}.single_agent_episode")
IMPORT_S = time.perf_counter() - began
IMPORT_MB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
Episode = module.SingleAgentEpisode
Agents = importlib.import_module(f"{sys.argv[1]}.multi_agent_episode").MultiAgentEpisode
ROUNDS = int(sys.argv[2])

TEN_K = 10_000
letters = random.Random(0)


def text(length, number):
    """Return a text that no other call returns."""
    return f"{number} {letters.random()} "[:length].ljust(length, "x")


VECTORS = [np.full(4, t, np.float32) for t in range(TEN_K + 1)]
TEXTS = [text(200, t) for t in range(TEN_K + 1)]
# Mostly short texts and a few long ones: 1,001 texts, 0.4 million characters, at most 20,000.
LENGTHS = [20_000 if t % 250 == 0 else letters.randrange(20, 620) for t in range(1_001)]
MIXED = [text(length, t) for t, length in enumerate(LENGTHS)]
OBSERVED = [{"role": "tool", "content": TEXTS[t], "tool_call_id": f"call_{t}"} for t in range(TEN_K + 1)]
CALLS = [{"name": "search", "arguments": json.dumps({"query": f"item {t}"})} for t in range(TEN_K)]
RAGGED = [{"role": "tool", "content": MIXED[t], "tool_call_id": f"call_{t}"} for t in range(1_001)]
BACK = {"neg_index_as_lookback": True, "fill": 0.0}
HUNDRED = slice(100, 200)
NUMBERS = [t % 5 for t in range(TEN_K)]
KINDS = {
    "vec4": (VECTORS, NUMBERS),
    "str200": (TEXTS, NUMBERS),
    "dict": (OBSERVED, CALLS),
    "mixed text": (MIXED, NUMBERS),
    "ragged dict": (RAGGED, CALLS),
}
# Otherwise every collection would traverse the objects that the imports created.
gc.freeze()


def filled(kind, steps, outputs=None):
    """Return an episode with `steps` steps."""
    observations, actions = KINDS[kind]
    episode = Episode()
    episode.add_env_reset(observations[0])
    for t in range(steps):
        episode.add_env_step(observations[t + 1], actions[t], 1.0, extra_model_outputs=outputs)
    return episode


def best(call, number, prepare=None):
    """Return microseconds per call, minimum over rounds of `number` calls."""
    shortest = float("inf")
    for _ in range(ROUNDS):
        arguments = [prepare()] if prepare else []
        gc.collect()
        start = time.perf_counter()
        for _ in range(number):
            call(*arguments)
        shortest = min(shortest, time.perf_counter() - start)
    return shortest / number * 1e6


def traced_bytes(make):
    """Return the bytes that the result of `make` holds."""
    gc.collect()
    tracemalloc.start()
    kept = make()
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return size


def building():
    yield "construct", best(Episode, 2_000)
    yield "construct and reset", best(lambda: filled("vec4", 0), 2_000)
    for kind in ("vec4", "str200", "dict"):
        yield f"add_env_step {kind}, 10k", best(lambda k=kind: filled(k, TEN_K), 1) / TEN_K
    yield "add_env_step vec4 + 1 output, 10k", best(lambda: filled("vec4", TEN_K, {"value": 0.5}), 1) / TEN_K
    yield "a whole 10-step dict episode", best(lambda: filled("dict", 10), 300)


def storing():
    for kind, steps in (("vec4", 1_000), ("vec4", TEN_K), ("str200", TEN_K), ("dict", 1_000), ("dict", TEN_K)):
        yield f"to_numpy {kind}, {steps}", best(Episode.to_numpy, 1, lambda k=kind, n=steps: filled(k, n))
    for kind in ("mixed text", "ragged dict"):
        yield f"to_numpy {kind}, 1000", best(Episode.to_numpy, 1, lambda k=kind: filled(k, 1_000))
    yield "to_numpy dict, 10", best(Episode.to_numpy, 1, lambda: filled("dict", 10))


def states():
    return {
        "list": filled("vec4", 1_000),
        "numpy": filled("vec4", 1_000).to_numpy(),
        "numpy dict": filled("dict", 1_000).to_numpy(),
    }


def list_dicts(values):
    """Convert the result of a getter for several steps to a list of dicts."""
    if not isinstance(values, dict):
        return list(values)
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def reading():
    hundred = [(7 * i) % 1_000 for i in range(100)]
    for name, episode in states().items():
        yield f"get_observations(-1) {name}", best(lambda e=episode: e.get_observations(-1), 2_000)
        yield f"get_observations(100:200) {name}", best(lambda e=episode: e.get_observations(HUNDRED), 500)
        yield f"get_observations([100 ints]) {name}", best(lambda e=episode: e.get_observations(hundred), 100)
        yield f"get_rewards(-4:0, fill) {name}", best(lambda e=episode: e.get_rewards(slice(-4, 0), **BACK), 1_000)
    several = "get_observations(100:200) numpy dict, all read"
    yield several, best(lambda: list_dicts(episode.get_observations(HUNDRED)), 100)
    long = filled("vec4", TEN_K)
    yield "get_return list, 10k", best(long.get_return, 20)
    yield "get_return numpy, 10k", best(long.to_numpy().get_return, 20)
    yield "validate", best(long.validate, 1_000)


def chunking():
    for name, episode in states().items():
        yield f"episode[100:110] {name}", best(lambda e=episode: e[100:110], 500)
        yield f"episode[100:200] {name}", best(lambda e=episode: e[100:200], 500)
        yield f"cut(0) {name}", best(lambda e=episode: e.cut(), 500)
        if name != "numpy dict":  # RLlib fails on it
            yield f"cut(10) {name}", best(lambda e=episode: e.cut(10), 500)
    for steps in (1_000, TEN_K):
        for stored in (False, True):

            def halves(n=steps, compact=stored):
                whole = filled("vec4", n)
                pair = whole[: n // 2], whole[n // 2 :]
                return [part.to_numpy() for part in pair] if compact else pair

            name = f"concat {steps // 2}+{steps // 2} {'numpy' if stored else 'list'}"
            yield name, best(lambda pair: pair[0].concat_episode(pair[1]), 1, halves)


def pickling():
    for kind, steps in (("vec4", TEN_K), ("str200", TEN_K), ("dict", TEN_K), ("mixed text", 1_000)):
        for stored in (False, True):
            episode = filled(kind, steps)
            if stored:
                episode.to_numpy()
            name = f"{kind} {'numpy' if stored else 'list'}, {steps}"
            data = pickle.dumps(episode, 5)
            yield f"pickle dumps {name}", best(lambda e=episode: pickle.dumps(e, 5), 1)
            yield f"pickle loads {name}", best(lambda d=data: pickle.loads(d), 1)
            yield f"pickle bytes {name}", len(data)
    yield "get_state vec4, 10k", best(filled("vec4", TEN_K).get_state, 1)


def multi_agent_episode(agents, steps):
    """Return an episode in which every agent acts in every step."""
    names = [f"agent_{i}" for i in range(agents)]
    actions, rewards = dict.fromkeys(names, 1), dict.fromkeys(names, 1.0)
    episode = Agents()
    episode.add_env_reset(observations=dict.fromkeys(names, VECTORS[0]))
    for t in range(steps):
        episode.add_env_step(dict.fromkeys(names, VECTORS[t + 1]), actions, rewards)
    return episode


def several_agents():
    for agents in (2, 10):
        name, episode = f"{agents} agents", multi_agent_episode(agents, 1_000)
        yield f"{name}: add_env_step, 1000", best(lambda n=agents: multi_agent_episode(n, 1_000), 1) / 1_000
        yield f"{name}: get_observations(-1)", best(lambda e=episode: e.get_observations(-1), 300)
        yield f"{name}: get_observations(100:200)", best(lambda e=episode: e.get_observations(HUNDRED), 30)
        listed = best(lambda e=episode: e.get_observations(HUNDRED, return_list=True), 30)
        yield f"{name}: get_observations(100:200), return_list", listed
        yield f"{name}: cut(10)", best(lambda e=episode: e.cut(10), 30)
        yield f"{name}: episode[100:200]", best(lambda e=episode: e[100:200], 10)
        yield f"{name}: to_numpy, 1000", best(Agents.to_numpy, 1, lambda n=agents: multi_agent_episode(n, 1_000))


def memory():
    yield "bytes: an empty episode", traced_bytes(Episode)
    for kind, steps in (("vec4", TEN_K), ("dict", TEN_K), ("mixed text", 1_000), ("ragged dict", 1_000)):
        # The items exist already, so lists only add the container; arrays add everything.
        yield f"bytes per step: {kind} list, {steps}", traced_bytes(lambda k=kind, n=steps: filled(k, n)) / steps
        yield (
            f"bytes per step: {kind} numpy, {steps}",
            traced_bytes(lambda k=kind, n=steps: filled(k, n).to_numpy()) / steps,
        )


if __name__ == "__main__":
    costs = {"import, s": IMPORT_S, "memory after the import, MB": IMPORT_MB}
    for part in (building, storing, reading, chunking, pickling, several_agents, memory):
        costs |= dict(part())
    print(json.dumps(costs))
