"""What does a call cost, and how does the cost grow with the answer?"""

from __future__ import annotations

from collections.abc import Iterator

from reward_kit.reward_checks.bench import ATTACK_CPU_S, Seen
from reward_kit.reward_checks.checkup import Checkup
from reward_kit.reward_checks.grounds import Ground
from reward_kit.reward_checks.regexes import attacks
from reward_kit.reward_checks.report import shown

_CALLS = 30
_LENGTH = 10_000
_WORTH_S = 0.02
_STEEP = 3.0
_LONGEST_ATTACKS = 24
_MUCH_MB = 200.0


async def cost(checkup: Checkup) -> None:
    """Time and memory of an ordinary call, and of one on a long answer."""
    ground = checkup.first
    request = ground.gold or ground.answered("The answer is 42.")
    seen = [await checkup.bench.see(request) for _ in range(_CALLS)]
    times = sorted(one.wall_s for one in seen if one.wall_s)
    if not times:
        return
    short = await checkup.bench.see(request, memory=True)
    long = await checkup.bench.see(ground.answered("word " * 20_000), memory=True)
    checkup.report.facts["time of a call, ms"] = {
        "p50": _round(1000 * times[len(times) // 2]),
        "p95": _round(1000 * times[int(len(times) * 0.95)]),
    }
    checkup.report.facts["memory of a call, MiB"] = {
        "as a rule": _round(short.peak_mb),
        "on 100,000 characters": _round(long.peak_mb),
    }
    if long.peak_mb > _MUCH_MB:
        text = f"holds {long.peak_mb:.0f} MiB on an answer of 100,000 characters"
        checkup.report.add("much-memory", "warning", text)


async def growth(checkup: Checkup) -> None:
    """Twice the answer may take twice the time, not four times."""
    steep = {}
    for name, piece in _pieces(checkup.first):
        seen = await _at(checkup, piece, 1)
        if seen.cpu_s < _WORTH_S / 4 and not _is_late(seen):
            continue
        double = await _at(checkup, piece, 2)
        if _is_late(seen) or _is_late(double):
            steep[name] = f"{name}, {_LENGTH:,} or {2 * _LENGTH:,} characters: does not come back in time"
        elif double.cpu_s > _WORTH_S and double.cpu_s > _STEEP * seen.cpu_s:
            again, double = (
                await _at(checkup, piece, 1),
                await _at(checkup, piece, 2),
            )  # what was seen once may be chance
            if double.cpu_s > _STEEP * again.cpu_s:
                steep[name] = (
                    f"{name}: {1000 * again.cpu_s:.0f} ms on {_LENGTH:,} characters, "
                    f"{1000 * double.cpu_s:.0f} ms on {2 * _LENGTH:,}"
                )
        if steep:
            break
    if steep:
        text = "its time grows faster than the answer: a long one holds up the batch"
        checkup.report.add("slow-growth", "error", text, list(steep.values()))


def _pieces(ground: Ground) -> Iterator[tuple[str, str]]:
    """What long answers may be full of, each with its name; also written as the reward wants an answer."""
    yield from {
        "words": "some words and more ",
        "digits": "1234567890",
        "one letter": "a",
        "spaces": " ",
        "line breaks": "\n",
        "opened tags": "<answer>",
        "opened thoughts": "<think> ",
        "opened boxes": "\\boxed{",
        "opened brackets": "([{",
        "commas and digits": "1,",
        "code fences": "```python\n",
        "quotes": '"',
        "sentences with numbers": "Then 12 and 7 make 19. ",
    }.items()
    if ground.truth is not None and ground.form is not None and ground.wrong:
        yield "wrong answers", ground.written(ground.wrong[0]) + "\n"


async def _at(checkup: Checkup, piece: str, times: int) -> Seen:
    text = piece * (times * _LENGTH // len(piece))
    return await checkup.bench.see(checkup.first.answered(text))


async def patterns(checkup: Checkup) -> None:
    """Its own regular expressions, on texts that they may never come back from."""
    found = checkup.source.patterns
    if not found:
        return
    if not checkup.bench.is_confined:
        why = "it runs in this process, where nothing can stop an expression; --sandbox warm can"
        checkup.report.cannot("whether its regular expressions come back", why)
        return
    lines: dict[str, str] = {}
    for pattern, short, _ in list(attacks(found))[:_LONGEST_ATTACKS]:
        if pattern in lines:
            continue
        for text in dict.fromkeys((short, checkup.first.form.write(short) if checkup.first.form else short)):
            seen = await checkup.bench.attack(checkup.first.answered(text))
            if _is_late(seen):
                lines[pattern] = (
                    f"{shown(pattern, 60)}: over {ATTACK_CPU_S:.0f} s on {len(text)} characters: {shown(text, 50)}"
                )
                break
    if lines:
        text = (
            "a regular expression takes exponential time on a short text that a model may write; repeat nothing that "
            "repeats"
        )
        checkup.report.add("catastrophic-regex", "error", text, list(lines.values())[:3])
    if slow := await _long_attacks(checkup, lines):
        text = (
            "a regular expression takes quadratic time or more on a long text that a model may write; let no two "
            r"repeats beside each other match the same signs (\s*.*?\s*: strip() afterwards), or bound them"
        )
        checkup.report.add("slow-regex", "error", text, slow[:3])


async def _long_attacks(checkup: Checkup, known: dict[str, str]) -> list[str]:
    """Those that take long without being exponential, with the times of shorter texts."""
    found: dict[str, str] = {}
    for pattern, short, long in list(attacks(checkup.source.patterns))[:_LONGEST_ATTACKS]:
        if pattern in known or pattern in found or not _is_late(await _attacked(checkup, long)):
            continue
        text = long[: len(long) // 16] + short[-2:]
        seen = await _attacked(checkup, text)
        took = f"over {ATTACK_CPU_S:.0f} s" if _is_late(seen) else f"{1000 * seen.cpu_s:.0f} ms"
        found[pattern] = (
            f"{shown(pattern, 40)}: {took} on {len(text):,} characters, over {ATTACK_CPU_S:.0f} s on {len(long):,}"
        )
    return list(found.values())


async def _attacked(checkup: Checkup, text: str) -> Seen:
    return await checkup.bench.attack(checkup.first.answered(text))


def _is_late(seen: Seen) -> bool:
    return seen.failure is not None and seen.failure.failure_class == "timeout"


def _round(value: float) -> float:
    return float(f"{value:.3g}")
