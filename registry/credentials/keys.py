"""Managed API keys and the deny-list in the KV bucket `keys`, as a live view.

A look-up never waits. Every change is a compare-and-set: of two writers, the second one's change is
applied to the first one's record.
"""

from collections.abc import Callable, Mapping

from registry.credentials.key_format import KeyText
from registry.credentials.key_pepper import Pepper
from registry.credentials.key_records import Denial, ManagedKey, denial_id
from registry.kv_records import KvRecords
from registry.tenant_records import ApiKey
from streams.errors import MillstreamError

BUCKET = "keys"
_KEY, _DENIAL = "key.", "denial."
_Entry = ManagedKey | Denial


class KeyNotFound(MillstreamError):
    """No managed key has this id."""

    code = "key_not_found"

    def __init__(self, id: str) -> None:
        super().__init__(f"there is no key with the id {id!r}")
        self.id = id


class KeyEnded(MillstreamError):
    """A key that was revoked or has expired cannot be changed any more; create a new one."""

    code = "key_ended"

    def __init__(self, id: str, how: str) -> None:
        super().__init__(f"the key {id!r} {how}: create a new one")
        self.id = id


class Keys(KvRecords[_Entry]):
    """All managed keys and denials, kept current and looked up without waiting.

    Methods that write also raise `BrokerUnavailable` if the broker does not answer, or
    `StoreRefused`. Times are in epoch seconds.
    """

    bucket = BUCKET

    @property
    def all(self) -> dict[str, ManagedKey]:
        """All keys by id, those that work no more among them."""
        return {v.id: v for v in self._view.values.values() if isinstance(v, ManagedKey)}

    @property
    def denials(self) -> dict[str, Denial]:
        """The deny-list, by the ids of its entries."""
        return {v.id: v for v in self._view.values.values() if isinstance(v, Denial)}

    def get(self, id: str) -> ManagedKey | None:
        """Return the key with this id, whether it works or not; None if there is none."""
        found = self._view.values.get(_KEY + id)
        return found if isinstance(found, ManagedKey) else None

    def is_denied(self, issuer: str, subject: str, token_id: str | None, issued_at: float) -> bool:
        """Return True if the deny-list covers a token, by its issuer, subject or id."""
        ids = [denial_id(issuer), denial_id(issuer, subject)]
        ids += [denial_id(issuer, token_id=token_id)] if token_id is not None else []
        found = (self._view.values.get(_DENIAL + id) for id in ids)
        return any(isinstance(each, Denial) and each.covers(issued_at) for each in found)

    def find_admin(self, pepper: Pepper, now: float) -> ManagedKey | None:
        """Return a key with the scope `admin` that works under this pepper; None if none does."""
        found = (key for key in self.all.values() if "admin" in key.scopes)
        return next((key for key in found if _is_working(key, pepper, now)), None)

    async def create(self, wanted: ManagedKey) -> None:
        """Store a key that `make_key` made."""
        await self._view.write(_KEY + wanted.id, lambda _: _encode(wanted))

    async def rotate(
        self, id: str, pepper: Pepper, now: float, overlap_seconds: float
    ) -> tuple[KeyText, ManagedKey]:
        """Store a new key with all rights and limits of the key `id`; return it with its record.

        The new one lives as long as the old one was to live when it was made. The old one works for
        `overlap_seconds` more, or until it expires if that is sooner. Raises
        `KeyNotFound`, or `KeyEnded` for a key that works no more.
        """
        old = _check_usable(id, self.get(id), now)
        text, made = make_key(old, pepper, now)
        lifetime = {"expires_at": old.expires_at and now + old.expires_at - old.created_at}
        made = made.model_copy(update={"rotated_from": id, **lifetime})
        await self.create(made)
        end = now + overlap_seconds

        def expire(found: _Entry | None) -> bytes:
            key = _check_usable(id, found, now)
            return _encode(key.model_copy(update={"expires_at": min(end, key.expires_at or end)}))

        await self._view.write(_KEY + id, expire)
        return text, made

    async def change(self, id: str, fields: Mapping[str, object], now: float) -> ManagedKey:
        """Replace fields of a key's record, such as limits, and return the record.

        Gateways hold what is open against it from then on. Raises `KeyNotFound`, or `KeyEnded` for
        a key that works no more.
        """
        changed: list[ManagedKey] = []

        def change(found: _Entry | None) -> bytes:
            key = _check_usable(id, found, now)
            changed.append(key.model_copy(update=dict(fields)))
            return _encode(changed[-1])

        await self._view.write(_KEY + id, change)
        return changed[-1]

    async def revoke(self, id: str, now: float) -> None:
        """Withdraw a key for good; nothing is accepted with it once gateways have heard of it.

        Idempotent: the time of the first call stays. Raises `KeyNotFound`.
        """
        await self._change(id, lambda key: {"revoked_at": key.revoked_at or now})

    async def set_disabled(self, id: str, *, is_disabled: bool) -> None:
        """Have a key work no more, or again. Idempotent. Raises `KeyNotFound`."""
        await self._change(id, lambda _: {"is_disabled": is_disabled})

    async def remove_of(self, tenant: str) -> None:
        """Forget all keys of a tenant, so that none works for another one of its name."""
        for key in self.all.values():
            if key.tenant == tenant:
                await self._view.write(_KEY + key.id, lambda _: None)

    async def deny(self, denial: Denial) -> None:
        """Add an entry to the deny-list, in place of one about the same."""
        await self._view.write(_DENIAL + denial.id, lambda _: _encode(denial))

    async def remove_denial(self, id: str) -> None:
        """Remove an entry of the deny-list; its tokens are accepted again. Idempotent."""
        await self._view.write(_DENIAL + id, lambda _: None)

    async def _change(self, id: str, fields: Callable[[ManagedKey], dict[str, object]]) -> None:
        def change(found: _Entry | None) -> bytes:
            if not isinstance(found, ManagedKey):
                raise KeyNotFound(id)
            return _encode(found.model_copy(update=fields(found)))

        await self._view.write(_KEY + id, change)

    @staticmethod
    def _decode(key: str, value: bytes) -> _Entry:
        if key.startswith(_KEY):
            return ManagedKey.model_validate_json(value)
        if key.startswith(_DENIAL):
            return Denial.model_validate_json(value)
        raise ValueError("neither a key nor a denial")


