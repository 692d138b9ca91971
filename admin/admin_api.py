"""Runs an operation for either door: checks its arguments, counts it, and logs who did what."""

from collections.abc import Mapping
from typing import Any

import orjson
import structlog
from pydantic import BaseModel, ValidationError

from admin.audit_trail import AuditTrail, acting
from admin.caller import Caller
from admin.metrics import OPERATIONS
from admin.operation_table import OPERATIONS as TABLE
from admin.operation_table import ModelArguments, Operation, ReasonedArguments
from admin.operations import Handler, JsonBody
from api.schemas.parsing import to_bad_request
from streams.errors import InsufficientScope, InternalError, MillstreamError, NotFound

log = structlog.get_logger()


class AdminApi:
    """The operations as both doors call them."""

    def __init__(self, handlers: Mapping[str, Handler], trail: AuditTrail) -> None:
        """Take the coroutine function of each operation in the table, by its name."""
        assert handlers.keys() == TABLE.keys()
        self._handlers, self._trail = handlers, trail

    async def run(self, name: str, arguments: dict[str, Any], caller: Caller) -> JsonBody:
        """Do an operation for a caller; return its JSON answer.

        Raises a `MillstreamError`: `NotFound` for an unknown operation, `InsufficientScope` if the
        caller may not do this, `BadRequest` for wrong arguments, and those of the operation; any
        other fault is logged and raised as `InternalError`.
        """
        operation = TABLE.get(name)
        if operation is None:
            raise NotFound(f"there is no operation {name!r}; there are: {', '.join(TABLE)}")
        try:
            admitted = _admit(operation, arguments, caller)
            why = admitted.why if isinstance(admitted, ReasonedArguments) else ""
            with acting(caller, name, why):
                answer = await self._handlers[name](admitted)
        except InsufficientScope as error:
            _observe(operation, arguments, caller, error.code)
            if operation.is_change:
                target = _target_name(arguments)
                await self._trail.record_refusal(caller, name, target, error.code)
            raise
        except MillstreamError as error:
            _observe(operation, arguments, caller, error.code)
            raise
        except Exception:
            log.exception("admin_operation_failed", operation=name)
            OPERATIONS.labels(name, InternalError.code).inc()
            raise InternalError("the admin service failed; its log says why") from None
        _observe(operation, arguments, caller, "done")
        return answer


def _admit(operation: Operation, arguments: dict[str, Any], caller: Caller) -> BaseModel:
    """Return the arguments as a record, if the caller may do that with them."""
    caller.check(operation.scope)
    parsed = _parse(operation, arguments)
    if isinstance(parsed, ModelArguments) and parsed.sets_price:
        caller.check("admin")
    return parsed


def _parse(operation: Operation, arguments: dict[str, Any]) -> BaseModel:
    """Return the arguments as a record; those of a change must have the exact JSON types."""
    try:
        if operation.has_body:
            return operation.arguments.model_validate_json(orjson.dumps(arguments), strict=True)
        return operation.arguments.model_validate(arguments)
    except ValidationError as error:
        raise to_bad_request(error.errors(include_url=False)[0]) from None


def _observe(operation: Operation, arguments: dict[str, Any], caller: Caller, outcome: str) -> None:
    OPERATIONS.labels(operation.name, outcome).inc()
    if operation.is_change:
        log.info(
            "admin_change",
            operation=operation.name,
            name=_target_name(arguments),
            caller=caller.name,
            outcome=outcome,
        )


def _target_name(arguments: dict[str, Any]) -> str:
    return str(arguments.get("name") or arguments.get("id") or "")[:256]
