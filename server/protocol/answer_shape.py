"""The JSON of OpenAI's answers, whole and streamed."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxpaged.core.outputs import CompletionOutput, RequestOutput
from jaxpaged.server.protocol.error_answers import to_json
from jaxpaged.server.protocol.logprob_shapes import LogprobShape, prompt_parts


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int,
          reasoning_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object; `reasoning_tokens` is None where the model does not reason."""
    details = {} if reasoning_tokens is None else {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens}, **details}


_CHUNK_END = "}]}\n\n"
_CHOICES = ',"choices":'


class AnswerShape:
    """Writes the JSON of one request's answer. Fixed parts are serialized once, so that a chunk takes microseconds.

    Args:
        chat: chat completion or text completion.
        answer_id: `id` of the answer and of all its chunks.
        created: seconds since 1970.
        num_choices: of all prompts together.
        token_ids: whether to include the token ids of the choices and of the prompt.
        logprobs: how to write log probabilities, if requested.
        prompt_logprobs: whether to include the log probabilities of the prompts in a whole answer.
    """

    def __init__(self, *, chat: bool, answer_id: str, created: int, model: str, num_choices: int,
                 token_ids: bool, logprobs: LogprobShape | None = None, prompt_logprobs: bool = False) -> None:
        self._chat = chat
        self._token_ids = token_ids
        self._logprobs, self._prompt_logprobs = logprobs, prompt_logprobs
        kind = ("chat.completion", "chat.completion.chunk") if chat else ("text_completion", "text_completion")
        self._whole, self._chunk = ({"id": answer_id, "object": name, "created": created, "model": model}
                                    for name in kind)
        head = json.dumps(self._chunk, ensure_ascii=False, separators=(",", ":"))[:-1]
        before = '"delta":{"content":' if chat else '"text":'
        self._before = [f'data: {head}{_CHOICES}[{{"index":{index},{before}' for index in range(num_choices)]
        self._after = ("}" if chat else "") + ',"logprobs":null,"finish_reason":null'

    def first_chunk(self, index: int, prompt_token_ids: tuple[int, ...]) -> str:
        """The first chunk of a choice: the role in a chat; in a text completion the prompt's ids, or nothing."""
        ids = f',"prompt_token_ids":{json.dumps(prompt_token_ids)}' if self._token_ids else ""
        before = self._before[index]
        if self._chat:
            before = before.removesuffix('"content":') + '"role":"assistant","content":'
            return f'{before.replace(_CHOICES, ids + _CHOICES, 1)}""{self._after}{_CHUNK_END}'
        return f'{before}""{self._after}{ids}{_CHUNK_END}' if ids else ""

    def text_chunk(self, index: int, choice: CompletionOutput) -> str:
        """A chunk with new text of one choice; empty if there is nothing new."""
        rest = self._rest(choice)
        if not choice.text and rest is None:
            return ""
        return f"{self._before[index]}{_quote(choice.text)}{rest or self._after}{_CHUNK_END}"

    def delta_chunks(self, index: int, deltas: Iterable[dict[str, Any]], choice: CompletionOutput) -> list[str]:
        """Chunks with new deltas of a chat's choice that is parsed for tool calls or reasoning.

        Token ids and log probabilities go into the first chunk, even if it has no text yet.
        """
        before = self._before[index].removesuffix('{"content":')
        rest = self._rest(choice)
        chunks = []
        for delta in [*deltas] or ([{}] if rest else []):
            chunks.append(f"{before}{to_json(delta).decode()}{(rest or self._after)[1:]}{_CHUNK_END}")
            rest = None
        return chunks

    def _rest(self, choice: CompletionOutput) -> str | None:
        """The log probabilities and token ids that follow the text; None if there are none."""
        ids = f',"token_ids":{json.dumps(choice.token_ids)}' if self._token_ids and choice.token_ids else ""
        logprobs = self._logprobs.choice_logprobs(choice) if self._logprobs is not None else None
        if logprobs is None:
            return self._after + ids if ids else None
        return self._after.replace('"logprobs":null', f'"logprobs":{to_json(logprobs).decode()}') + ids

    def last_chunk(self, index: int, finish_reason: str | None, stop_reason: int | str | None) -> str:
        """The last chunk of a choice, after all its text."""
        before = self._before[index].removesuffix('"content":') if self._chat else self._before[index] + '""'
        after = self._after.replace('"finish_reason":null', f'"finish_reason":{json.dumps(finish_reason)}')
        return f'{before}{after},"stop_reason":{json.dumps(stop_reason)}{_CHUNK_END}'

    def with_usage(self, chunk: str, totals: dict[str, Any]) -> str:
        """A chunk that also reports the usage so far."""
        return f'{chunk.removesuffix(_CHUNK_END)}}}],"usage":{to_json(totals).decode()}}}\n\n'

    def usage_chunk(self, totals: dict[str, Any]) -> str:
        """The chunk that reports the usage, after all choices."""
        return f"data: {to_json({**self._chunk, 'choices': [], 'usage': totals}).decode()}\n\n"

    def whole(self, outputs: Sequence[RequestOutput], totals: dict[str, Any],
              messages: Sequence[tuple[dict[str, Any], str | None]] = ()) -> Iterator[bytes]:
        """The whole answer, in parts of bounded size; choices in prompt-major order.

        Args:
            messages: message and finish reason of each choice of a chat that was parsed.
        """
        yield to_json(self._whole)[:-1] + b',"choices":['
        pairs = [(output, choice) for output in outputs for choice in output.outputs]
        for index, (output, choice) in enumerate(pairs):
            if index:
                yield b","
            yield from self._choice(index, output, choice, messages[index] if messages else None)
        yield b'],"usage":' + to_json(totals)
        if self._chat and self._prompt_logprobs:
            yield b',"prompt_logprobs":'
            yield from prompt_parts(outputs[0].prompt_logprobs)
        if self._chat and self._token_ids:
            yield b',"prompt_token_ids":' + to_json(outputs[0].prompt_token_ids)
        yield b"}"

    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput,
                parsed: tuple[dict[str, Any], str | None] | None) -> Iterator[bytes]:
        item: dict[str, Any] = {"index": index}
        message, reason = parsed or ({"role": "assistant", "content": choice.text}, choice.finish_reason)
        item |= {"message": message} if self._chat else {"text": choice.text}
        yield to_json(item)[:-1] + b',"logprobs":'
        if self._logprobs is None:
            yield b"null"
        else:
            yield from self._logprobs.parts(choice)
        item = {"finish_reason": reason, "stop_reason": choice.stop_reason}
        if self._token_ids:
            item["token_ids"] = choice.token_ids
        if self._token_ids and not self._chat:
            item["prompt_token_ids"] = output.prompt_token_ids
        yield b"," + to_json(item)[1:-1]
        if self._prompt_logprobs and not self._chat:
            yield b',"prompt_logprobs":'
            yield from prompt_parts(output.prompt_logprobs)
        yield b"}"


_quote = json.JSONEncoder(ensure_ascii=False).encode
