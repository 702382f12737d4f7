"""An agent that depends only on `pydantic-ai`; prompt and base URL are command-line arguments.

Nothing in it knows of reward-kit.
"""

from __future__ import annotations

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def main(prompt: str, base_url: str, streamed: bool) -> None:
    model = OpenAIChatModel("any-name", provider=OpenAIProvider(base_url=base_url, api_key="not used"))
    agent = Agent(model, instructions="You sell things.")

    @agent.tool_plain
    def price_of(article: str) -> str:
        """What an article costs."""
        return {"bread": "2.50 EUR", "milk": "1.20 EUR"}.get(article, "unknown")

    if streamed:
        async with agent.run_stream(prompt) as running:
            print(await running.get_output())
    else:
        print((await agent.run(prompt)).output)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] == "streamed"))
