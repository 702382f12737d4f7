"""Time and memory of importing a large `.eval` log, beside inspect's own reader on the same file in the same run.

    python benchmarks/import_logs.py --mib 250 --inspect PYTHON

PYTHON is an interpreter with inspect_ai; without it, only the import is measured. Needs the extra `logs`. The log has
the members of a log of inspect 0.3, compressed with Zstandard: agents with 30 tool calls, and their events. Each reader
runs in a process of its own; the figures are its CPU seconds (user and system) and its maximum resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import zstandard

TURNS = 30
ZSTANDARD = 93
READ_ALL = "from inspect_ai.log import read_eval_log; import sys; read_eval_log(sys.argv[1])"
READ_SAMPLES = (
    "from inspect_ai.log import read_eval_log_samples; import sys\n"
    "for sample in read_eval_log_samples(sys.argv[1], all_samples_required=False): pass"
)


def sample(number: int, rng: random.Random, words: list[str]) -> dict:
    """Return a sample whose every model call is an event, as inspect writes it."""

    def text(count: int) -> str:
        return " ".join(rng.choices(words, k=count))

    messages = [{"id": f"s{number}", "role": "system", "content": text(300)}]
    messages.append({"id": f"u{number}", "role": "user", "source": "input", "content": text(200)})
    events = []
    for turn in range(TURNS):
        call = {"id": f"c{number}-{turn}", "function": "bash", "arguments": {"cmd": text(40)}, "type": "function"}
        answer = {"id": f"a{number}-{turn}", "role": "assistant", "source": "generate", "content": text(150)}
        messages.append({**answer, "tool_calls": [call], "model": "m"})
        result = {"role": "tool", "tool_call_id": call["id"], "function": "bash", "content": text(600)}
        messages.append({"id": f"t{number}-{turn}", **result})
        common = {"uuid": f"{number}-{turn}", "timestamp": "2026-11-29T01:00:00+00:00", "working_start": turn}
        output = {"model": "m", "choices": [{"message": messages[-2], "stop_reason": "tool_calls"}]}
        reply = {"output": output, "call": {"request": {"prompt": text(800)}, "response": {"text": text(150)}}}
        model = {
            "event": "model",
            "model": "m",
            "input": messages[:2],
            "tools": [],
            "tool_choice": "auto",
            "config": {},
        }
        events.append({**common, **model, **reply})
        tool = {"event": "tool", "type": "function", "id": call["id"], "function": "bash"}
        events.append({**common, **tool, "arguments": call["arguments"], "result": result["content"]})
    scores = {"match": {"value": rng.choice("CI"), "answer": text(3), "explanation": text(20)}}
    usage = {"m": {"input_tokens": 9_000, "output_tokens": 900, "total_tokens": 9_900}}
    head = {"id": number, "epoch": 1, "input": messages[1]["content"], "target": text(3), "messages": messages}
    end = {"scores": scores, "metadata": {"level": number % 5}, "store": {}, "events": events, "model_usage": usage}
    return {**head, "output": output, **end, "started_at": "2026-11-29T01:00:00+00:00", "total_time": 60.0}


def write_log(path: Path, mib: int) -> tuple[int, int]:
    """Write a log of about `mib` MiB, and return the number of its samples and their size as JSON."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(20_000)]
    spec = {"eval_id": "e", "run_id": "r", "created": "2026-11-29T01:00:00+00:00", "task": "t", "task_id": "t"}
    spec |= {"model": "m", "dataset": {}, "config": {}}
    header = {"version": 2, "status": "success", "eval": spec, "plan": {"name": "p", "steps": []}}
    header["stats"] = {"started_at": spec["created"], "completed_at": spec["created"], "model_usage": {}}
    compressor, directory, number, size = zstandard.ZstdCompressor(level=3), [], 0, 0
    with path.open("wb") as file:

        def add(name: str, value: object) -> None:
            nonlocal size
            data = json.dumps(value).encode()
            packed, size = compressor.compress(data), size + len(data)
            sizes = (zlib.crc32(data), len(packed), len(data), len(name), 0)
            entry = struct.pack("<HHHHHIIIHH", 45, 0, ZSTANDARD, 0, 33, *sizes)
            directory.append((entry, name, file.tell()))
            file.write(b"PK\3\4" + entry + name.encode() + packed)

        while file.tell() < mib * 2**20:
            number += 1
            add(f"samples/{number}_epoch_1.json", sample(number, rng, words))
        add("summaries.json", [{"id": n + 1, "epoch": 1, "input": "", "target": ""} for n in range(number)])
        spec["dataset"] = {"samples": number, "sample_ids": list(range(1, number + 1))}
        add("header.json", header)
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
    parser.add_argument("--mib", type=int, default=50)
    parser.add_argument("--inspect", metavar="PYTHON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.eval"
        samples, size = write_log(log, arguments.mib)
        mib = log.stat().st_size / 2**20
        print(f"{mib:.0f} MiB, {size / 2**20:.0f} MiB of JSON, {samples} samples")
        ours = [sys.executable, "-m", "reward_kit.cli.main", "import", str(log), "--log-dir", folder]
        readers = {"reward-kit import": ours}
        if arguments.inspect:
            readers["read_eval_log_samples"] = [arguments.inspect, "-c", READ_SAMPLES, str(log)]
            readers["read_eval_log"] = [arguments.inspect, "-c", READ_ALL, str(log)]
        for name, command in readers.items():
            cpu_s, memory = measure(command)
            print(f"{name:22} {cpu_s:7.1f} s CPU  {100 * cpu_s / mib:6.2f} s per 100 MiB  {memory:6.0f} MiB memory")


if __name__ == "__main__":
    main()
