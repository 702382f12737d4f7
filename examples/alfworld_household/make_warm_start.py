r"""Make `warm_start/`: a tokenizer of the household's words and a small decoder trained on a searcher's demonstrations.

    python examples/alfworld_household/make_warm_start.py

With `--rare`, the model hardly knows some types of chores, so that training has to teach them:

    python examples/alfworld_household/make_warm_start.py --rare clean heat cool --episodes 20000 \
        --out runs/three_chores

The demonstrations are of training problems, which share no room with the evaluation problems. Many commands are random,
so that the model also sees detours and how to recover from them; they are not part of the loss.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from reward_kit.environments import household_problems as domain
from reward_kit.environments.household_engine import HouseholdEngine, shortest_plan
from reward_kit.environments.household_problems import (
    Problem,
    TaskType,
    generate_problem,
)
from reward_kit.episodes import AllowedIds, Ids
from reward_kit.rl import (
    TERSE_TEMPLATE,
    SFTConfig,
    SFTProgress,
    build_tokenizer,
    compose_embeddings,
    describe,
    fit,
    save_model,
)
from reward_kit.tokens import TokenBatch

HERE = Path(__file__).parent
CONTEXT = 1024
COMMANDS = 30
SLIPS = 0.4
"""Share of random commands."""

CHORES = dict(zip(("place", "look", "clean", "heat", "cool", "two"), TaskType, strict=True))
"""The names of `--rare`."""

RARE_SHARE = 0.015
"""Share of the demonstrations of a rare type that are kept."""

MOST_OF_A_TYPE = 3
"""Maximum number of objects of one type in a house."""

VERBS = ("go", "take", "move", "clean", "heat", "cool", "slice", "use", "examine", "open", "close")

UNITS = [rf"(?:{'|'.join(VERBS)}) [a-z]+ \d+", r"[a-z]+ \d+"]
"""Commands and objects are single tokens, so the model selects a command instead of spelling it."""

SFT = SFTConfig(
    max_tokens_per_batch=1_500,  # about 16 episodes
    lr=2e-3,
    warmup_share=0.04,
    betas=(0.9, 0.98),
    min_lr_share=0.05,
    use_allowed_ids=True,
    label_smoothing=0.5,
)

_IDLE = "you a an the at and see is in it on to your quickly are of with using up"
DROPPED = [
    r"(?m)-= Welcome.*?you see ",
    r"(?m)Available commands:.*",
    r"Your task is to: ",
    # The command already contains the action, and the one before it the receptacle.
    r"You (?:arrive at|pick up|move|clean|heat|cool|open|close|turn on|sliced) [^.]*\.",
    r"On the [a-z]+ \d+, you see ",
    r"The [a-z]+ \d+ is open\. In it, you see ",
    r"The [a-z]+ \d+ is (?=closed)",
    r"(?:(?<!go) to| from| with) [a-z]+ \d+",
    rf"(?i)\b(?:{'|'.join(_IDLE.split())})\b ?",
    r"[^\w\s]",
]
"""Patterns that are removed from observations and commands."""


class Searcher:
    """An expert that has to search for objects.

    The expert knows where everything is, so a model that imitates it learns to guess. The searcher visits unseen
    receptacles that may hold the object, in the order of the room description, which can be imitated.

    Args:
        engine: the game, which the searcher reads but does not step.
    """

    def __init__(self, engine: HouseholdEngine) -> None:
        self._engine, self._seen = engine, set[int]()
        self._kinds = [item.type for item in engine.tables.receptacles]

    def command(self) -> str:
        """Return the next command."""
        engine, tables = self._engine, self._engine.tables
        if engine.at >= 0 and engine.is_open(engine.at):
            self._seen.add(engine.at)
        plan = shortest_plan(engine)
        assert plan is not None
        command = plan[0]
        looks_for_lamp = engine.holding >= 0 and tables.problem.task_type is TaskType.LOOK_IN_LIGHT
        is_known = command not in tables.go or tables.go.index(command) in self._seen
        if is_known or (engine.holding >= 0 and not looks_for_lamp):
            return command
        if engine.at >= 0 and not engine.is_open(engine.at):
            return f"open {tables.receptacles[engine.at].name}"
        return tables.go[self._next(looks_for_lamp)]

    def _next(self, looks_for_lamp: bool) -> int:
        """Return the next unseen receptacle, preferably of a type that may hold the object."""
        here, count = self._engine.at, len(self._kinds)
        order = [(here + 1 + step) % count for step in range(count)]
        unseen = [place for place in order if place not in self._seen and place != here]
        return next((place for place in unseen if self._may_be_at(self._kinds[place], looks_for_lamp)), unseen[0])

    def _may_be_at(self, place: str, looks_for_lamp: bool) -> bool:
        """Return whether receptacles of this type, except the destination, may hold the object."""
        problem = self._engine.tables.problem
        if looks_for_lamp:
            return place in domain.LAMP_PLACES[problem.destination]
        return domain.can_hold(place, problem.target) and place != problem.destination


class Act(NamedTuple):
    """A step of a demonstration: admissible commands, the command, whether it is random, and the observation."""

    choices: tuple[str, ...]
    command: str
    is_slip: bool
    answer: str


def demonstration(problem: Problem, draws: random.Random, slips: float = SLIPS) -> list[Act]:
    """Return the searcher's steps in a problem until it is solved, at most `COMMANDS`."""
    engine, acts = HouseholdEngine(problem), list[Act]()
    searcher = Searcher(engine)
    while len(acts) < COMMANDS and not engine.won():
        choices, is_slip, command = engine.spot.commands, draws.random() < slips, searcher.command()
        if is_slip:
            command = draws.choice(choices)
        acts.append(Act(choices, command, is_slip, engine.step(command).observation))
    return acts