def make_key(rights: ApiKey, pepper: Pepper, now: float) -> tuple[KeyText, ManagedKey]:
    """Return a new key, and its record with the given rights and limits; nothing is stored.

    The text is shown once and kept nowhere. A key without a name is named by its id. `now` is in
    epoch seconds. Raises pydantic's ValidationError for a network that is none.
    """
    text = KeyText.mint()
    fields = {name: getattr(rights, name) for name in ApiKey.model_fields}
    fields |= {"id": text.id, "name": rights.name or text.id, "source": "api", "is_weak": False}
    seal = pepper.seal(text.id, text.secret)
    return text, ManagedKey(**fields, seal=seal, pepper=pepper.fingerprint, created_at=now)


def _is_working(key: ManagedKey, pepper: Pepper, now: float) -> bool:
    has_ended = key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= now)
    return not has_ended and not key.is_disabled and key.pepper == pepper.fingerprint


def _check_usable(id: str, key: _Entry | None, now: float) -> ManagedKey:
    if not isinstance(key, ManagedKey):
        raise KeyNotFound(id)
    if key.revoked_at is not None:
        raise KeyEnded(id, "was revoked")
    if key.expires_at is not None and key.expires_at <= now:
        raise KeyEnded(id, "has expired")
    return key


def _encode(entry: _Entry) -> bytes:
    return entry.model_dump_json().encode()
