"""A LangGraph agent of `langchain`; prompt, base URL, API and mode are command-line arguments.

Nothing in it knows of reward-kit.
"""

from __future__ import annotations

import asyncio
import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def price_of(article: str) -> str:
    """What an article costs."""
    return {"bread": "2.50 EUR", "milk": "1.20 EUR"}.get(article, "unknown")


def model_for(base_url: str, api: str) -> BaseChatModel:
    if api == "messages":
        return ChatAnthropic(model="any-name", base_url=base_url, api_key="not used")
    return ChatOpenAI(model="any-name", base_url=base_url, api_key="not used", use_responses_api=api == "responses")


async def main(prompt: str, base_url: str, api: str, mode: str) -> None:
    agent = create_agent(model_for(base_url, api), [price_of], system_prompt="You sell things.")
    given = {"messages": [{"role": "user", "content": prompt}]}
    if mode == "streamed":
        # With the mode `messages`, the models stream their answers.
        async for kind, value in agent.astream(given, stream_mode=["messages", "values"]):
            if kind == "values":
                messages = value["messages"]
    else:
        messages = (await agent.ainvoke(given))["messages"]
    print(messages[-1].text)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