def problems(total: int, seed: int, rare: Collection[TaskType] = ()) -> Iterator[Problem]:
    """Yield training problems of alternating types.

    Args:
        total: number of problems.
        seed: of the problems.
        rare: types of which only `RARE_SHARE` is kept.
    """
    draws, types, made = random.Random(f"types {seed}"), list(TaskType), 0
    for index in itertools.count():
        if made == total:
            return
        if types[index % len(types)] in rare and draws.random() >= RARE_SHARE:
            continue
        yield generate_problem("train", index, seed)
        made += 1


class Scribe:
    """Converts demonstrations to rows, as `Demonstrations` does, in a tenth of the time.

    Observations are short texts that repeat, and there is one tool, so the ids of texts and of sets of choices are
    cached. `tests/test_household_agent.py` compares the rows.

    Args:
        tokenizer: of the household.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self._texts, self._choices = tokenizer, dict[str, list[int]](), dict[tuple[str, ...], Ids]()
        self._start, self._end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])

    def rows(self, written: Sequence[tuple[Problem, list[Act]]]) -> TokenBatch:
        """Return a row for each demonstration: (B,T) ids, attention and action masks, and allowed ids."""
        parts = [self._row(HouseholdEngine(problem).tables.introduction, acts) for problem, acts in written]
        shape = (len(parts), max(len(ids) for ids, _, _ in parts))
        ids_BT, real_BT, taught_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int8), np.zeros(shape, np.int8)
        allowed_B = np.empty(len(parts), dtype=object)
        ids_BT += np.int32(self._tokenizer.pad_token_id)
        for row, (ids, places, sets) in enumerate(parts):
            ids_BT[row, : len(ids)], real_BT[row, : len(ids)] = ids, 1
            taught_BT[row, places] = 1
            allowed_B[row] = AllowedIds.shared(places, range(len(places)), sets)
        batch = {"input_ids": ids_BT, "attention_mask": real_BT, "action_mask": taught_BT}
        return TokenBatch(batch, {"allowed_ids": allowed_B}, {"padding": "right"})

    def _row(self, introduction: str, acts: Sequence[Act]) -> tuple[list[int], list[int], list[Ids]]:
        """Return the ids up to the last target, the positions of targets, and the allowed ids at each."""
        ids, places, sets, stop = [*self._ids(introduction), self._start], list[int](), list[Ids](), 0
        for act in acts:
            (token,) = self._ids(act.command)
            if not act.is_slip:
                places += [len(ids), len(ids) + 1]
                sets += [self._allowed(act.choices), np.array([self._end], dtype=np.int32)]
                stop = len(ids) + 2
            ids += [token, self._end, *self._ids(act.answer), self._start]
        return ids[:stop], places, sets

    def _ids(self, text: str) -> list[int]:
        found = self._texts.get(text)
        if found is None:
            found = self._texts[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    def _allowed(self, choices: tuple[str, ...]) -> Ids:
        found = self._choices.get(choices)
        if found is None:
            ids = sorted(self._ids(command)[0] for command in choices)
            found = self._choices[choices] = np.array(ids, dtype=np.int32)
        return found


def demonstrations(
    tokenizer: PreTrainedTokenizerFast,
    total: int,
    *,
    seed: int,
    slips: float = SLIPS,
    rare: Collection[TaskType] = (),
) -> TokenBatch:
    """Return rows of `total` demonstrations, without those that consist of random commands only."""
    draws = random.Random(f"slips {seed}")
    played = [(problem, demonstration(problem, draws, slips)) for problem in problems(total, seed, rare)]
    return Scribe(tokenizer).rows([one for one in played if not all(act.is_slip for act in one[1])])


def words() -> Iterator[str]:
    """Yield all objects, receptacles and commands of the household."""
    most: dict[str, int] = dict.fromkeys(domain.LAMPS.union(*domain.ROOM_OBJECTS.values()), MOST_OF_A_TYPE)
    places: dict[str, int] = {}
    for room in domain.ROOMS.values():
        for kind, _, greatest in room:
            places[kind] = max(places.get(kind, 0), greatest)
    yield from ("look", "inventory", "help")
    at_places, with_things = {"go", "examine", "open", "close"}, {"take", "move", "examine"}
    of_some = {"clean": domain.CLEANABLE, "heat": domain.HEATABLE, "cool": domain.COOLABLE, "slice": domain.SLICEABLE}
    of_some["use"] = domain.LAMPS
    for kind, greatest in sorted((most | places).items()):
        verbs = [one for one in VERBS if one in (at_places if kind in places else with_things)]
        verbs += [verb for verb, kinds in of_some.items() if kind in kinds]
        yield kind
        for number in range(1, greatest + 1):
            yield from (f"{kind} {number}", *(f"{verb} {kind} {number}" for verb in verbs))


def household_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with all words of the household."""
    return build_tokenizer(
        texts(),
        words=words(),
        units=UNITS,
        spaces="none",
        dropped=DROPPED,
        chat_template=TERSE_TEMPLATE,
        context=CONTEXT,
    )


