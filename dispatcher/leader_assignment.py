"""Assigns each model to the dispatcher that should lead it. Pure."""

from collections import Counter
from collections.abc import Collection
from hashlib import blake2b


def assign_models(models: Collection[str], dispatchers: Collection[str]) -> dict[str, str]:
    """Return the dispatcher that should lead each model, by model; empty without dispatchers.

    No dispatcher gets more than its equal part of the models, rounded up. The same names give the
    same result in every process, in whatever order they come. Few models move when a model or a
    dispatcher comes or goes: rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads
    (Mirrokni, Thorup and Zadimoghaddam, 2018).
    """
    if not dispatchers:
        return {}
    max_models = -(-len(models) // len(dispatchers))
    assigned: dict[str, str] = {}
    loads = Counter[str]()
    for model in sorted(models):
        free = (dispatcher for dispatcher in dispatchers if loads[dispatcher] < max_models)
        chosen = max(free, key=lambda dispatcher: _weight(model, dispatcher))
        assigned[model] = chosen
        loads[chosen] += 1
    return assigned


def _weight(model: str, dispatcher: str) -> bytes:
    """The rendezvous hash of a model and a dispatcher."""
    return blake2b(f"{model}\0{dispatcher}".encode(), digest_size=8).digest()
