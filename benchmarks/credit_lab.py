"""Score credit estimators against measured counterfactual values.

    .venv/bin/python benchmarks/credit_lab.py [--samples 12] [--continuations 64]

One policy plays groups of episodes on each of five tasks. The true advantage of a step is V(next state) − V(state),
where V is the success probability: computed exactly on FrozenLake, and measured by continuations elsewhere. Every
estimator then assigns credit to the same episodes:

    rank        Spearman correlation with the true advantages over the steps of a group, mean over groups, with the 95%
                interval of its difference to grpo over the same groups
    sign        share of the decisive steps (|true advantage| >= 0.2) whose estimate has the wrong sign
    silent      share of the decisive steps whose estimate is 0
    bias, sd    of the estimate of a step over groups with other peers, in units of success probability, after scaling
                the estimates of an estimator by the best constant; root mean square over steps
    us          CPU time per episode in microseconds; for vine, plus the continuations it needs

The state hashes are compared by the step advantages of gigpo. In the support task, the state key covers only the
database, and the policy often acts or answers without having read the order.

The lines are written to docs/data/credit_lab.jsonl, from which the tables and the figure of docs/concepts/credit.md are
made. `--table` only does the latter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from counterfactual import Wanderer, cells_of, task, true_values  # noqa: E402

from reward_kit import AgentPolicy, Message, PolicyOutput, RLRolloutWorker  # noqa: E402
from reward_kit.agent import EpisodeContext, ExpertPolicy, Sample, collect_group, derive_seed, episode_steps  # noqa: E402
from reward_kit.environments.base import ForkableResource, ToolSpec  # noqa: E402
from reward_kit.episodes import SingleAgentEpisode  # noqa: E402
from reward_kit.rl_processing import CreditAssigner, CreditBatch  # noqa: E402
from reward_kit.runs.statistics import mean_interval  # noqa: E402

LINES, PAGE = ROOT / "docs" / "data" / "credit_lab.jsonl", ROOT / "docs" / "concepts" / "credit.md"
START, END = "<!-- table of benchmarks/credit_lab.py: {} -->", "<!-- end of the table -->"
GROUP, POOL, PEER_SETS = 8, 24, 12
DECISIVE = 0.2
LAKE_STEPS = 14
Floats = npt.NDArray[np.float64]

ESTIMATORS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "grpo": ("grpo", {}),
    "gigpo": ("gigpo", {}),
    "gigpo, no episode term": ("gigpo", {"omega": 0.0}),
    "rloo": ("rloo", {}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
    "discounted_returns": ("discounted_returns", {}),
    "opo": ("opo", {}),
    "gpg": ("gpg", {}),
    "turn_level_grpo": ("turn_level_grpo", {}),
    "hgpo": ("hgpo", {}),
    "gagpo": ("gagpo", {}),
    "g2po": ("g2po", {}),
    "graphgpo": ("graphgpo", {}),
}
HASHES: Mapping[str, Any] = {
    "state_key": "state_key",
    "state_and_results": "state_and_results",
    "observation_text": "observation_text",
    "last 3 messages": {"name": "last_messages", "count": 3},
}
VARIANTS = {
    **ESTIMATORS,
    **{f"hash: {label}": ("gigpo", {"omega": 0.0, "state_hash": of}) for label, of in HASHES.items()},
}
VINE = (4, 16)
"""The numbers of continuations per step for which measured values are listed as an estimator."""


class Hasty(AgentPolicy):
    """An expert that picks a random action in some of its steps."""

    is_free = True
    slips = 0.3

    def __init__(self, resource: ForkableResource | None = None, seed: int = 0) -> None:
        self.resource, self.random = resource, random.Random(seed)

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        return Hasty(context.resource, context.seed)

    async def resume(self, turns: Sequence[Any]) -> None:
        """Do nothing: the state of the session does not depend on earlier turns."""

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        assert self.resource is not None
        action = await self.resource.expert_action()
        if self.random.random() < self.slips and (listed := await self.resource.admissible_actions()):
            action = self.random.choice(list(listed))
        return PolicyOutput({"type": "tool_call", **action} if action else {"type": "terminate"})


class Clerk(AgentPolicy):
    """Handles a request for a refund, and often acts or answers without having read the order."""

    is_free = True

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.days: int | None = None
        self.is_refunded = False

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        return Clerk(context.seed)

    async def resume(self, turns: Sequence[Any]) -> None:
        for turn in turns:
            self._read(turn.observation)

    def _read(self, observation: Sequence[Message]) -> None:
        for message in observation:
            if message.role == "tool" and '"delivered", ' in str(message.content):
                self.days = int(str(message.content).partition('"delivered", ')[2].partition("]")[0])
            self.is_refunded |= "changed_rows" in str(message.content)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        self._read(observation)
        right = _LOOK_UP if self.days is None else _REFUSAL if self.days > 30 else _CONFIRMATION
        if self.days is not None and self.days <= 30 and not self.is_refunded:
            right = _REFUND
        is_slip = self.random.random() < (0.6 if self.days is None else 0.2)
        return PolicyOutput(self.random.choice([_LOOK_UP, _REFUND, _REFUSAL, _CONFIRMATION]) if is_slip else right)


SHOP = """
CREATE TABLE orders (id TEXT, status TEXT, days INTEGER);
INSERT INTO orders VALUES ('O7', 'delivered', {days});
CREATE TRIGGER late BEFORE UPDATE ON orders WHEN OLD.days > 30 BEGIN SELECT RAISE(ABORT, 'older than 30 days'); END;
"""
REQUESTS = {"late": 90, "in time": 5}
"""The days since the delivery, by request. A refund is possible within 30 days."""
_LOOK_UP, _REFUND = (
    {"type": "tool_call", "name": "execute_sql", "arguments": {"query": query}}
    for query in ("SELECT * FROM orders WHERE id = 'O7'", "UPDATE orders SET status = 'refunded' WHERE id = 'O7'")
)
_REFUSAL, _CONFIRMATION = (
    {"type": "text", "content": content} for content in ("It is too late for a refund.", "You have your refund.")
)


# Episodes and their true advantages


def success(episode: SingleAgentEpisode) -> float:
    """Return 1 for a positive environment return, or, in the support task, for a true answer that ends the request."""
    if (request := episode.custom_data["sample_id"]) not in REQUESTS:
        return float(episode.get_return() > 0.5)
    texts = [str(message.content) for message in episode_steps(episode)[-1].resulting_messages_history]
    is_refunded, is_late = any("changed_rows" in text for text in texts), request == "late"
    return float(texts[-1] == (_REFUSAL if is_late else _CONFIRMATION)["content"] and is_refunded != is_late)


async def measured_values(worker: RLRolloutWorker, episode: SingleAgentEpisode, n: int, seed: int) -> Floats:
    """Return (T + 1,) the success probability before each step, measured by n continuations, and the outcome."""
    values = []
    before = None
    async with worker.branch(episode, 0, seed=seed, sample=worker.sample) as first:
        before = first
        for step in range(len(episode)):
            async with worker.branch(episode, step, seed=seed, sample=worker.sample, before=before) as branch:
                continued = [await worker.collect_episode(branch, index) for index in range(n)]
            assert all(one.custom_data["failure"] is None for one in continued)
            values.append(np.mean([success(one) for one in continued]))
    return np.array([*values, success(episode)])


async def make_workers(kind: str, samples: int) -> list[RLRolloutWorker]:
    """Return a worker for each sample, with a horizon that the policy can meet only sometimes."""
    workers: list[RLRolloutWorker] = []
    seed = 0
    while len(workers) < samples:
        seed += 1
        if kind == "gymnasium":
            config = {"env_id": "FrozenLake-v1", "env_kwargs": {"is_slippery": False}}
            workers.append(RLRolloutWorker(task(kind, config, LAKE_STEPS), Wanderer()))
            continue
        if kind == "sqlite":
            request = list(REQUESTS)[seed % 2]
            config = {"seed_sql": SHOP.format(days=REQUESTS[request])}
            workers.append(RLRolloutWorker(task(kind, config, 6, on_text="end"), Clerk()))
            workers[-1].sample = Sample(request)
            continue
        config = {"index": seed} if kind in ("alfworld", "webshop") else {}
        expert = await RLRolloutWorker(task(kind, config, 40), ExpertPolicy()).collect_episode(seed=seed)
        if success(expert) and 3 <= len(expert) <= 12:
            workers.append(RLRolloutWorker(task(kind, config, len(expert) + 3), Hasty()))
            workers[-1].sample = Sample(f"{kind}-{seed}")
        assert seed < 1000, f"the expert solves too few problems of {kind}"
    return workers


def advantages(name: str, options: Mapping[str, Any], episodes: Sequence[SingleAgentEpisode]) -> list[Floats]:
    """Return the advantages of the steps of each episode."""
    steps = [episode_steps(episode) for episode in episodes]
    ids = [episode.id_ for episode in episodes]
    batch = CreditBatch(ids, ["group"] * len(ids), steps, [success(episode) for episode in episodes], {})
    credited = CreditAssigner(name, step_rewards="environment", **options).advantages(batch)
    return [np.array([step.advantage for step in steps], dtype=float) for steps in credited.steps]


# Figures


def rank_correlation(a: Floats, b: Floats) -> float:
    """Return Spearman's correlation with mean ranks for ties, or 0 if either side is constant."""

    def ranks(values: Floats) -> Floats:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        return (ends - (counts - 1) / 2)[inverse]

    ranks_a, ranks_b = ranks(a), ranks(b)
    if ranks_a.std() == 0.0 or ranks_b.std() == 0.0:
        return 0.0
    return float(np.corrcoef(ranks_a, ranks_b)[0, 1])


