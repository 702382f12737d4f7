"""The tool runner of the `anthropic` package; prompt, base URL, API and mode are command-line arguments.

Nothing in it knows of reward-kit.
"""

from __future__ import annotations

import asyncio
import sys

from anthropic import AsyncAnthropic, beta_async_tool


@beta_async_tool
async def price_of(article: str) -> str:
    """What an article costs."""
    return {"bread": "2.50 EUR", "milk": "1.20 EUR"}.get(article, "unknown")


async def main(prompt: str, base_url: str, api: str, mode: str) -> None:
    assert api == "messages"
    runner = AsyncAnthropic(base_url=base_url, api_key="not used").beta.messages.tool_runner(
        model="any-name",
        max_tokens=1000,
        system="You sell things.",
        tools=[price_of],
        messages=[{"role": "user", "content": prompt}],
        stream=mode == "streamed",
    )
    async for turn in runner:
        message = await turn.get_final_message() if mode == "streamed" else turn
    print("".join(block.text for block in message.content if block.type == "text"))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
