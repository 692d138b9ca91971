"""A frame that is encoded in pieces is the frame that would have been encoded at once."""

from typing import Any, Literal

import msgpack
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.entrypoints.websocket_reply import ResultFrame

HEAD = {"type": "result", "id": 'a"ü', "usage": {"total_tokens": 3}, "timing": {"total": 1.5}}
ITEMS = st.lists(
    st.fixed_dictionaries({"index": st.integers(0, 9), "embedding": st.lists(st.floats(width=32))})
)


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@given(records=st.lists(ITEMS, max_size=5))
def test_pieces_make_the_same_frame(
    encoding: Literal["json", "msgpack"], records: list[list[dict[str, Any]]]
) -> None:
    """In either subprotocol, however the items came."""
    frame = ResultFrame(encoding)
    for items in records:
        frame.add(items)
    data = [item for items in records for item in items]
    whole: dict[str, Any] = {**HEAD, "data": data}
    assert len(frame) == len(data)
    expected = orjson.dumps(whole).decode() if encoding == "json" else msgpack.packb(whole)
    assert frame.finish(HEAD) == expected
