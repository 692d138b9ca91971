"""Versions of a test, which have no files."""

from typing import Any

from registry.models import MOCK_VERSION, Model, Version


def make_version(version_id: str = MOCK_VERSION, **fields: Any) -> Version:
    """A version of the mock model's context and vocabulary, unless `fields` say otherwise."""
    return Version(id=version_id, **{"context_length": 8192, "vocab_size": 256, **fields})


def with_facts(model: Model, **fields: Any) -> Model:
    """The model, with other `fields` of its default version."""
    version = model.default.model_copy(update=fields)
    return model.model_copy(update={"versions": {**model.versions, version.id: version}})
