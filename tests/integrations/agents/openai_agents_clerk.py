"""An agent that depends only on `openai-agents`; prompt, base URL, API and mode are command-line arguments.

Nothing in it knows of reward-kit.
"""

from __future__ import annotations

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def price_of(article: str) -> str:
    """What an article costs.

    Args:
        article: its name.
    """
    return {"bread": "2.50 EUR", "milk": "1.20 EUR"}.get(article, "unknown")


async def main(prompt: str, base_url: str, api: str, mode: str) -> None:
    client = AsyncOpenAI(base_url=base_url, api_key="not used")
    kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    model = kind(model="any-name", openai_client=client)
    agent = Agent(name="Clerk", instructions="You sell things.", tools=[price_of], model=model)
    by_id = {"auto_previous_response_id": True} if api == "responses_by_id" else {}
    if mode == "streamed":
        running = Runner.run_streamed(agent, prompt, **by_id)
        async for _ in running.stream_events():
            continue
        print(running.final_output)
    else:
        print((await Runner.run(agent, prompt, **by_id)).final_output)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
