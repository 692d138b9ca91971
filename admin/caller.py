"""The caller of an operation: a name for the log, an address, and scopes. Pure."""

from dataclasses import dataclass

from registry.tenant_records import Scope
from streams.errors import InsufficientScope


@dataclass(frozen=True)
class Caller:
    """The holder of a credential: the name by which logs call them, their scopes, and address.

    `address` is that of their connection; empty over NATS without accounts.
    """

    name: str
    scopes: tuple[Scope, ...] = ("admin",)
    address: str = ""

    def check(self, needed: Scope) -> None:
        """Raise `InsufficientScope` unless they have this scope; `admin` has all of them."""
        if not {"admin", needed} & {*self.scopes}:
            raise InsufficientScope(needed, self.scopes)
