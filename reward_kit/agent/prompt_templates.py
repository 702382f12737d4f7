"""The message templates of task files: sandboxed Jinja with a limit on the work that each rendering may do.

A template comes from a task file and its values come from a dataset, so either may be hostile. Jinja's sandbox blocks
access to Python, but a `{% for %}` loop, `'x' * 10**10` or `|center(10**10)` can still exhaust time and memory. Here,
each rendering has a budget. Every loop, call and filter, and every operator that creates a larger value, is charged to
that budget. The charge is made in advance if the size of the result can be computed. Values are immutable.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes, runtime, sandbox
from jinja2.visitor import NodeTransformer

from reward_kit.safe_input import (
    TEMPLATE_BYTES,
    TEMPLATE_CPU_S,
    TEMPLATE_NUMBER,
    TEMPLATE_OUTPUT_CHARS,
    TEMPLATE_WORK,
)

_STEP = 16
_NUMBER_BITS = 4_096
_LARGE_NUMBER = re.compile(r"\d{5,}")
_LARGE_PERCENT = re.compile(r"%(\([^)]*\))?[-#0 +]*(\*|\d{5,}|\d*\.(\*|\d{5,}))")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_REPEATING = frozenset({"join", "replace", "translate"})
_PADDING_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson")
_ITEM = 8


class TemplateLimitError(Exception):
    """Raised if a template exceeds a limit. The message names the limit."""


class _Budget:
    """The amount of work that remains for one rendering."""

    def __init__(self) -> None:
        self._left, self._end = TEMPLATE_WORK, time.thread_time() + TEMPLATE_CPU_S

    def spend(self, work: int) -> None:
        """Deduct the cost of a step, or of a value with the given number of characters or items."""
        self._left -= work
        if self._left < 0:
            raise TemplateLimitError(
                f"rendering produces more than {TEMPLATE_WORK:,} characters, counting list items and steps"
            )
        if time.thread_time() > self._end:
            raise TemplateLimitError(f"rendering took more than {TEMPLATE_CPU_S:g} s of CPU time")


_budget: ContextVar[_Budget] = ContextVar("_budget")


def compile_template(text: str) -> tuple[jinja2.Template, frozenset[str]]:
    """Compile a template, and return it with the names of the variables that it uses.

    Raises:
        TemplateLimitError: If the template is too large or nested too deeply.
        jinja2.TemplateSyntaxError: If the template has a syntax error.
    """
    from jinja2 import meta

    if len(text) > TEMPLATE_BYTES:
        raise TemplateLimitError(f"the template has more than {TEMPLATE_BYTES // 1024} KiB")
    environment = _BoundedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    try:
        tree = environment.parse(text)
        names = frozenset(meta.find_undeclared_variables(tree))
        return environment.from_string(_Payments().visit(tree)), names
    except jinja2.TemplateSyntaxError:
        raise
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:  # raised for the generated Python code
        raise TemplateLimitError(f"the template is nested too deeply to be compiled ({type(error).__name__})") from None


def render_template(template: jinja2.Template, fields: Mapping[str, Any]) -> str:
    """Return the rendered text of a template.

    Raises:
        TemplateLimitError: If the text, or the work needed to produce it, exceeds a limit.
    """
    token = _budget.set(_Budget())
    try:
        pieces, size = [], 0
        for piece in template.generate(fields):
            size += len(piece)
            if size > TEMPLATE_OUTPUT_CHARS:
                raise TemplateLimitError(f"the rendered text has more than {TEMPLATE_OUTPUT_CHARS:,} characters")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _budget.reset(token)


def _spend(work: int) -> None:
    budget = _budget.get(None)
    if budget is None:  # during compilation: evaluate constants when rendering
        raise nodes.Impossible
    budget.spend(work)


def _paid(value: Any) -> Any:
    """Return a value after charging for everything in it. A list that occurs twice is charged twice."""
    _spend(1)
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str | bytes):
            _spend(len(item))
        elif isinstance(item, Mapping):
            _spend(_ITEM * len(item))
            pending += itertools.chain(item.keys(), item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            _spend(_ITEM * len(item))
            pending += item
    return value


def _check_small(name: str, values: Iterable[Any]) -> None:
    """Reject a width, count or precision that would create an enormous string."""
    for value in values:
        if isinstance(value, int | float) and not -TEMPLATE_NUMBER <= value <= TEMPLATE_NUMBER:
            raise TemplateLimitError(f"a number above {TEMPLATE_NUMBER:,} is passed to {name!r}")


class _Payments(NodeTransformer):
    """Routes loops, `~` and literal collections through filters that charge the cost to the budget."""

    def visit_For(self, node: nodes.For, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node)
        # The loop must know its length if the template uses it, so deduct the cost in the body.
        pay = nodes.ExprStmt(_filter("pay_step", nodes.Const(None)))
        node.body = [pay.set_lineno(node.lineno), *node.body]
        if node.test is not None:
            node.test = nodes.And(_filter("pay_step", nodes.Const(None)), node.test).set_lineno(node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node)
        return _filter("pay_text", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node)
        return _filter("pay", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node)
        return _filter("pay", node) if node.ctx == "load" else node


def _filter(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _pay_step(_: None) -> bool:
    _spend(_STEP)
    return True


class _Formatter(sandbox.SandboxedFormatter):
    """A variant of `str.format` that rejects enormous widths."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if _LARGE_NUMBER.search(format_spec):
            raise TemplateLimitError(f"the format {format_spec[:40]!r} contains a number above {TEMPLATE_NUMBER:,}")
        return _paid(super().format_field(_paid(value), format_spec))


