"""Time and memory of importing a large `.eval` log, beside inspect's own readers on the same file in the same run.

    python benchmarks/import_logs.py --inspect PYTHON --mib 250 --repetitions 3

PYTHON is an interpreter with inspect_ai 0.3, which makes the samples: agents with 30 tool calls each, and their events.
They are repeated with new ids until the log has the size. Needs the extra `logs`. Each reader runs in a process of its
own. The figures are its CPU seconds (user and system) and its maximum resident memory, and the ratios to
`reward-kit import`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import zstandard

from reward_kit.runs.logs.documents import LogArchive

SAMPLES = 24
ZSTANDARD = 93
MAKE = """
import random, sys
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import tool

rng = random.Random(0)
words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(20_000)]
text = lambda count: " ".join(rng.choices(words, k=count))

@tool
def bash():
    async def execute(cmd: str):
        '''Run a command.

        Args:
            cmd: The command.
        '''
        return text(600)
    return execute

def reply(messages, tools, tool_choice, config):
    turn = sum(message.role == "assistant" for message in messages)
    if turn < 30:
        output = ModelOutput.for_tool_call("mockllm/model", "bash", {"cmd": text(40)}, content=text(150))
    else:
        output = ModelOutput.from_content("mockllm/model", text(150))
    output.usage = ModelUsage(input_tokens=900, output_tokens=200, total_tokens=1100)
    return output

samples = [Sample(id=i, input=text(200), target="a b", metadata={"level": i % 5}) for i in range(int(sys.argv[1]))]
solver = [system_message(text(300)), use_tools(bash()), generate()]
[log] = eval(
    Task(dataset=samples, solver=solver, scorer=includes(), name="agents"),
    model=get_model("mockllm/model", custom_outputs=reply), log_dir=sys.argv[2], display="none",
)
assert log.status == "success", log.error
"""
READ_ALL = "from inspect_ai.log import read_eval_log; import sys; read_eval_log(sys.argv[1])"
READ_SAMPLES = (
    "from inspect_ai.log import read_eval_log_samples; import sys\n"
    "for sample in read_eval_log_samples(sys.argv[1], all_samples_required=False): pass"
)


def repeat_samples(source: Path, path: Path, mib: int) -> tuple[int, int]:
    """Write a log of about `mib` MiB with the samples of another, and return their number and size as JSON."""
    compressor, directory, number, size = zstandard.ZstdCompressor(level=3), [], 0, 0
    with LogArchive(source) as log, path.open("wb") as file:
        names = [name for name in log.names if name.startswith("samples/")]
        samples = [log.read(name).removeprefix(f'{{"id":{name[8:].partition("_")[0]},'.encode()) for name in names]

        def add(name: str, data: bytes) -> None:
            nonlocal size
            packed, size = compressor.compress(data), size + len(data)
            sizes = (zlib.crc32(data), len(packed), len(data), len(name), 0)
            entry = struct.pack("<HHHHHIIIHH", 45, 0, ZSTANDARD, 0, 33, *sizes)
            directory.append((entry, name, file.tell()))
            file.write(b"PK\3\4" + entry + name.encode() + packed)

        while file.tell() < mib * 2**20:
            add(f"samples/{number}_epoch_1.json", f'{{"id":{number},'.encode() + samples[number % len(samples)])
            number += 1
        header, summaries = log.parse("header.json"), log.parse("summaries.json")
        header["eval"]["dataset"] |= {"samples": number, "sample_ids": list(range(number))}
        listed = [{**summaries[i % len(summaries)], "id": i} for i in range(number)]
        for name, content in (("summaries.json", listed), ("header.json", header)):
            add(name, json.dumps(content).encode())
        start = file.tell()
        for entry, name, offset in directory:
            file.write(
                b"PK\1\2" + struct.pack("<H", 45) + entry + struct.pack("<HHHII", 0, 0, 0, 0, offset) + name.encode()
            )
        counts = struct.pack("<HHHHIIH", 0, 0, len(directory), len(directory), file.tell() - start, start, 0)
        file.write(b"PK\5\6" + counts)
    return number, size


def measure(command: list[str]) -> tuple[float, float]:
    """Run a command, and return its CPU seconds and its maximum resident memory in MiB."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[:3]} failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    """Print the figures of each reader."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inspect", metavar="PYTHON", required=True)
    parser.add_argument("--mib", type=int, default=50)
    parser.add_argument("--repetitions", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made, log = Path(folder) / "made", Path(folder) / "log.eval"
        subprocess.run([arguments.inspect, "-c", MAKE, str(SAMPLES), str(made)], check=True, stdout=subprocess.DEVNULL)
        samples, size = repeat_samples(next(made.glob("*.eval")), log, arguments.mib)
        mib = log.stat().st_size / 2**20
        print(f"{mib:.0f} MiB, {size / 2**20:.0f} MiB of JSON, {samples} samples", flush=True)
        readers = {
            "reward-kit import": [sys.executable, "-m", "reward_kit.cli.main", "import", str(log), "--log-dir", folder],
            "read_eval_log_samples": [arguments.inspect, "-c", READ_SAMPLES, str(log)],
            "read_eval_log": [arguments.inspect, "-c", READ_ALL, str(log)],
        }
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
        for _ in range(arguments.repetitions):
            for name, command in readers.items():
                figures[name].append(measure(command))
                cpu_s, memory = figures[name][-1]
                print(f"  {name:22} {cpu_s:7.1f} s CPU {memory:6.0f} MiB", flush=True)
        ours = statistics.median(cpu_s for cpu_s, _ in figures["reward-kit import"])
        print("median of the repetitions:")
        for name, values in figures.items():
            cpu_s, memory = (statistics.median(value[i] for value in values) for i in (0, 1))
            per = f"{100 * cpu_s / mib:6.2f} s per 100 MiB"
            print(f"{name:22} {cpu_s:7.1f} s CPU  {per}  {memory:6.0f} MiB memory  {cpu_s / ours:5.2f} times")


if __name__ == "__main__":
    main()
