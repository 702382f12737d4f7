"""What does it open, ask for and start? And does it run what a model writes?"""

from __future__ import annotations

from collections import defaultdict

from reward_kit.reward_checks.checkup import Checkup
from reward_kit.reward_checks.rollouts import request_of, said, user

_CANARY = "rk_canary"
_WORDS = {"file": "files opened", "environment": "environment variables", "network": "network", "process": "programs"}


async def runs_answers(checkup: Checkup) -> None:
    """Code in an answer, or in a question, is not run in the process that scores."""
    code = f"__import__('{_CANARY}')"
    forms = {
        code,
        f"{code} * \\pi",
        f"\\boxed{{{code}}}",
        f"<answer>{code}</answer>",
        f"[{code}, 1]",
        f"{{'a': {code}}}",
    }
    texts = sorted(forms | {ground.form.write(code) for ground in checkup.grounds if ground.form is not None})
    lines: dict[str, None] = {}
    for text in texts:
        seen = await checkup.see("code in the answer", checkup.first.answered(text))
        if any(kind == "code" and _CANARY in what for kind, what in seen.events):
            lines[f"the answer {text!r} was compiled as Python"] = None
    asked = request_of((user(code), said("42")), checkup.first.truth)
    seen = await checkup.see("code in the question", asked)
    if any(kind == "code" and _CANARY in what for kind, what in seen.events):
        lines["a user's message was compiled as Python"] = None
    if lines:
        text = (
            "runs what a model writes as Python, beside the reward itself; parse it, or run it in a sandbox of its own"
        )
        checkup.report.add("evaluates-answer", "error", text, list(lines)[:4])


async def reads(checkup: Checkup) -> None:
    """All that was opened, asked for and started in any call; information, not a wall."""
    found: dict[str, list[str]] = defaultdict(list)
    for kind, what in checkup.events:
        if kind in _WORDS:
            found[kind].append(what)
    for kind, names in found.items():
        checkup.report.facts[_WORDS[kind]] = sorted(set(names))[:10]
    if found["network"] or found["process"]:
        text = "asks for the network or starts programs in its calls; where it is confined that may be refused"
        lines = [f"{kind}: {what}" for kind in ("network", "process") for what in found[kind][:3]]
        checkup.report.add("reaches-out", "info", text, lines)
    elif found["file"] or found["environment"]:
        lines = [f"{kind}: {what}" for kind in ("file", "environment") for what in found[kind][:3]]
        checkup.report.add("reads-outside", "info", "its score may depend on files or variables of the machine", lines)
