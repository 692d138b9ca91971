"""The simulated engine: when tokens come, who shares a step, who gives way; worked out by hand."""

from bench.simulation.engine import Engine
from bench.simulation.prefixes import BLOCK_TOKENS, Prefixes
from bench.simulation.request import Asked, Fate
from bench.simulation.step_model import StepModel
from streams.subjects import Priority

ROUND = StepModel(
    step_ms=100,
    sequence_ms=10,
    context_us=0,
    prefill_ms=50,
    token_ms=1,
    kv_tokens=1000,
    max_sequences=8,
    max_batch_tokens=100,
)


def fate(name: str, prompt: int, output: int, priority: Priority = Priority.STANDARD) -> Fate:
    return Fate(Asked(0.0, "t", prompt, output, priority=priority), name)


def run(engine: Engine) -> tuple[dict[str, float], dict[str, float]]:
    """When requests got their first and their last tokens, in milliseconds."""
    now = 0.0
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while (seconds := engine.begin()) is not None:
        now = round(now + seconds * 1000, 6)
        stepped = engine.end()
        first |= {each.request_id: now for each in stepped.first}
        last |= {each.request_id: now for each in stepped.ended}
    return first, last


def test_two_requests_share_steps_as_worked_out_by_hand() -> None:
    """60 + 40 tokens of prompts; one decodes beside the other 40; then two decode together."""
    engine = Engine(ROUND)
    engine.add(fate("a", 60, 3))
    engine.add(fate("b", 80, 2))
    assert run(engine) == ({"a": 150, "b": 350}, {"a": 470, "b": 470})


def test_a_step_takes_what_the_model_says() -> None:
    """The default is the worker that docs/simulator.md describes: an A10G with a 7B model."""
    assert StepModel().seconds(10, 5000, 0) == (31.2 + 2.8 + 2.0) / 1000
    assert StepModel().seconds(0, 0, 100) == (10 + 26) / 1000


def test_all_kv_is_free_when_all_have_ended() -> None:
    """Else a long run would slowly choke."""
    engine = Engine(ROUND)
    for number in range(30):
        engine.add(fate(f"r{number}", 30 + number, 1 + number % 7))
    run(engine)
    assert (engine.idle, engine.kv_used, engine.running) == (True, 0, 0)


def test_every_token_is_generated_once() -> None:
    """Though KV for all does not suffice, so that some give way and are computed again."""
    engine = Engine(ROUND)
    fates = [fate(f"r{number}", 150, 200) for number in range(6)]
    for each in fates:
        engine.add(each)
    run(engine)
    assert engine.preemptions > 0
    assert [each.generated for each in fates] == [200] * 6
    assert engine.generated_tokens == 1200
    assert engine.prompt_tokens == 6 * 150
    assert sum(each.computed for each in fates) > 6 * (150 + 199)


def test_what_ran_through_undisturbed_was_computed_once() -> None:
    """Its last token is not computed on."""
    engine, only = Engine(ROUND), fate("a", 60, 3)
    engine.add(only)
    run(engine)
    assert only.computed == 60 + 2


def test_an_urgent_request_takes_the_place_of_batch_work() -> None:
    """As the paged scheduler lets it; who gave way still gets all of its tokens."""
    engine = Engine(ROUND)
    batch = fate("batch", 600, 300, Priority.BATCH)
    engine.add(batch)
    for _ in range(10):
        engine.begin()
        engine.end()
    engine.add(fate("urgent", 500, 2, Priority.INTERACTIVE))
    _, ended = run(engine)
    assert ended["urgent"] < ended["batch"]
    assert (engine.preemptions, batch.generated) == (1, 300)


def test_a_request_that_is_cancelled_during_a_step_is_gone_after_it() -> None:
    """The step that runs cannot be undone."""
    engine = Engine(ROUND)
    engine.add(fate("a", 60, 100))
    engine.begin()
    engine.cancel("a")
    engine.end()
    assert (engine.idle, engine.kv_used, engine.begin()) == (True, 0, None)


def test_a_cached_prefix_is_not_computed_again() -> None:
    """Of a prompt that is cached whole, the last token is."""
    engine = Engine(
        StepModel(kv_tokens=8 * BLOCK_TOKENS, max_batch_tokens=4096), Prefixes(8 * BLOCK_TOKENS)
    )
    for name in ("cold", "warm"):
        asked = Asked(0.0, "t", 2 * BLOCK_TOKENS, 1, blocks=(1, 2))
        each = Fate(asked, name)
        engine.add(each)
        run(engine)
    assert (each.hit_tokens, each.computed) == (2 * BLOCK_TOKENS - 1, 1)


def test_the_block_that_was_needed_least_recently_goes_first() -> None:
    """And the end of a prompt before its start."""
    prefixes = Prefixes(3 * BLOCK_TOKENS)
    prefixes.keep((1, 2))
    prefixes.keep((3,))
    prefixes.keep((1, 4))
    assert prefixes.hit((1, 2)) == BLOCK_TOKENS
    assert prefixes.hit((3,)) == BLOCK_TOKENS