async def study(kind: str, samples: int, continuations: int) -> list[dict[str, Any]]:
    """Return a line for each estimator on one task."""
    groups: dict[str, list[tuple[Floats, Floats]]] = {}  # estimates and true advantages of the steps of a group
    spread: dict[str, list[tuple[Floats, Floats]]] = {}  # (K,) estimates of a step with other peers, and the truth
    cpu_s: dict[str, float] = dict.fromkeys([*VARIANTS, *(f"vine, {n} continuations" for n in VINE)], 0.0)
    count = 0
    lake = true_values(LAKE_STEPS)
    for number, worker in enumerate(await make_workers(kind, samples)):
        pool = await collect_group(worker, worker.sample, POOL, run_seed=number)
        group, peers = pool[:GROUP], pool[GROUP:]
        count += len(group)
        truth = []
        for episode in group:
            if kind == "gymnasium":
                cells = cells_of(episode)
                values = np.array([*(lake[t][cell] for t, cell in enumerate(cells)), success(episode)])
            else:
                values = await measured_values(worker, episode, continuations, seed=derive_seed("truth", number))
            truth.append(np.diff(values))
        flat = np.concatenate(truth)
        for n in VINE:
            began = time.process_time()
            vine = [np.diff(await measured_values(worker, one, n, seed=derive_seed("vine", number))) for one in group]
            cpu_s[f"vine, {n} continuations"] += time.process_time() - began
            groups.setdefault(f"vine, {n} continuations", []).append((np.concatenate(vine), flat))
        generator = random.Random(number)
        sets = [generator.sample(peers, GROUP - 1) for _ in range(PEER_SETS)]
        for label, (name, options) in VARIANTS.items():
            began = time.process_time()
            estimates = advantages(name, options, group)
            cpu_s[label] += time.process_time() - began
            groups.setdefault(label, []).append((np.concatenate(estimates), flat))
            for episode, true in zip(group, truth, strict=True):
                drawn = np.array([advantages(name, options, [episode, *others])[0] for others in sets])
                spread.setdefault(label, []).extend((drawn[:, t], true[t]) for t in range(len(true)))
    ranks = {label: [rank_correlation(*pair) for pair in pairs] for label, pairs in groups.items()}
    return [
        {
            "task": kind,
            "estimator": label,
            "groups": len(pairs),
            "steps": int(sum(len(true) for _, true in pairs)),
            "rank": float(np.mean(ranks[label])),
            **_difference(ranks[label], ranks["grpo"]),
            **_signs(pairs),
            **(_spread(spread[label]) if label in spread else {}),
            "cpu_us_per_episode": round(1e6 * cpu_s[label] / count),
        }
        for label, pairs in groups.items()
    ]


