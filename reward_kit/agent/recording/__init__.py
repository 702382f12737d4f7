"""The recording endpoint: a server that receives model requests from agents that have their own loop.

`RecordingEndpoint` is the server. Agents may use any API in `APIS`. Each of these APIs is converted to and from chat
format.
"""

from reward_kit.agent.recording.api import ChatMessage, ChatRequest, RecordedAnswer, ServedModel
from reward_kit.agent.recording.endpoint import APIS, RecordingEndpoint

__all__ = ["APIS", "ChatMessage", "ChatRequest", "RecordedAnswer", "RecordingEndpoint", "ServedModel"]
