"""POST /tokenize and /detokenize: text to ids and back, as the model sees it."""

from typing import Any

from pydantic import Field

from jaxpaged.core.errors import RequestError
from jaxpaged.core.limits import LIMITS, check_at_most
from jaxpaged.frontend.input_processor import InputProcessor
from jaxpaged.server.protocol.body import Body
from jaxpaged.server.protocol.chat_tools import check_tools
from jaxpaged.server.protocol.requests import template_options
from jaxpaged.text.tokenizer import Tokenizer


class TokenizeRequest(Body):
    """Body of POST /tokenize: a prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(
        None, description="let the tokenizer add special tokens; default: true for a prompt")
    return_token_strs: bool | None = Field(None, description="add the text of each token")


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    tokens: list[int] | None = None


class TokenRoutes:
    """Computes the answers of both routes. Runs in a thread beside the event loop."""

    def __init__(self, inputs: InputProcessor, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._inputs, self._tokenizer, self._max_model_len = inputs, tokenizer, max_model_len

    def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Ids of a prompt or of a rendered chat; they may be more than the context holds.

        Raises:
            RequestError: neither or both given, or a chat that cannot be rendered.
        """
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if body.prompt is not None:
            for name in ("tools", "chat_template_kwargs", "continue_final_message"):
                if getattr(body, name):
                    raise RequestError(f"{name} needs messages", param=name)
            if body.add_generation_prompt is False:
                raise RequestError("add_generation_prompt needs messages", param="add_generation_prompt")
            ids = self._inputs.encode(body.prompt, body.add_special_tokens is not False)
        else:
            ids = self._inputs.render_chat(body.messages, tools=check_tools(body.tools), may_be_long=True,
                                           **template_options(body)).token_ids
        texts = None
        if body.return_token_strs:
            texts = [self._tokenizer.token_bytes(number).decode(errors="replace") for number in ids]
        return {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids, "token_strs": texts}

    def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """Text of ids, special tokens included.

        Raises:
            RequestError: no ids, too many, or an unknown one.
        """
        ids = body.tokens
        if ids is None:
            raise RequestError("tokens must be a list of token ids", param="tokens")
        check_at_most("tokens", "ids", len(ids), LIMITS.max_detokenize_tokens)
        if ids and (min(ids) < 0 or max(ids) >= self._inputs.vocab_size):
            raise RequestError(f"token ids must be from 0 to {self._inputs.vocab_size - 1}", param="tokens")
        return {"prompt": self._tokenizer.decode(ids, skip_special_tokens=False)}
