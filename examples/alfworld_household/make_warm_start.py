"""Makes `warm_start/`: a tokenizer of the household's words, a small decoder, and what it learned from an expert.

    python examples/alfworld_household/make_warm_start.py

The expert's episodes are of training problems, none of which is in the rooms that the agent is measured in. Now and
then an action is drawn at random instead, so that the model also sees what a detour looks like and how it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from reward_kit.agent.policies.expert_policy import ExpertPolicy
from reward_kit.agent.policies.random_policy import RandomPolicy
from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import derive_seed
from reward_kit.environments.base import ToolSpec
from reward_kit.environments.household import domain
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.errors import PolicyError
from reward_kit.models import Message
from reward_kit.rl.model_kit import (
    TERSE_TEMPLATE,
    DemonstratingPolicy,
    Demonstrations,
    SFTConfig,
    SFTProgress,
    build_tokenizer,
    compose_embeddings,
    describe,
    fit,
    save_model,
)
from reward_kit.runs.tasks import load_task
from reward_kit.tokens import TokenBatch, build_rows

HERE = Path(__file__).parent
CONTEXT = 1024
CHUNK = 500
SLIPS = 0.25
"""The share of actions that are drawn at random: the model is to know the game and still have something to unlearn."""

MOST_OF_A_TYPE = 3
"""Things of one type in one house."""

VERBS = ("go", "take", "move", "clean", "heat", "cool", "slice", "use", "examine", "open", "close")

UNITS = [rf"(?:{'|'.join(VERBS)}) [a-z]+ \d+", r"[a-z]+ \d+"]
"""A command is one token, and so is a thing: what is asked for has to be found among commands, not spelt."""

SFT = SFTConfig(
    epochs=3, max_tokens_per_batch=1_200, lr=2e-3, betas=(0.9, 0.98), min_lr_share=0.05, use_allowed_ids=True
)  # batches of about 16 episodes

_IDLE = "you a an the at and see is in it on to your quickly are of with using up"
DROPPED = [
    r"(?m)-= Welcome.*?you see ",
    r"(?m)Available commands:.*",
    r"Your task is to: ",
    # What was done stands in the command, and where it was done in the one before.
    r"You (?:arrive at|pick up|move|clean|heat|cool|open|close|turn on|sliced) [^.]*\.",
    r"On the [a-z]+ \d+, you see ",
    r"The [a-z]+ \d+ is open\. In it, you see ",
    r"The [a-z]+ \d+ is (?=closed)",
    r"(?:(?<!go) to| from| with) [a-z]+ \d+",
    rf"(?i)\b(?:{'|'.join(_IDLE.split())})\b ?",
    r"[^\w\s]",
]
"""What observations and commands can do without."""

_NAMED_BY_GOAL = re.compile(r"(?:two|a clean|a hot|a cool|a|look at) (\w+) (?:in|under the) (\w+)")


class Searcher(AgentPolicy):
    """Does what the expert does, but for what nobody can know: it has to look for things, and its hand slips.

    The expert knows where everything is. To imitate it is to learn to guess; who looks where nobody looked before, in
    places where such a thing may be, one after another in the order in which the room was told of, shows how it is
    found, and can be imitated. Slips are drawn among the admissible commands.
    """

    is_free = True

    def __init__(self, expert: AgentPolicy | None = None, seed: int = 0) -> None:
        self._expert, self._random = expert or ExpertPolicy(), random.Random(seed)
        self._seen: set[str] = set()
        self._here, self._holds, self._goal = "", False, ""
        self._places: list[str] = []

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """A session with random numbers of its own."""
        return Searcher(await self._expert.open(context), context.seed)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """The next command."""
        assert available_tools_specs is not None
        commands = available_tools_specs[0]["function"]["parameters"]["properties"]["command"]["enum"]
        if not self._goal:
            room, _, self._goal = observation[-1].text.partition("Your task is to: ")
            self._places = re.findall(r"[a-z]+ \d+", room)
        if self._here and f"open {self._here}" not in commands:
            self._seen.add(self._here)
        if self._random.random() < SLIPS:
            command = self._random.choice(commands)
        else:
            output = await self._expert.get_action(observation, available_tools_specs)
            command = self._searched(output.action_structured["arguments"]["command"], commands)
        if command.startswith("go to "):
            self._here = command.removeprefix("go to ")
        self._holds = command.startswith("take ") or (self._holds and not command.startswith("move "))
        return PolicyOutput({"type": "tool_call", "name": "act", "arguments": {"command": command}})

    def _searched(self, command: str, commands: Sequence[str]) -> str:
        """The expert's command, or a step of the search where it goes to what was never seen."""
        looks_for_lamp = self._holds and self._goal.startswith("look")
        place = command.removeprefix("go to ")
        if place == command or place in self._seen or (self._holds and not looks_for_lamp):
            return command
        if f"open {self._here}" in commands:
            return f"open {self._here}"
        first = self._places.index(self._here) + 1 if self._here else 0
        unseen = [one for one in self._places[first:] + self._places[:first] if one not in self._seen]
        likely = [one for one in unseen if self._may_be_at(one.split()[0], is_lamp=looks_for_lamp)]
        return f"go to {(likely or unseen)[0]}"

    def _may_be_at(self, place: str, *, is_lamp: bool) -> bool:
        """Whether what is looked for may be in or on places of this type, but for where the goal wants it."""
        if is_lamp:
            return any(place in domain.LAMP_PLACES[lamp] for lamp in domain.LAMPS if lamp in self._goal)
        thing, wanted = _NAMED_BY_GOAL.findall(self._goal)[0]
        return domain.can_hold(place, thing) and place != wanted


