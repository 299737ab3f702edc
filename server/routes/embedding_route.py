"""POST /v1/embeddings: its body and its answer."""

import base64
import struct
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from jaxpaged.core.errors import NotSupportedError, RequestError
from jaxpaged.core.limits import Limits
from jaxpaged.core.outputs import RequestOutput
from jaxpaged.frontend.embeddings import normalized
from jaxpaged.server.protocol.body import Body
from jaxpaged.server.protocol.error_answers import to_json


class EmbeddingRequest(Body):
    """Body of POST /v1/embeddings."""

    input: Any = Field(None, description="a string, a list of token ids, or a list of either", json_schema_extra={
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}},
                  {"type": "array", "items": {"type": "integer"}},
                  {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}]})
    encoding_format: str | None = Field(None, description="float or base64")
    dimensions: int | None = None
    pooling: str | None = Field(None, description="last (the default) or mean")
    normalize: bool | None = Field(None, description="vectors of length 1; default: true")
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, description="use only the last N tokens of each text")

    def check(self, limits: Limits) -> None:
        """Refuse values that the fields' types allow.

        Raises:
            RequestError: names the field.
        """
        if self.dimensions is not None:
            raise NotSupportedError("dimensions is not supported; leave it out", param="dimensions")
        if self.encoding_format not in (None, "float", "base64"):
            raise RequestError("encoding_format must be float or base64", param="encoding_format")
        if self.pooling not in (None, "last", "mean"):
            raise RequestError("pooling must be last or mean", param="pooling")


def embedding_answer(body: EmbeddingRequest, model: str, outputs: Sequence[RequestOutput]) -> bytes:
    """The answer; vectors in the order of the outputs."""
    data = []
    for index, output in enumerate(outputs):
        assert output.embedding is not None, f"{output.request_id} ended without an embedding"
        vector = list(output.embedding) if body.normalize is False else normalized(output.embedding)
        encoded = (base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
                   if body.encoding_format == "base64" else vector)
        data.append({"object": "embedding", "index": index, "embedding": encoded})
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    rest = {"model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    # One at a time: other threads wait while JSON is written.
    return b'{"object":"list","data":[%b],%b' % (b",".join(map(to_json, data)), to_json(rest)[1:])
