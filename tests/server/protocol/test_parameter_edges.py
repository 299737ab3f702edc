"""Every field of every route and of SamplingParams, at the edges of what it takes: served, or refused by its name.

The fields come from the request bodies and from SamplingParams, so that a new one without an entry in the table fails.
Nothing is computed: a request is brought as far as the engine would get it. tests/server/routes/test_parameters.py
sends a sample of the table to a server.
"""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from jaxpaged.core.errors import RequestError
from jaxpaged.core.sampling_params import SamplingParams, StructuredOutputsParams
from jaxpaged.frontend.embeddings import EMBEDDING_PARAMS, for_embedding
from jaxpaged.frontend.input_processor import InputProcessor
from jaxpaged.server.protocol.body import Body, BodyReader
from jaxpaged.server.protocol.chat_tools import choose_tools
from jaxpaged.server.protocol.error_answers import error_status
from jaxpaged.server.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    split_prompts,
    template_options,
)
from jaxpaged.server.protocol.structure import structured_outputs_field
from jaxpaged.server.routes.embedding_route import EmbeddingRequest
from jaxpaged.server.routes.token_routes import DetokenizeRequest, TokenizeRequest, TokenRoutes
from jaxpaged.text.tokenizer import Tokenizer
from tests.support.parameter_table import (
    BASE,
    CONTEXT,
    IN_PYTHON_ONLY,
    MAX_LOGPROBS,
    MAX_N,
    PROMPT_TOKENS,
    TABLE,
    VOCAB,
    Edges,
)


@pytest.fixture(scope="module")
def inputs(tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(tokenizer, max_model_len=CONTEXT, vocab_size=VOCAB, max_n=MAX_N, max_logprobs=MAX_LOGPROBS,
                          eos_token_ids={2}, takes_priorities=True)


def serve(inputs: InputProcessor, tokenizer: Tokenizer, kind: type[Body], sent: dict[str, Any]) -> None:
    """Do what the route does before the engine gets the request."""
    body = BodyReader().read_body(kind, json.dumps(sent).encode())
    if isinstance(body, TokenizeRequest):
        TokenRoutes(inputs, tokenizer, CONTEXT).tokenize(body)
    elif isinstance(body, DetokenizeRequest):
        TokenRoutes(inputs, tokenizer, CONTEXT).detokenize(body)
    elif isinstance(body, EmbeddingRequest):
        for prompt in split_prompts(body.input, "input"):
            try:
                prepared = inputs.process("r", prompt, EMBEDDING_PARAMS,
                                          truncate_prompt_tokens=body.truncate_prompt_tokens)
            except RequestError as error:
                raise (error.with_param("input") if error.param == "prompt" else error) from None
            for_embedding(prepared, body.pooling or "last")
    else:
        _complete(inputs, body)


def _complete(inputs: InputProcessor, body: Body) -> None:
    assert isinstance(body, CompletionRequest | ChatCompletionRequest)
    prompts: list[Any]
    if isinstance(body, ChatCompletionRequest):
        use = choose_tools(body.tools, body.tool_choice, body.parallel_tool_calls, "hermes")
        params = body.chat_sampling_params({}, use)
        prompts = [inputs.render_chat(body.messages, tools=use.tools, **template_options(body),
                                      may_be_long=body.truncate_prompt_tokens is not None)]
    else:
        params = body.sampling_params(16, {})
        prompts = split_prompts(body.prompt)
    if params.structured_outputs is not None:
        try:
            inputs.grammar(params.structured_outputs)
        except RequestError as error:
            raise error.with_param(structured_outputs_field(body)) from None
    for prompt in prompts:
        with body.naming_fields():
            inputs.process("r", prompt, params, **body.prompt_options)


def check(table: dict[str, Edges], ask: Callable[[str, Any, dict[str, Any]], None]) -> None:
    """Try every value, and report all that have the wrong outcome."""
    wrong = []
    for name, edges in table.items():
        for good, value in [*((True, value) for value in edges.good), *((False, value) for value in edges.bad)]:
            what = f"{name} {repr(value)[:60]}"
            try:
                ask(name, value, edges.needs)
            except RequestError as error:
                if good or error.param != name or error_status(error) != 400 or len(error.message) > 300:
                    wrong.append(f"{what}: {error.param}: {error.message[:100]}")
            except Exception as error:
                wrong.append(f"{what}: {error!r}"[:200])
            else:
                if not good:
                    wrong.append(f"{what} is accepted")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("kind", TABLE)
def test_every_field_of_every_route(inputs: InputProcessor, tokenizer: Tokenizer, kind: type[Body]) -> None:
    assert set(TABLE[kind]) == set(kind.model_fields) - {"model"}, "a field has no entry in the table"

    def ask(name: str, value: Any, needs: dict[str, Any]) -> None:
        serve(inputs, tokenizer, kind, {**BASE[kind], **needs, name: value})

    check(TABLE[kind], ask)


def test_every_sampling_parameter_in_python(inputs: InputProcessor) -> None:
    """With the same outcome as over HTTP."""
    known = {item.name for item in fields(SamplingParams)}
    table = {name: edges for name, edges in (TABLE[CompletionRequest] | IN_PYTHON_ONLY).items() if name in known}
    assert set(table) == known, "a parameter has no entry in the table"

    def ask(name: str, value: Any, needs: dict[str, Any]) -> None:
        if name == "structured_outputs" and isinstance(value, dict):
            if not set(value) <= {item.name for item in fields(StructuredOutputsParams)}:
                raise RequestError("Python itself refuses the keyword", param=name)
            value = StructuredOutputsParams(**value)
        inputs.process("r", [5] * PROMPT_TOKENS, SamplingParams(**{**needs, name: value}))

    check(table, ask)


def test_what_is_no_sampling_parameter_reaches_the_engine_too(inputs: InputProcessor) -> None:
    body = BodyReader().read_body(CompletionRequest, json.dumps({
        "prompt": [5, 6, 7], "priority": 3, "cache_salt": "s", "truncate_prompt_tokens": 2}).encode())
    [sequence] = inputs.process("r", body.prompt, **body.prompt_options).sequences
    assert (sequence.priority, sequence.cache_salt, list(sequence.prompt_token_ids)) == (3, "s", [6, 7])
