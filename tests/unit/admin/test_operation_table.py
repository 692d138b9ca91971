"""Each operation names the scope that a managed key needs for it."""

from admin.operation_table import OPERATIONS, ModelArguments
from registry.models import mock_model


def test_what_gives_access_or_costs_money_needs_the_scope_admin() -> None:
    """An operator reads keys, tenants and prices, and changes models."""
    needed = {name for name, each in OPERATIONS.items() if each.scope == "admin"}
    rooms = {"keys", "credentials", "denials", "tenants", "prices"}
    assert needed == {
        name for name, each in OPERATIONS.items() if each.is_change and name.split(".")[0] in rooms
    }


def test_a_models_record_may_set_its_price() -> None:
    """Also to nothing, so what counts is that it is said at all."""
    record = mock_model("m").model_dump(exclude_unset=True)
    assert not ModelArguments(name="m", model=mock_model("m")).sets_price
    for price in ({"prompt_price": 0}, {"completion_price": None}):
        arguments = ModelArguments.model_validate({"name": "m", "model": {**record, **price}})
        assert arguments.sets_price
