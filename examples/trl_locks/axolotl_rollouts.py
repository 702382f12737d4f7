"""What `axolotl.yml` names. Run as a script, it writes the files that Axolotl reads: `model/` and `prompts.jsonl`.

python axolotl_rollouts.py && axolotl train axolotl.yml
"""

from __future__ import annotations

import json
from pathlib import Path

import locks


def write(folder: Path) -> None:
    """A model that has everything to learn, and the names of the locks."""
    words = locks.tokenizer()
    locks.model(0, words).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    lines = [json.dumps({"prompt": sample.id}) + "\n" for sample in locks.samples()]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path())
else:
    rollouts = locks.rollouts(locks.policy("model", lockstep=True))
