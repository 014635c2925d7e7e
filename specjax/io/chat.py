"""Chat templates, rendered in jinja2's sandbox with the helpers that templates of the Hugging Face format expect."""

import datetime
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from types import CodeType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_MAX_SOURCE = 1 << 20
_MAX_STEPS = 500_000
_MAX_CHARACTERS = 1 << 24
_COUNTED = "specjax_counted"


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
) -> str:
    """Renders a conversation with a chat template.

    A template is a program. It sees copies of the messages and the special tokens, it cannot reach Python objects, and
    it is stopped after half a million loop rounds and calls or 16 Mi characters of output. The memory of a single
    expression is bounded for products and powers only: render templates of sources that you trust.

    Args:
      template: jinja2 source.
      messages: dictionaries with a `role` and a `content` string each; other keys are passed on.
      special_tokens: texts by name, visible to the template (`bos_token`, ...).
      add_generation_prompt: ask for what opens the assistant's answer.
      now: what `strftime_now` tells the template; None: the clock's time.

    Raises:
      ValueError: messages of another form, or a template that is malformed, refused, or raises an error itself.
    """
    variables = dict(special_tokens, messages=_checked(messages), add_generation_prompt=add_generation_prompt)
    if len(template) > _MAX_SOURCE:
        raise ValueError(f"expected a chat template of at most {_MAX_SOURCE} characters, got {len(template)}")
    try:
        environment = _Sandbox()
        environment.globals["strftime_now"] = (now or datetime.datetime.now()).strftime
        compiled = jinja2.Template.from_code(environment, _compile(template), environment.make_globals(None))
        return _bounded_join(compiled.generate(variables))
    except Exception as error:  # a template can raise anything
        raise ValueError(f"expected a chat template that renders these messages, got: {error}") from error


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"expected a list of at least one message, got {messages!r}")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise ValueError(f"expected message {index} to have a string {key!r}, got {message!r}")
    return [dict(message) for message in messages]


def _bounded_join(parts: Iterable[str]) -> str:
    kept, length = [], 0
    for part in parts:
        length += len(part)
        if length > _MAX_CHARACTERS:
            raise ValueError(f"output of more than {_MAX_CHARACTERS} characters")
        kept.append(part)
    return "".join(kept)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox for one rendering: it counts what the template does."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"])
        self._steps = itertools.count(1)
        self.filters[_COUNTED] = self._counted
        self.filters["tojson"] = _to_json
        self.globals.update(raise_exception=_raise_exception)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls something that the template calls."""
        self._count()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiplies, or raises to a power, unless the result would be huge."""
        if _result_size(operator, left, right) > _MAX_CHARACTERS:
            raise ValueError(f"a result of {operator!r} that is too large")
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuses an attribute; the sandbox itself would go on with an undefined value."""
        raise ValueError(f"access to {attribute!r} of a {type(obj).__name__}, which is unsafe")

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._count()
            yield value

    def _count(self) -> None:
        if next(self._steps) > _MAX_STEPS:
            raise ValueError(f"more than {_MAX_STEPS} loop rounds and calls")


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks what an assistant said and changes nothing here."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The body of the block, in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Guard(NodeTransformer):
    """Makes every loop count its rounds, and keeps private names out of namespaces and calls."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.NSRef:
        return self._refuse_private(node, node.attr)

    def visit_Keyword(self, node: nodes.Keyword) -> nodes.Keyword:
        return self._refuse_private(node, node.key)

    def _refuse_private(self, node: Any, name: str) -> Any:
        if name.startswith("_"):
            raise ValueError(f"the private name {name!r}")
        return self.generic_visit(node)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> CodeType:
    environment = _Sandbox()
    return environment.compile(_Guard().visit(environment.parse(template)))


def _result_size(operator: str, left: Any, right: Any) -> Any:
    """Bits or items of a product or power."""
    if operator == "**":
        return int(abs(left)).bit_length() * abs(right)
    for items, times in ((left, right), (right, left)):
        if isinstance(items, Sized):
            return len(items) * times
    return int(abs(left)).bit_length() + int(abs(right)).bit_length()


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """JSON as it is: the filter of jinja2 itself escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)
