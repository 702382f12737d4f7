"""The stages of the generation engine: equality with single generation and with the trainer, and throughput."""

from __future__ import annotations

import asyncio
import copy
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2ForCausalLM

from benchmarks.gpu_campaign.context import StageContext
from benchmarks.gpu_campaign.models import (
    SHAPES,
    is_importable,
    logit_error,
    peak_memory_gb,
    qwen2,
    reset_peak_memory,
    synchronize,
)
from reward_kit.agent.policies.hf.engine import Engine, Generated
from reward_kit.agent.policies.hf.sampling import Sampling
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.tokens import TokenBatch

GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling()


class Work(NamedTuple):
    """Prompts, and the number of tokens to sample after each."""

    prompts: list[list[int]]
    new_tokens: int

    @classmethod
    def random(cls, count: int, longest: int, new_tokens: int, vocabulary: int) -> Work:
        """Return prompts of different lengths."""
        rng = np.random.default_rng(0)
        lengths = rng.integers(max(longest // 8, 1), longest + 1, count)
        return cls([rng.integers(1, vocabulary, size).tolist() for size in lengths], new_tokens)


def new_engine(model: PreTrainedModel, work: Work, *, together: bool = True, **options: bool) -> Engine:
    """Return an engine with memory for all prompts of a work, or for a single one."""
    capacity = max(map(len, work.prompts)) + work.new_tokens
    return Engine(model, stop_ids=[], max_context=capacity, max_slots=len(work.prompts) if together else 1, **options)


async def turns(engine: Engine, work: Work, sampling: Sampling, *, together: bool = True) -> list[Generated]:
    """Sample a turn after each prompt, all together or one after the other. Seeds depend only on the index."""

    async def turn(index: int) -> Generated:
        slot = slots[index] if together else engine.open((index,), index)
        ids = work.prompts[index]
        made = await engine.generate(slot, ids, max_new_tokens=work.new_tokens, sampling=sampling)
        await engine.close_slot(slot)
        return made

    indices = range(len(work.prompts))
    slots = [engine.open((index,), index) for index in indices] if together else []
    return list(await asyncio.gather(*map(turn, indices))) if together else [await turn(index) for index in indices]


def sample(
    model: PreTrainedModel, work: Work, sampling: Sampling, *, together: bool = True, **options: bool
) -> list[Generated]:
    """Sample with a new engine.

    Raises:
        RuntimeError: If the engine does not use CUDA graphs although it should.
    """

    async def run() -> list[Generated]:
        engine = new_engine(model, work, together=together, **options)
        made = await turns(engine, work, sampling, together=together)
        await engine.close()
        if engine.has_graphs is not options.get("cuda_graphs", False):
            raise RuntimeError("the engine does not use CUDA graphs; the log contains the reason")
        return made

    return asyncio.run(run())


def engine(context: StageContext) -> None:
    """Compare the engine's tokens and log-probabilities in a batch, one by one, and with the trainer's."""
    shape = SHAPES["small" if context.is_full else "tiny"]
    work = Work.random(64, 400, 64, shape.vocabulary) if context.is_full else Work.random(6, 40, 12, shape.vocabulary)
    alone = Work(work.prompts[:16], work.new_tokens)
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        model = qwen2(shape, context.device, dtype, is_peaked=True, positions=1024)
        judge = copy.deepcopy(model)
        tolerance = logit_error(dtype, shape.layers, shape.width, _logit_scale(judge, work.prompts[0]))
        context.record(**{f"{short}_tolerance": tolerance})
        for label, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            batched = sample(model, work, sampling)
            single = sample(model, alone, sampling, together=False)
            name = f"{short}_{label}"
            _compare(context, name, judge, alone, (batched[: len(alone.prompts)], single), sampling, tolerance)
            if context.device == "cuda":
                try:
                    replayed = sample(model, work, sampling, cuda_graphs=True)
                except RuntimeError as error:
                    context.check(False, f"{name}: {error}")
                    continue
                name = f"{name}_cuda_graphs"
                _compare(context, name, judge, work, (batched, replayed), sampling, tolerance)
        gap = _trainer_gap(judge, work, batched, context.device)
        context.record(**{f"{short}_trainer_gap_max": float(gap.max()), f"{short}_trainer_gap_mean": float(gap.mean())})
        # The trainer and the engine compute every logit once, so both have the error of the tolerance.
        context.check(float(gap.max()) <= 2 * tolerance, f"{short}: the trainer's logprobs differ by {gap.max():.2g}")
        # Six standard deviations are the tolerance of one computation, and the mean of a difference is about one.
        is_close = float(gap.mean()) <= tolerance / 6
        context.check(is_close, f"{short}: the trainer's logprobs differ by {gap.mean():.2g} on average")
        for name in ("lockstep", "lockstep_cuda_graphs"):
            has_graphs = name == "lockstep_cuda_graphs"
            if has_graphs and (context.device != "cuda" or context.failures):
                continue
            first, second = (sample(model, work, SAMPLED, lockstep=True, cuda_graphs=has_graphs) for _ in range(2))
            is_equal = [one.token_ids for one in first] == [one.token_ids for one in second]
            is_equal = is_equal and [one.logprobs for one in first] == [one.logprobs for one in second]
            context.record(**{f"{short}_{name}_is_bitwise_equal": is_equal})
            context.check(is_equal, f"{short}: two runs in {name} differ")
    if context.device != "cuda":
        context.skip_part("cuda_graphs", "a CPU has none")


def _compare(
    context: StageContext,
    name: str,
    judge: PreTrainedModel,
    work: Work,
    generated: tuple[Sequence[Generated], Sequence[Generated]],
    sampling: Sampling,
    tolerance: float,
) -> None:
    """Check that tokens differ only where the choice is closer than rounding."""
    different, gaps = _differences(judge, work, *generated, sampling)
    context.record(**{f"{name}_tokens_differ": f"{different} of {len(generated[1]) * work.new_tokens}"})
    if gaps:
        context.record(**{f"{name}_largest_gap_where_they_differ": max(gaps)})
    gap = max(gaps, default=0.0)
    context.check(gap <= tolerance, f"{name}: tokens differ where the choice is {gap:.2g} apart")


def _differences(
    judge: PreTrainedModel,
    work: Work,
    batched: Sequence[Generated],
    single: Sequence[Generated],
    sampling: Sampling,
) -> tuple[int, list[float]]:
    """Return the number of different tokens, and for each row's first one, how far apart the two choices are.

    After the first difference, the contexts differ, and so may all later tokens. For greedy tokens, the distance is
    that of the two logits. A sampled token changes if the uniform number lies between the two cumulative distributions,
    so the distance is the change of logits that moves a boundary between the tokens to this number.
    """
    different, gaps = 0, []
    for index, (prompt, one, other) in enumerate(zip(work.prompts, batched, single, strict=True)):
        pairs = list(zip(one.token_ids, other.token_ids, strict=True))
        different += sum(a != b for a, b in pairs)
        place = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            continue
        logits_V = _last_logits(judge, [*prompt, *one.token_ids[:place]])
        a, b = pairs[place]
        if sampling is GREEDY:
            gaps.append(abs(float(logits_V[a] - logits_V[b])))
            continue
        uniform = np.random.default_rng(index).random(place + 1)[place]
        cumulative = logits_V.softmax(0).cumsum(0)
        low = min(a, b)
        # A change of all logits by at most t changes a cumulative probability c by at most about 2·t·c·(1 - c).
        boundary = float(cumulative[low : max(a, b)].sub(uniform).abs().min())
        gaps.append(boundary / max(2 * uniform * (1 - uniform), 1e-9))
    return different, gaps


@torch.no_grad()
def _last_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids], device=model.device)).logits[0, -1].double()