def _difference(ranks: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    interval = mean_interval([a - b for a, b in zip(ranks, baseline, strict=True)], range(len(ranks)))
    return {"rank_over_grpo": interval.mean, "low": interval.low, "high": interval.high}


def _signs(pairs: Sequence[tuple[Floats, Floats]]) -> dict[str, Any]:
    estimate, true = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    is_decisive = np.abs(true) >= DECISIVE
    estimate, true = estimate[is_decisive], true[is_decisive]
    wrong = float(np.mean(np.sign(estimate) == -np.sign(true)))
    return {"decisive": len(true), "wrong_sign": wrong, "silent": float(np.mean(estimate == 0.0))}


def _spread(steps: Sequence[tuple[Floats, Any]]) -> dict[str, Any]:
    mean = np.array([drawn.mean() for drawn, _ in steps])
    deviation = np.array([drawn.std(ddof=1) for drawn, _ in steps])
    true = np.array([one for _, one in steps])
    scale = float(mean @ true / (mean @ mean)) if mean @ mean else 0.0
    bias = float(np.sqrt(np.mean((scale * mean - true) ** 2)))
    return {"scale": scale, "bias": bias, "sd": abs(scale) * float(np.sqrt(np.mean(deviation**2)))}


NAMES = {
    "gymnasium": "FrozenLake",
    "alfworld": "household",
    "sokoban": "Sokoban",
    "webshop": "WebShop",
    "sqlite": "support",
}


def table(lines: Sequence[Mapping[str, Any]], first: str) -> str:
    """Return a table of the docs: a row per estimator or state hash, and columns of ranks and sign errors per task."""
    is_hash = first == "State hash"
    lines = [line for line in lines if line["estimator"].startswith("hash: ") == is_hash]
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    labels = list(dict.fromkeys(line["estimator"] for line in lines))
    found = {(line["task"], line["estimator"]): line for line in lines}
    rows = [[first, *(f"{NAMES[one]}: rank, wrong sign" for one in tasks)], ["---"] * (len(tasks) + 1)]
    for label in labels:
        cells = []
        for one in tasks:
            line = found.get((one, label))
            is_better = line is not None and line["low"] is not None and line["low"] > 0.0
            mark = "**" if is_better else ""
            cells.append(f"{mark}{line['rank']:.2f}{mark}, {line['wrong_sign']:.0%}" if line else "")
        rows.append([f"`{label.removeprefix('hash: ')}`" if is_hash else label, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_page(lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace the tables of the page, and draw its figure."""
    for first in ("Estimator", "State hash"):
        begin = START.format(first)
        before, start, rest = PAGE.read_text(encoding="utf-8").partition(begin)
        _, end, after = rest.partition(END)
        assert start and end, f"{PAGE} must contain {begin} and {END}"
        PAGE.write_text(f"{before}{begin}\n{table(lines, first)}\n{END}{after}", encoding="utf-8")
    subprocess.run([sys.executable, str(ROOT / "docs" / "draw_figures.py")], check=True, stdout=subprocess.DEVNULL)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=12, help="groups per task")
    parser.add_argument("--continuations", type=int, default=64, help="continuations per step for the true values")
    parser.add_argument("--tasks", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--lines", type=Path, default=LINES, help="file for the lines")
    parser.add_argument("--table", action="store_true", help="only write the table and the figure of earlier lines")
    options = parser.parse_args()
    if options.table:
        write_page([json.loads(line) for line in options.lines.read_text(encoding="utf-8").splitlines()])
        return
    lines: list[dict[str, Any]] = []
    for kind in options.tasks:
        # The episodes of the support task are short.
        samples = options.samples * (4 if kind == "sqlite" else 1)
        lines += await study(kind, samples, options.continuations)
        print(table(lines, "Estimator"), table(lines, "State hash"), sep="\n\n", file=sys.stderr, flush=True)
    options.lines.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if options.lines == LINES:
        write_page(lines)


if __name__ == "__main__":
    asyncio.run(main())
