"""Strips are invisible: tokens are the same with them, without them, and after a step broke off."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.paged.attention.contiguous_kv_copies import (
    MAX_SHARE,
    ContiguousKv,
    KvCopy,
    assign_copies,
)
from gpu_worker.engines.paged.batch.sequence_state import SequenceState
from gpu_worker.engines.paged.engine import TransformersEngine
from tests.engine.tiny_models import engine, expected, greedy_sequence, prompt, run_to_end

COUNT = 24
RUNS = [SequenceState(str(number), []) for number in range(9)]

which = st.lists(st.integers(0, len(RUNS) - 1), unique=True)


@given(which, which, st.sets(st.integers(0, len(RUNS) - 1)))
def test_each_wanted_strip_is_kept_moved_or_filled(
    before: list[int], after: list[int], behind: set[int]
) -> None:
    """A strip that holds another run, or another length of it, would be seen as this one."""
    strips = [KvCopy(RUNS[n], 0, 20 if n in behind else 21) for n in before]
    wanted = [KvCopy(RUNS[n], 0, 21) for n in after]
    placing = assign_copies(strips, wanted)
    content = [strip.content_key for strip in strips] + [None] * len(wanted)
    for source, target in placing.moves:
        content[target] = content[source]
    for target in placing.fills:
        content[target] = wanted[placing.order[target]].content_key
    assert sorted(placing.order) == list(range(len(wanted)))
    assert content[: len(wanted)] == [wanted[n].content_key for n in placing.order]
    kept = {strip.content_key for strip in strips} & {strip.content_key for strip in wanted}
    assert len(placing.fills) == len(wanted) - len(kept)


def strips_of(made: TransformersEngine) -> ContiguousKv:
    return made._runner.attention._contiguous[None]


def held(strips: ContiguousKv) -> int:
    return sum(
        keys.nbytes + values.nbytes
        for shelf in strips._size_classes.values()
        for keys, values in shelf.kv.values()
    )


def test_strips_take_no_more_than_their_share() -> None:
    """Memory was counted with that much; who finds no place reads blocks."""
    made = engine()
    strips, most = strips_of(made), 0
    blocks = sum(keys.nbytes + values.nbytes for keys, values in strips._pools.values())
    lengths = (20, 150, 30, 170, 180, 190)
    for n, length in enumerate(lengths):
        made.add(greedy_sequence(f"r{n}", prompt(n, length), COUNT))
    while not made.idle:
        made.step()
        most = max(most, held(strips))
    assert 0 < most <= MAX_SHARE * blocks
    made._runner.attention.free_buffers()
    assert held(strips) == 0


def test_a_step_that_broke_off_leaves_no_strip_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its layers had their strips moved, others not."""
    made, calls = engine(), []
    whole: Callable[..., bool] = strips_of(made).attend_decode

    def break_once(layer: int, *step: torch.Tensor) -> bool:
        calls.append(layer)
        if len(calls) == 50:
            raise RuntimeError("broken off")
        return whole(layer, *step)

    monkeypatch.setattr(strips_of(made), "attend_decode", break_once)
    asked = [greedy_sequence(f"r{n}", prompt(n, 20 + 5 * n), COUNT) for n in range(3)]
    results = run_to_end(made, asked, every=2)
    for n, each in enumerate(asked):
        assert results.tokens[f"r{n}"] == expected("llama", each.prompt, COUNT)
    assert calls[49] == 1
