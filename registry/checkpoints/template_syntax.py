"""Parses chat templates with the tags that transformers adds to Jinja; renders nothing."""

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser


class GenerationTag(Extension):
    """Renders `{% generation %}` as its body: the tag matters in training only."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes of the tag's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


EXTENSIONS = (GenerationTag, loopcontrols)


def syntax_error(template: str) -> str | None:
    """Return what is wrong with a chat template, with the line; None if it can be compiled."""
    environment = Environment(extensions=EXTENSIONS, autoescape=True)
    try:
        environment.compile(template)
    except TemplateSyntaxError as error:  # an unknown filter or test, too
        return f"{error.message} (line {error.lineno})"
    return None
