"""The rollout function for `axolotl.yml`. Run as a script, it writes Axolotl's inputs: `model/` and `prompts.jsonl`.

python axolotl_rollouts.py && axolotl train axolotl.yml
"""

from __future__ import annotations

import json
from pathlib import Path

import locks


def write(folder: Path) -> None:
    """Write an untrained model and the names of the locks."""
    tokenizer = locks.tokenizer()
    locks.model(0, tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [json.dumps({"prompt": sample.id}) + "\n" for sample in locks.samples()]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path())
else:
    rollouts = locks.rollouts(locks.policy("model", lockstep=True))