@torch.no_grad()
def _logit_scale(model: PreTrainedModel, ids: Sequence[int]) -> float:
    return float(model(input_ids=torch.tensor([ids], device=model.device)).logits.float().std())


def rows_of(work: Work, generated: Sequence[Generated]) -> TokenBatch:
    """Return a row for each prompt and its answer."""
    contexts = [[*prompt, *one.token_ids] for prompt, one in zip(work.prompts, generated, strict=True)]
    shape = (len(contexts), max(map(len, contexts)))
    names = ("input_ids", "attention_mask", "action_mask", "loss_mask")
    batch: dict[str, Any] = {name: np.zeros(shape, dtype=np.int32) for name in names}
    batch |= {name: np.zeros(shape) for name in ("logprobs", "advantages")}
    for row, (ids, one) in enumerate(zip(contexts, generated, strict=True)):
        start, stop = len(ids) - len(one.token_ids), len(ids)
        batch["input_ids"][row, :stop], batch["attention_mask"][row, :stop] = ids, 1
        batch["action_mask"][row, start:stop] = batch["loss_mask"][row, start:stop] = 1
        batch["logprobs"][row, start:stop] = one.logprobs
    return TokenBatch(batch, {}, {"padding": "right", "pad_token_id": 0})


def _trainer_gap(judge: PreTrainedModel, work: Work, generated: Sequence[Generated], device: str) -> np.ndarray:
    """Return the absolute differences between recorded log-probabilities and those of a learner on a copy."""
    rows = rows_of(work, generated)
    learner = PPOLearner(copy.deepcopy(judge), PPOConfig(), device=device)
    is_sampled = rows.batch["action_mask"] == 1
    return np.abs(learner.logprobs(rows) - rows.batch["logprobs"])[is_sampled]


