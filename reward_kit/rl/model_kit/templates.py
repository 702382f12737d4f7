"""Our own chat templates, for models that we build: one token per role, nothing between messages, prefix-preserving.

    <|tools|>{"type": "function", …}       the tools, one a line, where there are any
    <|system|>You do chores.<|user|>You see a fridge 1.
    <|assistant|>go to fridge 1<|end|>     without the line breaks that stand here
    <|tool|>You arrive.<|assistant|>

A message begins with the mark of its role and ends where the next mark begins; only what the assistant says ends with
a token of its own, `<|end|>`, which is the end-of-sequence token, since somebody has to say that it is done. What a
message becomes never depends on what follows it, so that the tokens of an episode so far are always the beginning of
its next prompt. A mark that stands in the text of a message is broken up, so that a text cannot speak in another role.
Calls are written as the action format "hermes" writes them.
"""

from __future__ import annotations

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
ROLE_MARKS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")
SPECIAL_TOKENS = (PAD, UNKNOWN, END, *ROLE_MARKS)

CALL_MARKS = ("<tool_call>", "</tool_call>")
"""One token each, and part of the text: what stands between them is a call as JSON."""

CHAT_TEMPLATE = """\
{%- macro safe(text) -%}{{ text | replace('<|', '< |') }}{%- endmacro -%}
{%- macro words(content) -%}
{%- if content is string -%}{{ safe(content) }}
{%- elif content -%}{%- for part in content -%}{{ safe(part.text or '') }}{%- endfor -%}
{%- endif -%}{%- endmacro -%}
{%- macro written(call) -%}
{%- if call.arguments is string -%}{%- set arguments = call.arguments -%}
{%- else -%}{%- set arguments = call.arguments | tojson -%}{%- endif -%}
{{ '<tool_call>\\n{"name": ' ~ safe(call.name | tojson) ~ ', "arguments": ' ~ safe(arguments) ~ '}\\n</tool_call>' }}
{%- endmacro -%}
{%- if tools -%}<|tools|>{%- for tool in tools -%}
{{ safe(tool | tojson) }}{%- if not loop.last -%}{{ '\\n' }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ('system', 'developer') -%}<|system|>{{ words(message.content) }}
{%- elif message.role == 'user' -%}<|user|>{{ words(message.content) }}
{%- elif message.role in ('tool', 'function') -%}<|tool|>{{ words(message.content) }}
{%- elif message.role == 'assistant' -%}<|assistant|>
{%- if message.reasoning_content -%}
{{ '<think>\\n' ~ safe(message.reasoning_content) ~ '\\n</think>\\n\\n' }}{%- endif -%}
{{ words(message.content) }}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{ '\\n' }}{%- endif -%}
{{ written(call.function or call) }}{%- endfor -%}<|end|>
{%- else -%}{{ raise_exception('a message has the role system, user, assistant or tool; got ' ~ message.role) }}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
"""A chat with a system message, tools and calls, in which each role is one token that no text can write."""

TERSE_TEMPLATE = """\
{%- macro safe(text) -%}{{ text | replace('<|', '< |') }}{%- endmacro -%}
{%- for message in messages -%}
{%- set words = message.content if message.content is string else (message.content or []) | join('', 'text') -%}
{%- if message.role == 'assistant' -%}<|assistant|>{{ safe(words) }}<|end|>
{%- elif message.role in ('user', 'tool', 'function') -%}{{ ' ' ~ safe(words) }}
{%- elif message.role not in ('system', 'developer') -%}
{{ raise_exception('a message has the role system, user, assistant or tool; got ' ~ message.role) }}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
"""The shortest, for models that know one task by heart: what the world says is all that is not said by the assistant.

    Your task is: …<|assistant|>go to fridge 1<|end|> You arrive.<|assistant|>

System messages and tools are left out, and so are calls, which stand in what an assistant says with the action format
"bare".
"""
