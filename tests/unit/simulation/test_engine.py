"""The simulated engine: when tokens come, who shares a step, who gives way; worked out by hand."""

from gpu_worker.engines.paged.batch import scheduler
from simulation import engine
from simulation.engine import SimulatedEngine
from simulation.prefix_cache import BLOCK_TOKENS, PrefixCacheModel
from simulation.request import RequestSpec, SimulatedRequest
from simulation.step_model import StepModel
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


def fate(
    name: str, prompt: int, output: int, priority: Priority = Priority.STANDARD
) -> SimulatedRequest:
    return SimulatedRequest(RequestSpec(0.0, "t", prompt, output, priority=priority), name)


def run(engine: SimulatedEngine) -> tuple[dict[str, float], dict[str, float]]:
    """When requests got their first and their last tokens, in milliseconds."""
    now = 0.0
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while (seconds := engine.begin_step()) is not None:
        now = round(now + seconds * 1000, 6)
        stepped = engine.finish_step()
        first |= {each.request_id: now for each in stepped.first}
        last |= {each.request_id: now for each in stepped.ended}
    return first, last


def test_two_requests_share_steps_as_worked_out_by_hand() -> None:
    """60 + 40 tokens of prompts; one decodes beside the other 40; then two decode together."""
    engine = SimulatedEngine(ROUND)
    engine.add(fate("a", 60, 3))
    engine.add(fate("b", 80, 2))
    assert run(engine) == ({"a": 150, "b": 350}, {"a": 470, "b": 470})


def test_a_step_takes_what_the_model_says() -> None:
    """The default is the worker that docs/simulator.md describes: an A10G with a 7B model."""
    assert StepModel().step_seconds(10, 5000, 0) == (31.2 + 2.8 + 2.0) / 1000
    assert StepModel().step_seconds(0, 0, 100) == (10 + 26) / 1000


def test_all_kv_is_free_when_all_have_ended() -> None:
    """Else a long run would slowly choke."""
    engine = SimulatedEngine(ROUND)
    for number in range(30):
        engine.add(fate(f"r{number}", 30 + number, 1 + number % 7))
    run(engine)
    assert (engine.idle, engine.kv_used, engine.running) == (True, 0, 0)


def test_every_token_is_generated_once() -> None:
    """Though KV for all does not suffice, so that some give way and are computed again."""
    engine = SimulatedEngine(ROUND)
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
    engine, only = SimulatedEngine(ROUND), fate("a", 60, 3)
    engine.add(only)
    run(engine)
    assert only.computed == 60 + 2


def test_an_urgent_request_takes_the_place_of_batch_work() -> None:
    """As the paged scheduler lets it; who gave way still gets all of its tokens."""
    engine = SimulatedEngine(ROUND)
    batch = fate("batch", 600, 300, Priority.BATCH)
    engine.add(batch)
    for _ in range(10):
        engine.begin_step()
        engine.finish_step()
    engine.add(fate("urgent", 500, 2, Priority.INTERACTIVE))
    _, ended = run(engine)
    assert ended["urgent"] < ended["batch"]
    assert (engine.preemptions, batch.generated) == (1, 300)


def test_a_request_that_is_cancelled_during_a_step_is_gone_after_it() -> None:
    """The step that runs cannot be undone."""
    engine = SimulatedEngine(ROUND)
    engine.add(fate("a", 60, 100))
    engine.begin_step()
    engine.cancel("a")
    engine.finish_step()
    assert (engine.idle, engine.kv_used, engine.begin_step()) == (True, 0, None)


def test_a_cached_prefix_is_not_computed_again() -> None:
    """Of a prompt that is cached whole, the last token is."""
    engine = SimulatedEngine(
        StepModel(kv_tokens=8 * BLOCK_TOKENS, max_batch_tokens=4096),
        PrefixCacheModel(8 * BLOCK_TOKENS),
    )
    for name in ("cold", "warm"):
        asked = RequestSpec(0.0, "t", 2 * BLOCK_TOKENS, 1, blocks=(1, 2))
        each = SimulatedRequest(asked, name)
        engine.add(each)
        run(engine)
    assert (each.hit_tokens, each.computed) == (2 * BLOCK_TOKENS - 1, 1)


def test_the_block_that_was_needed_least_recently_goes_first() -> None:
    """And the end of a prompt before its start."""
    prefixes = PrefixCacheModel(3 * BLOCK_TOKENS)
    prefixes.insert((1, 2))
    prefixes.insert((3,))
    prefixes.insert((1, 4))
    assert prefixes.match_tokens((1, 2)) == BLOCK_TOKENS
    assert prefixes.match_tokens((3,)) == BLOCK_TOKENS


def test_it_schedules_with_the_constants_of_the_real_scheduler() -> None:
    """`simulation` imports no service, so it repeats them."""
    assert engine.LESS_URGENT_SHARE == scheduler.LESS_URGENT_SHARE
    assert engine.RETURN_STEPS == scheduler.RETURN_STEPS
