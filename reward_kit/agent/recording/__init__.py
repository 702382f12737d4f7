"""The recording endpoint: a server for the requests of agents that have their own loop.

`RecordingEndpoint` is the server. Agents may use any API of `APIS`, each of which is converted from and to chat form.
"""

from reward_kit.agent.recording.api import ChatMessage, ChatRequest, RecordedAnswer, ServedModel
from reward_kit.agent.recording.endpoint import APIS, RecordingEndpoint

__all__ = ["APIS", "ChatMessage", "ChatRequest", "RecordedAnswer", "RecordingEndpoint", "ServedModel"]
