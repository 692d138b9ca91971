"""Content of a message that is a text, or a list of parts that are texts."""

from collections.abc import Collection, Mapping

from api.schemas.fields import describe_value, unsupported_value, wrong_value

TextParts = list[dict[str, str]]  # each `{"type": "text", "text": …}`


def parse_text_content(
    value: object, fields: Mapping[str, str], ignored: Collection[str]
) -> str | TextParts:
    """Return a text as it is, and parts as chat templates expect them.

    `fields` has for each type of part the name of the field that holds its text; fields named in
    `ignored` may stand beside. Raises an error of the field for any other value.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = [_part_text(part, fields, ignored) for part in value]
        return [{"type": "text", "text": text} for text in texts]
    raise wrong_value(f"must be a text or a list of parts, not {describe_value(value)}")


def _part_text(part: object, fields: Mapping[str, str], ignored: Collection[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise wrong_value("must have parts that are objects with a type")
    if kind not in fields:
        raise unsupported_value(
            f"has a part of type {describe_value(kind)}, only texts are supported"
        )
    text = part.get(fields[kind])
    if part.keys() - {"type", fields[kind], *ignored} or not isinstance(text, str):
        raise wrong_value(f"has a part of type {kind!r} that is not a text and nothing else")
    return text
