"""The models that a worker's NATS user is for, as its credentials say."""

from dataclasses import dataclass
from pathlib import Path

from streams.accounts.claims_token import InvalidClaims, decode
from streams.accounts.credentials_file import read_credentials
from streams.subjects import escape

_POOL = "pool:"


@dataclass(frozen=True)
class PinnedModels:
    """Models and versions that a user may serve; `pools` is None for a user that is not pinned."""

    pools: frozenset[str] | None = None

    def has(self, model: str, version: str) -> bool:
        """Return True if the user may serve this version."""
        if self.pools is None:
            return True
        return not self.pools.isdisjoint(
            ("*.*", f"{escape(model)}.*", f"{escape(model)}.{escape(version)}")
        )

    def explain(self, user: str, name: str) -> str:
        """Return why a model is not served for which the user has no rights, with the remedy."""
        return (
            f"the NATS user of worker {user!r} has no rights for {name!r}: write its credentials "
            "anew with `millstream broker user` and a --model for each of its models; the worker "
            "takes them up within 15 s"
        )


def read_pinned_models(file: Path | None) -> PinnedModels:
    """Return the models of the user in a credentials file; all without a file.

    Raises `InvalidCredentials` for a file that is none.
    """
    if file is None:
        return PinnedModels()
    try:
        tags = decode(read_credentials(file, now=0).token)["nats"].get("tags", [])
    except InvalidClaims:
        return PinnedModels()
    pools = frozenset(tag.removeprefix(_POOL) for tag in tags if tag.startswith(_POOL))
    return PinnedModels(pools or None)
