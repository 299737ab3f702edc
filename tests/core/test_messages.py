"""What crosses between two processes arrives as it was sent."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.messages import EngineOutputs, EngineStats, PoolState, TokenDelta, TokenLogprobs

logprobs = st.builds(TokenLogprobs, st.floats(-100, 0), st.integers(1, 99),
                     st.lists(st.tuples(st.integers(0, 99), st.floats(-100, 0)), max_size=2).map(tuple))
deltas = st.builds(
    TokenDelta, st.text(max_size=4), st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    st.sampled_from([None, "stop", "length", "abort", "error"]), st.none() | st.integers(0, 9), st.integers(0, 99),
    st.integers(0, 3), st.none() | st.floats(0, 9), st.none() | st.text(max_size=4),
    st.lists(logprobs, max_size=2).map(tuple), st.lists(logprobs, max_size=2).map(tuple),
    st.none() | st.lists(st.floats(-1, 1), max_size=3).map(tuple))


@given(st.lists(deltas, max_size=5), st.none() | st.builds(PoolState, st.text("fosc", max_size=5), st.integers(0, 9)))
def test_outputs_arrive_as_they_were_sent(sent: list[TokenDelta], pool: PoolState | None) -> None:
    outputs = EngineOutputs(tuple(sent), EngineStats(num_running=3, step_tokens=(1,)), pool)
    found = pickle.loads(pickle.dumps(outputs, pickle.HIGHEST_PROTOCOL))
    assert found == outputs
    assert all(type(delta) is TokenDelta for delta in found.deltas)