def throughput(context: StageContext) -> None:
    """Measure sampled tokens/s of the engine, of `generate`, and of vLLM, with the same model and prompts."""
    shape, device = SHAPES["0.5B" if context.is_full else "tiny"], context.device
    longest, new_tokens = (256, 128) if context.is_full else (24, 8)
    dtype = torch.bfloat16 if context.is_full else torch.float32
    batches = (1, 32, 256) if context.is_full else (1, 4)
    model = qwen2(shape, device, dtype, positions=1024)
    calls: dict[str, Callable[[Work], float]] = {
        "engine": lambda work: _engine_seconds(context, model, work, cuda_graphs=False),
        "generate": lambda work: _seconds(context, lambda one: _generate(model, one), work),
    }
    if device == "cuda":
        calls["engine_cuda_graphs"] = lambda work: _engine_seconds(context, model, work, cuda_graphs=True)
    else:
        context.skip_part("cuda_graphs", "a CPU has none")
    vllm = _vllm(context, model)
    if vllm is not None:
        calls["vllm"] = lambda work: _seconds(context, vllm, work)
    for batch in batches:
        work = Work.random(batch, longest, new_tokens, shape.vocabulary)
        reset_peak_memory(device)
        for label, seconds in calls.items():
            context.record(**{f"batch_{batch}_{label}_tokens_per_s": batch * new_tokens / seconds(work)})
        context.record(**{f"batch_{batch}_peak_memory_gb": peak_memory_gb(device)})


def _seconds(context: StageContext, call: Callable[[Work], Any], work: Work) -> float:
    """Return the seconds for a work, after a warm-up with prompts of the same lengths, which differ from the start."""
    call(Work([prompt[::-1] for prompt in work.prompts], work.new_tokens))
    synchronize(context.device)
    began = time.perf_counter()
    call(work)
    synchronize(context.device)
    return time.perf_counter() - began


def _engine_seconds(context: StageContext, model: PreTrainedModel, work: Work, *, cuda_graphs: bool) -> float:
    engine = new_engine(model, work, cuda_graphs=cuda_graphs)
    seconds = _seconds(context, lambda one: asyncio.run(turns(engine, one, SAMPLED)), work)
    asyncio.run(engine.close())
    context.check(engine.has_graphs is cuda_graphs, "the engine does not use CUDA graphs; the log contains the reason")
    return seconds


def _generate(model: Qwen2ForCausalLM, work: Work) -> None:
    """Sample with `generate` in a batch that is padded on the left."""
    width, device = max(map(len, work.prompts)), model.device
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in work.prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in work.prompts], device=device)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": work.new_tokens, "pad_token_id": 0}
    made = model.generate(ids, attention_mask=mask, **options)
    assert made.shape[1] == width + work.new_tokens, "generate stopped early"


def _vllm(context: StageContext, model: Qwen2ForCausalLM) -> Any:
    """Return a function that samples with vLLM, or None if it is not installed."""
    if not is_importable("vllm"):
        context.skip_part("vllm", "not installed")
        return None
    vllm = importlib.import_module("vllm")
    folder = Path(context.work) / "model"
    model.save_pretrained(folder)
    language_model = vllm.LLM(str(folder), skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.4)

    def sampled(work: Work) -> None:
        options = vllm.SamplingParams(temperature=1.0, max_tokens=work.new_tokens, ignore_eos=True, detokenize=False)
        language_model.generate([{"prompt_token_ids": prompt} for prompt in work.prompts], options, use_tqdm=False)

    return sampled
