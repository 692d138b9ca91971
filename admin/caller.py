"""The caller of an operation: a name for the log, and scopes. Pure."""

from dataclasses import dataclass

from registry.tenant_records import Scope
from streams.errors import InsufficientScope


@dataclass(frozen=True)
class Caller:
    """The holder of a credential: the name by which log events call them, and their scopes."""

    name: str
    scopes: tuple[Scope, ...] = ("admin",)

    def check(self, needed: Scope) -> None:
        """Raise `InsufficientScope` unless they have this scope; `admin` has all of them."""
        if not {"admin", needed} & {*self.scopes}:
            raise InsufficientScope(needed, self.scopes)
