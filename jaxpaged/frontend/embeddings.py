"""Embeddings of prompts: a decoder's hidden states after its last norm, of the last token or the mean of all."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from jaxpaged.core.errors import RequestError
from jaxpaged.core.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.frontend.input_processor import ProcessedRequest

Pooling = Literal["last", "mean"]

# The engine samples one token after every prompt; here it is discarded.
EMBEDDING_PARAMS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False,
                                  output_kind=RequestOutputKind.FINAL_ONLY)


def for_embedding(request: ProcessedRequest, pooling: object) -> ProcessedRequest:
    """Turn a request with EMBEDDING_PARAMS into one for an embedding.

    Raises:
        RequestError: an unknown pooling.
    """
    if pooling != "last" and pooling != "mean":
        raise RequestError("pooling must be last or mean", param="pooling")
    kind: Pooling = "mean" if pooling == "mean" else "last"
    return replace(request, sequences=tuple(
        replace(sequence, pooling=kind, skip_prefix_read=True) for sequence in request.sequences))


def normalized(values: Sequence[float]) -> list[float]:
    """The vector of length 1 in this direction."""
    length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
    return [value / length for value in values]
