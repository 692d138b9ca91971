"""Which dispatcher is to lead which model. Pure."""

from collections import Counter
from collections.abc import Collection
from hashlib import blake2b


def assign_models(models: Collection[str], dispatchers: Collection[str]) -> dict[str, str]:
    """A dispatcher for each model: as many for each as can be, and the same wherever it is asked.

    Little moves when a model or a dispatcher comes or goes: rendezvous hashing (Thaler and
    Ravishankar, 1998) with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018). Without
    dispatchers nothing is assigned.
    """
    if not dispatchers:
        return {}
    most = -(-len(models) // len(dispatchers))
    found: dict[str, str] = {}
    loads = Counter[str]()
    for model in sorted(models):
        free = (dispatcher for dispatcher in dispatchers if loads[dispatcher] < most)
        chosen = max(free, key=lambda dispatcher: _weight(model, dispatcher))
        found[model] = chosen
        loads[chosen] += 1
    return found


def _weight(model: str, dispatcher: str) -> bytes:
    return blake2b(f"{model}\0{dispatcher}".encode(), digest_size=8).digest()
