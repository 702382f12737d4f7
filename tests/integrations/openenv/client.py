"""OpenEnv's client, which takes the given actions and prints each answer as JSON.

python client.py ws://127.0.0.1:8000 SEED '[{"kind": "add"}]'
"""

from __future__ import annotations

import asyncio
import json
import sys

from openenv import GenericEnvClient


async def main(url: str, seed: int, actions: list[dict[str, object]]) -> None:
    async with GenericEnvClient(base_url=url) as client:
        answers = [await client.reset(seed=seed)]
        for action in actions:
            answers.append(await client.step(action))
        state = await client.state()
    rows = [(answer.observation, answer.reward, answer.done, answer.metadata) for answer in answers]
    print(json.dumps({"answers": rows, "state": state}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))