def texts() -> Iterator[str]:
    """Yield observations of mostly random and of mostly correct commands."""
    draws = random.Random("texts")
    for number, problem in enumerate(problems(300, seed=0)):
        yield HouseholdEngine(problem).tables.introduction
        yield from (act.answer for act in demonstration(problem, draws, slips=1.0 if number % 2 else 0.2))


def small_llama(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return a Llama of 0.5M parameters, initialized with a larger standard deviation, which narrow models need."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def main() -> None:
    """Train the model and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "warm_start", help="the folder to write")
    parser.add_argument("--episodes", type=int, default=32_000, help="demonstrations")
    kept = f"chores of which a share of {RARE_SHARE:g} of the demonstrations is kept"
    parser.add_argument("--rare", nargs="+", choices=CHORES, default=(), help=kept)
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a second thread does not speed up a model this small
    began = time.process_time()
    tokenizer = household_tokenizer()
    model = small_llama(tokenizer, options.seed)
    compose_embeddings(model, tokenizer, seed=options.seed)
    print(f"{len(tokenizer)} tokens; {describe(model)}")
    rare = {CHORES[name] for name in options.rare}
    rows = demonstrations(tokenizer, options.episodes, seed=options.seed, rare=rare)
    print(f"{len(rows)} demonstrations after {time.process_time() - began:.0f} s of CPU time", flush=True)

    def report(progress: SFTProgress) -> None:
        if progress.step % 100 == 0 or progress.step == progress.steps:
            print(f"step {progress.step}/{progress.steps}  loss {progress.loss:.3f}", flush=True)

    fit(model, rows, replace(SFT, seed=options.seed), progress=report)
    save_model(options.out, model, tokenizer)
    print(f"written to {options.out} after {time.process_time() - began:.0f} s of CPU time")


if __name__ == "__main__":
    main()
