"""An agent that depends only on `pydantic-ai`; prompt, base URL, API and mode are command-line arguments.

Nothing in it knows of reward-kit.
"""

from __future__ import annotations

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def model_for(base_url: str, api: str) -> Model:
    if api == "messages":
        return AnthropicModel("any-name", provider=AnthropicProvider(base_url=base_url, api_key="not used"))
    provider = OpenAIProvider(base_url=base_url, api_key="not used")
    if api == "chat":
        return OpenAIChatModel("any-name", provider=provider)
    return OpenAIResponsesModel("gpt-5", provider=provider)  # it sends the reasoning items of known models back


async def main(prompt: str, base_url: str, api: str, mode: str) -> None:
    agent = Agent(model_for(base_url, api), instructions="You sell things.")

    @agent.tool_plain
    def price_of(article: str) -> str:
        """What an article costs."""
        return {"bread": "2.50 EUR", "milk": "1.20 EUR"}.get(article, "unknown")

    if mode == "streamed":
        async with agent.run_stream(prompt) as running:
            print(await running.get_output())
    else:
        print((await agent.run(prompt)).output)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
