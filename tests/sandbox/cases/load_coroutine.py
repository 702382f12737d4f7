# expect: error|invalid-result | kind: reward | observe: an async function that nobody declared is no pass
import asyncio


async def evaluate(messages, ground_truth=None, **rest):
    await asyncio.sleep(0)
    return {"score": 1.0}
