"""What the gateway's own histogram tells."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from gateway.metrics import BUCKET_SECONDS, InterTokenHistogram

NAME = "millstream_inter_token_seconds"
TIMES = st.one_of(st.sampled_from(BUCKET_SECONDS), st.floats(min_value=0, max_value=1000))


def told(collector: Collector) -> Iterator[Sample]:
    for family in collector.collect():
        yield from (each for each in family.samples if not each.name.endswith("_created"))


@given(st.lists(st.tuples(st.sampled_from("ab"), TIMES)))
def test_it_tells_what_a_histogram_of_the_library_tells(observed: list[tuple[str, float]]) -> None:
    ours = InterTokenHistogram()
    theirs = Histogram(NAME, "", ["model", "priority"], buckets=BUCKET_SECONDS, registry=None)
    for model, seconds in observed:
        for histogram in (ours, theirs):
            histogram.labels(model, "batch").observe(seconds)
    assert list(told(ours)) == list(told(theirs))
