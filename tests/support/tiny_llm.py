"""What tests of the Python API share: greedy requests to the tiny model, and what must hold of their results."""

import gc
from collections.abc import Sequence

import jax

from jaxpaged import RequestOutput, SamplingParams
from tests.support.tiny_llama import CONFIG, Reference, random_weights

REFERENCE = Reference(CONFIG, random_weights())
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def check_greedy(outputs: Sequence[RequestOutput], length: int = 8) -> None:
    for output in outputs:
        assert output.finished and len(output.outputs) == 1
        [choice] = output.outputs
        assert choice.index == 0 and choice.finish_reason == "length" and choice.stop_reason is None
        assert REFERENCE.error(output.prompt_token_ids, choice.token_ids, length) is None


def large_arrays(known: Sequence[int] = ()) -> list[int]:
    """Arrays on devices that are as large as a model's, without those known."""
    gc.collect()
    return [id(array) for array in jax.live_arrays() if array.size > 1000 and id(array) not in known]
