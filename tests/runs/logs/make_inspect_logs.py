"""Make the fixtures `inspect_*.eval` and `.json` with inspect_ai itself: `python make_inspect_logs.py FOLDER`.

The logs were made by inspect_ai 0.3.285. They have tool calls, epochs, an error, a limit, and scorers of three kinds.
"""

import sys
import tempfile
from pathlib import Path

import inspect_ai
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log, write_eval_log
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, accuracy, includes, mean, scorer
from inspect_ai.solver import generate, solver, system_message, use_tools
from inspect_ai.tool import ToolError, tool


@tool
def add():
    async def execute(x: int, y: int):
        """Add two numbers.

        Args:
            x: First number.
            y: Second number.
        """
        if x < 0:
            raise ToolError("x must not be negative")
        return str(x + y)

    return execute


@scorer(metrics=[mean()])
def length():
    async def score(state, target):
        return Score(
            value=len(state.output.completion) / 10, explanation="length of the answer", metadata={"unit": "ch"}
        )

    return score


@scorer(metrics={"short": [mean()], "polite": [accuracy()]})
def style():
    async def score(state, target):
        return Score(value={"short": 0.5, "polite": "C"}, answer=state.output.completion)

    return score


@solver
def fail_on(word):
    async def solve(state, generate):
        if word in state.input_text:
            raise RuntimeError(f"cannot handle {word}")
        state.store.set("visited", [1, 2])
        return state

    return solve


@task
def sums():
    samples = [
        Sample(input="What is 1 + 1?", target="2", id="one", metadata={"level": 1, "tags": ["easy"]}),
        Sample(input="What is 2 + 2?", target=["4", "four"], id=2, choices=["3", "4"]),
        Sample(input="broken", target="", id="bad/../id"),
    ]
    solvers = [system_message("Use the tool."), use_tools(add()), fail_on("broken"), generate()]
    return Task(dataset=samples, solver=solvers, scorer=[includes(), length(), style()], epochs=2)


def outputs():
    usage = ModelUsage(input_tokens=20, output_tokens=5, total_tokens=35, input_tokens_cache_read=10, total_cost=0.001)
    call = ModelOutput.for_tool_call("mockllm", "add", {"x": 1, "y": 1})
    bad_call = ModelOutput.for_tool_call("mockllm", "add", {"x": -1, "y": 1})
    answer = ModelOutput.from_content("mockllm", "It is 2 ☃")
    reply = [call, bad_call, answer]
    for output in reply:
        output.usage = usage
    return [call, bad_call, answer, answer, call, call, call, call] * 3


def without_paths(log):
    """Replace the tracebacks, which name files of the machine, and keep the logs small."""
    log.eval.task_file, log.eval.model_args = "sums.py", {}
    for sample in log.samples:
        sample.events = [event for event in sample.events if event.event in ("model", "tool", "score", "error")]
        errors = [event.error for event in sample.events if event.event == "error"]
        for error in [*errors, *([sample.error] if sample.error else [])]:
            error.traceback = error.traceback_ansi = f"RuntimeError: {error.message}"
    return log


def make(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as logs:
        for name in ("small", "large"):
            model = get_model(f"mockllm/{name}", custom_outputs=outputs())
            options = {"max_samples": 1, "max_connections": 1, "fail_on_error": False, "message_limit": 8}
            log = inspect_ai.eval(sums(), model=model, log_dir=logs, display="none", log_format="eval", **options)[0]
            log = without_paths(read_eval_log(log.location))
            write_eval_log(log, str(folder / f"inspect_{name}.eval"))
        log.samples = log.samples[:2]
        write_eval_log(log, str(folder / "inspect_part.json"))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
