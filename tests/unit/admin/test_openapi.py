"""The admin API's document says what the table of operations says."""

import json
import re
from typing import Any

import pytest

from admin import openapi
from admin.operation_table import OPERATIONS, Operation

BY_NAME = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())


def described(operation: Operation) -> Any:
    paths = openapi.build_document()["paths"]
    return paths[operation.documented_path][operation.method.lower()]


@BY_NAME
def test_every_operation_is_described_with_all_its_arguments(operation: Operation) -> None:
    """A generated client has nothing else to go by."""
    found = described(operation)
    named = {each["name"] for each in found["parameters"]}
    if operation.has_body:
        schema = found["requestBody"]["content"]["application/json"]["schema"]
        assert not named & schema["properties"].keys()
        named |= schema["properties"].keys()
    assert named == operation.arguments.model_fields.keys()
    in_path = {each["name"] for each in found["parameters"] if each["in"] == "path"}
    assert in_path == set(re.findall(r"\{(\w+)\}", operation.documented_path))


def test_every_reference_leads_somewhere_and_no_flag_is_left() -> None:
    """Flags are the command line's own."""
    document = openapi.build_document()
    text = json.dumps(document)
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names <= document["components"]["schemas"].keys()
    assert "flag_only" not in text


def test_reading_is_get_and_a_change_is_not() -> None:
    """What a page of another site can make a browser send changes nothing."""
    changes = {name for name, each in OPERATIONS.items() if each.is_change}
    assert changes == {
        name for name in OPERATIONS if name.rpartition(".")[2] not in ("list", "show")
    }