class _BoundedEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, extended so that every operation has a cost."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_paid, **options)
        del self.globals["lipsum"]
        for name, function in list(self.filters.items()):
            self.filters[name] = _paying_filter(name, function)
        self.filters |= {"pay": _paid, "pay_text": lambda values: self.concat(map(str, values)), "pay_step": _pay_step}

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join the output of a macro or a block, or the operands of `~`."""
        paid = []
        for piece in pieces:
            _spend(1 + len(piece))
            paid.append(piece)
        return "".join(paid)

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` after checking that the result is not too large."""
        _spend(_STEP)
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
                    _spend(max(0, times) * len(value) * (1 if isinstance(value, str | bytes) else _ITEM))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
            if bits > _NUMBER_BITS:
                raise TemplateLimitError(f"the template computes a number with more than {_NUMBER_BITS:,} bits")
        if operator == "%" and isinstance(left, str | bytes):
            return _percent(left, right)
        return _paid(super().call_binop(context, operator, left, right))

    def call(__self, __context: runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _spend(_STEP)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes | int):
            if name in _PADDING:
                _check_small(name, args)
            if name in _REPEATING:
                _spend(_repeated(owner, name, args))
        return _paid(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a replacement for `str.format` or `str.format_map` that charges its cost to the budget."""
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__
        formatter = _Formatter(self)
        if value.__name__ == "format_map":
            return lambda values: str(formatter.vformat(text, (), values))
        return lambda *args, **kwargs: str(formatter.vformat(text, args, kwargs))


def _percent(left: str | bytes, right: Any) -> Any:
    if _LARGE_PERCENT.search(str(left)):
        raise TemplateLimitError(f"the format {str(left)[:40]!r} contains '*' or a number above {TEMPLATE_NUMBER:,}")
    _spend(len(left) * 4)
    return _paid(left % _paid(right))


def _repeated(text: Any, name: str, args: tuple[Any, ...]) -> int:
    """Return the largest number of characters that `text.name(*args)` can have."""
    if name == "replace" and len(args) >= 2 and isinstance(args[1], str | bytes):
        return len(text) + int(text.count(args[0])) * len(args[1])
    if name == "join" and args and hasattr(args[0], "__len__"):
        return len(text) * len(args[0])
    raise TemplateLimitError(
        f"{name!r} is called with arguments for which the size of the result is unknown; use the filter instead"
    )


def _paying_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that charges for its result. It charges in advance if the size of the result is known."""

    @wraps(function)  # also copies Jinja's attribute for filters that receive the context
    def paying(*args: Any, **kwargs: Any) -> Any:
        _spend(_STEP)
        has_context = hasattr(function, "jinja_pass_arg")
        value, rest = args[int(has_context)], [*args[int(has_context) + 1 :], *kwargs.values()]
        if name in _PADDING_FILTERS:
            _check_small(name, rest)
        texts = sum(len(argument) for argument in rest if isinstance(argument, str))
        if name == "format":
            return _percent(str(value), kwargs or tuple(rest))
        if name == "replace" and len(rest) >= 2:
            _spend(str(value).count(str(rest[0])) * len(str(rest[1])))
        elif name == "indent":
            _spend((str(value).count("\n") + 1) * (texts + sum(width for width in rest if isinstance(width, int))))
        elif name in ("join", "wordwrap", "urlize", "xmlattr") and hasattr(value, "__len__"):
            _spend(len(value) * (texts + 1))
        elif name == "sum" and isinstance(kwargs.get("start", rest[1] if len(rest) > 1 else 0), str | list | tuple):
            raise TemplateLimitError(
                "'sum' is applied to strings or lists, so the size of the result is unknown; use 'join'"
            )
        result = function(*args, **kwargs)
        return result if isinstance(result, Iterator) else _paid(result)

    return paying
