"""What one call may use."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from reward_kit.errors import ConfigError

MOST_RESULT_KB = 1 << 20

_INTEGERS = ("memory_mb", "processes", "open_files", "disk_mb", "output_kb", "result_kb")
_AT_LEAST = {"memory_mb": 16, "processes": 0, "open_files": 8, "disk_mb": 1, "output_kb": 0, "result_kb": 1}
_AT_MOST = {"memory_mb": 1 << 20, "processes": 4096, "open_files": 4096, "disk_mb": 1 << 20}
_AT_MOST |= {"output_kb": 1 << 20, "result_kb": MOST_RESULT_KB}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one call; a call that reaches one fails with a class of its own.

    Attributes:
        wall_s: seconds until it is killed.
        cpu_s: seconds of CPU time, in whole seconds, rounded up; of one process, where it may start several.
        memory_mb: MiB of address space of each process, beyond what the preloaded interpreter has mapped. A call with
            `processes` above 0 can hold `memory_mb` times (1 + `processes`), and `disk_mb` of files.
        processes: processes it may start; with 0 it can start none, and no program. Threads count as processes.
        open_files: descriptors, the four it is born with included.
        disk_mb: MiB of files, in a folder of its own that is gone afterwards.
        output_kb: KiB kept of each of its output and its errors; the rest is dropped and the outcome says so.
        result_kb: KiB of its result.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: int = 512
    processes: int = 0
    open_files: int = 64
    disk_mb: int = 16
    output_kb: int = 64
    result_kb: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_count = field.name in _INTEGERS
            if isinstance(value, bool) or not isinstance(value, int if is_count else int | float):
                wanted = "a whole number" if is_count else "a number of seconds"
                raise ConfigError(f"limits.{field.name} must be {wanted}, not {value!r}")
            if is_count and not _AT_LEAST[field.name] <= value <= _AT_MOST[field.name]:
                raise ConfigError(
                    f"limits.{field.name} must lie between {_AT_LEAST[field.name]} and {_AT_MOST[field.name]:,}, "
                    f"not {value:,}"
                )
            if not is_count and not (math.isfinite(value) and 0 < value <= 86_400):
                raise ConfigError(f"limits.{field.name} must be a positive number of seconds up to a day, not {value}")

    @property
    def output_bytes(self) -> int:
        """`output_kb` in bytes."""
        return self.output_kb * 1024

    @property
    def result_bytes(self) -> int:
        """`result_kb` in bytes."""
        return self.result_kb * 1024
