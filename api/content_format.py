"""Tells whether a chat template takes a message's content as text, as parts, or both. Pure.

Templates of text models write `message.content`, those of vision models loop over it:
`{% for part in message.content %}`. Which one a template does is read from its syntax tree, as vLLM
does: what holds messages, a message or a content is followed through assignments, loops and calls
of macros, and the question is whether a content is looped over.
"""

from collections.abc import Iterator
from enum import Enum, auto
from itertools import chain

from jinja2 import nodes

_PART_FIELDS = ("type", "text")


class ContentFormat(Enum):
    """The content of a message as a chat template takes it."""

    TEXT = auto()
    PARTS = auto()  # a list of objects like `{"type": "text", "text": "hi"}`
    EITHER = auto()


class _Kind(Enum):
    """Things that a variable or an expression of a template may hold."""

    MESSAGES = auto()
    MESSAGE = auto()
    CONTENT = auto()


def detect_content_format(template: nodes.Template, has_tools: bool) -> ContentFormat:
    """Return what the template with this syntax tree takes as the content of a message.

    `EITHER` is a template that loops over parts and asks for a text (`content is string`) as well.
    One that does neither takes a text. A template that is two, for chats with tools and without, is
    judged by the one that is rendered.
    """
    tree = _rendered_part(template, has_tools)
    variables = _Variables(tree)
    uses = tree.find_all((nodes.For, nodes.Filter, nodes.Getattr, nodes.Getitem))
    if not any(map(variables.takes_parts, uses)):
        return ContentFormat.TEXT
    tests = tree.find_all(nodes.Test)
    asks = any(t.name == "string" and variables.kind(t.node) is _Kind.CONTENT for t in tests)
    return ContentFormat.EITHER if asks else ContentFormat.PARTS


def _rendered_part(template: nodes.Template, has_tools: bool) -> nodes.Template:
    """Return the branch that is taken, of a template that is a single `{% if tools %}`."""
    match template.body:
        case [nodes.If(test=nodes.Name(name="tools"), elif_=[]) as choice]:
            return nodes.Template(choice.body if has_tools else choice.else_)
    return template


class _Variables:
    """The variables of a template that hold messages, a message or a content.

    A name counts wherever it occurs, since the same name seldom holds two kinds of things.
    """

    def __init__(self, tree: nodes.Node) -> None:
        self._kinds = {"messages": _Kind.MESSAGES}
        known = 0
        while len(self._kinds) > known:  # an assignment may stand before what it depends on
            known = len(self._kinds)
            for name, kind in self._bound(tree):
                self._kinds.setdefault(name, kind)

    def kind(self, expression: nodes.Node | None) -> _Kind | None:
        """Return what an expression holds; None for anything else."""
        match expression:
            case nodes.Name() | nodes.NSRef():
                return self._kinds.get(_name(expression))
            case nodes.Filter(node=inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
                return self.kind(inner)
            case nodes.CondExpr(expr1=a, expr2=b) | nodes.BinExpr(left=a, right=b):
                return self.kind(a) or self.kind(b)
            case nodes.Call(node=nodes.Getattr(attr="get", node=owner), args=[key, *_]):
                return self._kind_of_field(owner, getattr(key, "value", None))
            case nodes.Getattr(node=owner, attr=field):
                return self._kinds.get(_name(expression)) or self._kind_of_field(owner, field)
            case nodes.Getitem(node=owner, arg=key):
                return self._kind_of_field(owner, getattr(key, "value", None))
        return None

    def _kind_of_field(self, owner: nodes.Node, field: object) -> _Kind | None:
        kind = self.kind(owner)
        if kind is _Kind.MESSAGE and field == "content":
            return _Kind.CONTENT
        return _Kind.MESSAGE if kind is _Kind.MESSAGES and not isinstance(field, str) else None

    def takes_parts(self, node: nodes.Node) -> bool:
        """Return whether a node loops over a content, or takes a field of one of its parts."""
        match node:
            case nodes.For():
                return self.kind(node.iter) is _Kind.CONTENT
            case nodes.Filter(name="map" | "selectattr" | "rejectattr", node=inner):
                return self.kind(inner) is _Kind.CONTENT
            case nodes.Getattr(node=item, attr=field):
                return field in _PART_FIELDS and self._is_part(item)
            case nodes.Getitem(node=item, arg=nodes.Const(value=field)):
                return field in _PART_FIELDS and self._is_part(item)
        return False

    def _is_part(self, item: nodes.Node) -> bool:
        """Return whether an expression is one of the parts of a content, by its place there."""
        match item:
            case nodes.Getitem(node=inner) | nodes.Filter(name="first" | "last", node=inner):
                return self.kind(inner) is _Kind.CONTENT
        return False

    def _bound(self, tree: nodes.Node) -> Iterator[tuple[str, _Kind]]:
        """Yield the variables that are bound to one of the kinds: name and kind."""
        assignments = ((each.target, each.node) for each in tree.find_all(nodes.Assign))
        for target, value in chain(assignments, _macro_arguments(tree)):
            if kind := self.kind(value):
                yield _name(target), kind
        for loop in tree.find_all(nodes.For):
            if self.kind(loop.iter) is _Kind.MESSAGES:
                yield _name(loop.target), _Kind.MESSAGE


def _macro_arguments(tree: nodes.Node) -> Iterator[tuple[nodes.Node, nodes.Node]]:
    """Yield parameter and argument of each call of a macro."""
    macros = {macro.name: macro.args for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        parameters = macros.get(_name(call.node), [])
        yield from zip(parameters, call.args, strict=False)
        by_name = {each.key: each.value for each in call.kwargs}
        yield from ((each, by_name[each.name]) for each in parameters if each.name in by_name)


def _name(node: nodes.Node) -> str:
    """Return the name of a variable or of a namespace's attribute; empty for anything else."""
    match node:
        case nodes.Name():
            return node.name
        case nodes.NSRef():
            return f"{node.name}.{node.attr}"
        case nodes.Getattr(node=nodes.Name() as owner):
            return f"{owner.name}.{node.attr}"
    return ""
