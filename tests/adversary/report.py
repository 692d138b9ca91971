"""Outcome of each attack: rows, and the table that is printed. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Row:
    """One attack by one class: how often it was tried and refused, and its effects.

    `read` has the bytes of messages with others' secrets in them, by kind; `changed` says what was
    written or removed, and `moved` which requests ended otherwise than they should, beyond what is
    promised of the class. `by_job` is what the class reached within its promise. `seconds` are
    those of the attack and of the victims' requests after it.
    """

    adversary: str
    attack: str
    tries: int
    refused: int
    read: dict[str, int] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    by_job: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_hole(self) -> bool:
        """Whether the class reached anything that is not its own."""
        return bool(self.read or self.changed or self.moved)


@dataclass(frozen=True)
class Verdict:
    """Reach of one class in a cell of `nodes` servers, and how many requests of victims ended."""

    adversary: str
    nodes: int
    victims_requests: int
    rows: Sequence[Row]


def rows_of(verdicts: Sequence[Verdict]) -> list[Row]:
    """The attacks of all classes."""
    return [row for verdict in verdicts for row in verdict.rows]


_HEAD = ("adversary", "attack", "tries", "refused", "bytes read", "records changed", "moved")


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown; what was reached by a class's job is told below."""
    lines = [_line(_HEAD), _line(["---"] * len(_HEAD))]
    for row in rows:
        read = sum(row.read.values())
        counts = (row.tries, row.refused, read, len(row.changed), len(row.moved))
        lines.append(_line([row.adversary, row.attack, *(f"{each:,}" for each in counts)]))
    return "\n".join(lines)


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def reached_by_job(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Reach of each class within its promise, over all attacks."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        for kind, count in row.by_job.items():
            reached = found.setdefault(row.adversary, {})
            reached[kind] = reached.get(kind, 0) + count
    return found


def holes(rows: Sequence[Row], limit: int = 5) -> list[str]:
    """A sentence for each row with an effect, with the first few of them."""
    return [
        f"{row.adversary}, {row.attack}: "
        + "; ".join(
            [*(f"read {k}: {v} B" for k, v in row.read.items()), *row.changed, *row.moved][:limit]
        )
        for row in rows
        if row.is_hole
    ]


def as_json(verdicts: Sequence[Verdict]) -> str:
    """Everything, one object."""
    found = {"classes": [asdict(verdict) for verdict in verdicts]}
    return json.dumps(found | {"holes": len(holes(rows_of(verdicts)))}, indent=1)


def show(verdicts: Sequence[Verdict]) -> None:
    """Print the table, what was reached by job, and each hole."""
    rows = rows_of(verdicts)
    print(table(rows))
    ended = sum(verdict.victims_requests for verdict in verdicts)
    print(f"\nVictims' requests that ended meanwhile: {ended:,}")
    for adversary, reached in reached_by_job(rows).items():
        counts = ", ".join(f"{kind}: {count:,}" for kind, count in sorted(reached.items()))
        print(f"By its job, {adversary} reached {counts}")
    for each in holes(rows):
        print(f"HOLE {each}")


def has_failed(rows: Sequence[Row]) -> bool:
    """True if a class reached what is not its own, or the control, which has a hole, nothing."""
    controls = [row.is_hole for row in rows if row.adversary.startswith("control")]
    others = any(row.is_hole for row in rows if not row.adversary.startswith("control"))
    return others or not all(controls)