async def episodes_of(policy: AgentPolicy, seeds: Sequence[int]) -> list[SingleAgentEpisode]:
    """One episode for each seed, each of a training problem of its own."""
    task = load_task(HERE / "training.yaml").definition
    worker = RLRolloutWorker(task, policy)
    episodes = [await worker.collect_episode(seed=seed) for seed in seeds]
    for episode in episodes:
        if failure := episode.custom_data["failure"]:
            raise PolicyError(f"{episode.id_}: {failure['message']}")
    return episodes


def words() -> Iterator[str]:
    """Everything that a household may hold, ask for and allow."""
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
    """A tokenizer that knows every word of the household."""
    seen = [
        *asyncio.run(episodes_of(RandomPolicy(), range(150))),
        *asyncio.run(episodes_of(ExpertPolicy(), range(150))),
    ]
    return build_tokenizer(
        (message.text for episode in seen for message in episode.messages if message.role in ("user", "tool")),
        words=words(),
        units=UNITS,
        spaces="none",
        dropped=DROPPED,
        chat_template=TERSE_TEMPLATE,
        context=CONTEXT,
    )


def demonstrations(tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> TokenBatch:
    """Rows of what the searcher did, with what the constraint would have allowed."""
    written = Demonstrations(tokenizer, action_format="bare", tools_in_prompt=False, constrain=True)
    policy = DemonstratingPolicy(Searcher(), written)
    first = derive_seed("warm start", seed)
    parts = []
    for start in range(0, count, CHUNK):
        # Of some at a time: rows need a fraction of the memory of episodes.
        episodes = asyncio.run(episodes_of(policy, range(first + start, first + min(start + CHUNK, count))))
        parts.append(build_rows(episodes, pad_token_id=tokenizer.pad_token_id))
    return TokenBatch.concat(parts)


def small_llama(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama of 0.5M parameters. Its weights begin wider than is usual, which one so narrow needs."""
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
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "warm_start", help="the folder to write")
    parser.add_argument("--episodes", type=int, default=12_000, help="demonstrations")
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    given = parser.parse_args()
    torch.set_num_threads(1)  # of a model this small a second thread makes nothing quicker
    began = time.process_time()
    tokenizer = household_tokenizer()
    model = small_llama(tokenizer, given.seed)
    compose_embeddings(model, tokenizer, seed=given.seed)
    print(f"{len(tokenizer)} tokens; {describe(model)}")
    rows = demonstrations(tokenizer, given.episodes, seed=given.seed)
    print(f"{len(rows)} demonstrations after {time.process_time() - began:.0f} s of processor time")

    def tell(progress: SFTProgress) -> None:
        if progress.step % 100 == 0 or progress.step == progress.steps:
            print(f"step {progress.step}/{progress.steps}  loss {progress.loss:.3f}", flush=True)

    fit(model, rows, SFT, progress=tell)
    save_model(given.out, model, tokenizer)
    print(f"written to {given.out} after {time.process_time() - began:.0f} s of processor time")


if __name__ == "__main__":
    main()
