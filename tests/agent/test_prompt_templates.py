"""Test that ordinary message templates render as in Jinja and hostile ones end with one error."""

from __future__ import annotations

import jinja2
import pytest

from reward_kit.agent.prompt_templates import TemplateLimitError, compile_template, render_template
from reward_kit.agent.samples import Prompt, Sample
from reward_kit.errors import ConfigError
from reward_kit.models import TaskDefinitionModel
from tests.endless_server import peak

FIELDS = {
    "name": "Ada",
    "items": ["tea", "milk", "eggs"],
    "prices": {"tea": 2.5, "milk": 1, "eggs": 3.25},
    "rows": [{"id": 1, "tags": ["a", "b"]}, {"id": 2, "tags": []}],
    "number": 7,
    "text": "one\ntwo <three>\nfour",
    "nothing": None,
}

HONEST = [
    "Hello {{ name }}!",
    "{% for one in items %}{{ loop.index }}/{{ loop.length }} {{ one }}{% if not loop.last %}, {% endif %}{% endfor %}",
    "{% for item in items if item != 'milk' %}{{ loop.index }}{{ item }}{% else %}none{% endfor %}",
    "{% for name, price in prices.items() %}{{ name }}: {{ '%.2f' % price }}\n{% endfor %}",
    "{% for row in rows recursive %}{{ row.id }}{% for tag in row.tags %}-{{ tag }}{% endfor %}{% endfor %}",
    "{{ items | join(', ') }} {{ rows | map(attribute='id') | join('+') }} {{ items | length }}",
    "{{ rows | tojson(indent=2) }} {{ prices | dictsort }} {{ items | sort | list }}",
    "{{ text | indent(4) }} {{ text | upper | replace('ONE', '1') }} {{ text | wordwrap(5) }} {{ text | truncate(9) }}",
    "{{ '{:>8.2f}|{}'.format(prices.tea, name) }} {{ '%5d|%s' | format(number, name) }} {{ '%d %% %s' % (5, name) }}",
    "{{ name ~ '-' ~ number ~ nothing }} {{ number * 3 + 2 ** 5 - number // 2 % 3 }} {{ '=' * 20 }} {{ [1, 2] + [3] }}",
    "{% set ns = namespace(total=0) %}{% for p in items %}{% set ns.total = ns.total + 1 %}{% endfor %}{{ ns.total }}",
    "{% macro bold(t) %}**{{ t }}{{ caller() }}**{% endmacro %}{% call bold('x') %}y{{ name }}{% endcall %}",
    "{% set block %}{{ name }} {{ number }}{% endset %}{{ block | trim }}{% filter upper %}{{ name }}{% endfilter %}",
    "{{ 'yes' if 'tea' in items else 'no' }} {{ ('a', 'b')[1] }} {{ {'k': [1, (2, 3)]} }} {{ nothing is none }}",
    "{% for i in range(3) %}{% for j in range(i) %}{{ i }}{{ j }} {% endfor %}{% endfor %}{{ items[1:] | first }}",
    "{{ name.upper().center(9) }}{{ text.split('\n') | last }}{{ ' '.join(items) }}{{ name.replace('A', 'a') }}",
    "{% raw %}{{ not this }}{% endraw %}{# a comment #}{{ items | batch(2) | list }}{{ items | slice(2) | list }}\n",
    "{% with a = name, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ prices | xmlattr }}{{ text | e }}{{ 3.1 | round(1) }}",
    "{{ rows | selectattr('tags') | map(attribute='tags') | list }}{{ rows | groupby('id') | list }}{{ [1, 2] | sum }}",
]


@pytest.mark.parametrize("text", HONEST)
def test_ordinary_template_renders_as_in_jinja(text: str) -> None:
    plain = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    template, names = compile_template(text)
    assert render_template(template, FIELDS) == plain.from_string(text).render(FIELDS)
    assert names <= FIELDS.keys()


BOMBS = {
    "range": "{% for i in range(10**12) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ book }}{% endfor %}",
    "multiplied text": "{{ 'x' * 10**10 }}",
    "multiplied list": "{{ ([0] * 10**10) | length }}",
    "power": "{{ 10**(10**10) }}",
    "products": "{% set ns = namespace(n=10**999) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "doubled sum": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled text": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
    "doubled dict": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{%endfor%}",
    "doubled block": "{% set a %}{% for i in range(99999) %}{{ book }}{% endfor %}{% endset %}",
    "doubled macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "macro recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "center": "{{ 'x' | center(10**10) }}",
    "center method": "{{ 'x'.center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "to_bytes": "{{ (5).to_bytes(10**10, 'big') }}",
    "indent": "{{ ('\n' * 9999) | indent(9999) | indent(9999) }}",
    "indent text": "{{ ('\n' * 9999) | indent('x' * 99999) }}",
    "replace": "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
    "replace method": "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "replace keywords": "{{ ('x' * 99999) | replace(old='x', new='y' * 99999) }}",
    "join": "{{ range(99999) | join('y' * 99999) }}",
    "join method": "{{ ('y' * 99999).join(['a'] * 99999) }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "expandtabs": "{{ ('\t' * 9999).expandtabs(10**9) }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "nested format": "{{ '{:>{}}'.format(1, 10**10) }}",
    "format map": "{{ '{a:>10000000000}'.format_map({'a': 1}) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "format star": "{{ '%*d' | format(10**9, 1) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 3.5 | round(10**9, 'ceil') }}",
    "tojson": "{{ [[1]] | tojson(indent=10**9) }}",
    "sum": "{{ ([['x'] * 999] * 999) | sum(start=[]) }}",
    "wordwrap": "{{ ('x ' * 9999) | wordwrap(1, wrapstring='y' * 99999) }}",
    "urlize": "{{ ('www.a.de ' * 9999) | urlize(target='x' * 99999) }}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "map": "{{ ['x'] | map('center', 10**10) | list }}",
    "append": "{% set x = [] %}{{ x.append(x) }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep list": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep loops": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "long": "{{ name }}" * 200_000,
    "getattr": "{{ ''.__class__.__mro__ }}",
    "attr": "{{ '' | attr('__class__') }}",
}

PREPARE = """
import json, sys
from reward_kit.agent import prompt_templates
from reward_kit.agent.samples import Prompt, Sample
from reward_kit.errors import ConfigError
from reward_kit.models import TaskDefinitionModel
from tests.agent.test_prompt_templates import BOMBS
def render(name):
    task = {"name": "t", "messages": [{"role": "user", "content": BOMBS[name]}]}
    try:
        prompt = Prompt(TaskDefinitionModel.model_validate(task))
        prompt.render(Sample("s", {"book": "x" * 99999, "name": "n"}))
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{name} was rendered")
"""


@pytest.mark.parametrize(
    "seconds", [pytest.param(0.3, id="quick"), pytest.param(None, id="default", marks=pytest.mark.campaign)]
)
def test_hostile_template_raises_one_error_with_little_memory(seconds: float | None) -> None:
    cost = peak(
        PREPARE + (f"prompt_templates.TEMPLATE_CPU_S = {seconds}" if seconds else ""),
        """
        for name in BOMBS:
            message = render(name)
            assert len(message) < 1000 and message.count("\\n") < 3, (name, message[:2000])
        """,
    )
    assert (cost.kind, cost.message) == ("", "")
    assert cost.mb < 200, cost


def test_rendering_time_is_limited(monkeypatch) -> None:
    monkeypatch.setattr("reward_kit.agent.prompt_templates.TEMPLATE_CPU_S", 0.2)
    slow = "{% for i in range(99999) %}{% if book == other %}{% endif %}{% endfor %}"
    template, _ = compile_template(slow)
    book = "x" * 10_000_000
    with pytest.raises(TemplateLimitError, match=r"rendering took more than 0\.2 s of CPU time"):
        render_template(template, {"book": book, "other": book[:-1] + "y"})


def test_limit_error_names_template_sample_and_limit() -> None:
    task = TaskDefinitionModel.model_validate({"name": "t", "initial_user_prompt": "{{ 'x' | center(10**10) }}"})
    with pytest.raises(ConfigError) as raised:
        Prompt(task).render(Sample("s-1", {}, where="rows.jsonl:3"))
    assert str(raised.value) == (
        "sample 's-1' (rows.jsonl:3): message template \"{{ 'x' | center(10**10) }}\": "
        "a number above 10,000 is passed to 'center'"
    )
