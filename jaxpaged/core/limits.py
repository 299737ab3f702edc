"""How much one request may hold: one table. What a value may be is checked where the value is made."""

from dataclasses import dataclass, field
from typing import Any

from jaxpaged.core.errors import RequestError
from jaxpaged.core.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, SamplingParams


def _limit(value: int, help: str) -> Any:
    return field(default=value, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that keep one client from holding up the others. They are generous and no flag changes them.

    Sizes are bytes unless they say characters. The bounds that operators do set are flags: see `EngineConfig` and
    `ServerConfig`.
    """

    # Sampling parameters. The sampling programs have room for this number in each row of the batch.
    max_logit_bias: int = _limit(MAX_LOGIT_BIAS, "entries of logit_bias")
    max_bad_words: int = _limit(MAX_BAD_WORDS, "texts in bad_words")
    max_bad_word_tokens: int = _limit(MAX_BAD_WORD_TOKENS, "tokens of a text in bad_words")
    max_bad_word_chars: int = _limit(1024, "characters of a text in bad_words")
    max_stop_strings: int = _limit(64, "stop strings")
    max_stop_string_chars: int = _limit(4096, "characters of a stop string")
    max_stop_token_ids: int = _limit(1024, "ids in stop_token_ids")
    max_allowed_token_ids: int = _limit(2**20, "ids in allowed_token_ids")
    # Structured outputs. Compiling them takes time and memory, some of it far out of proportion to their length.
    max_schema_chars: int = _limit(2**17, "characters of a JSON schema")
    max_schema_depth: int = _limit(64, "levels of a JSON schema")
    max_schema_levels: int = _limit(512, "levels of a JSON schema with its references followed; each takes some stack")
    max_multiple_of: int = _limit(100_000, "remainders of a multipleOf in a JSON schema; each is a state")
    max_regex_chars: int = _limit(2**14, "characters of a regular expression")
    max_grammar_chars: int = _limit(2**16, "characters of a Lark or GBNF grammar")
    max_choices: int = _limit(1024, "texts of a structured choice")
    max_choices_chars: int = _limit(2**16, "characters of all texts of a structured choice")
    max_grammar_bytes: int = _limit(2**26, "memory to compile one schema, regular expression, choice or grammar")
    max_grammar_cache_bytes: int = _limit(2**28, "memory of the compiled grammars cached for later requests")
    # Chats.
    max_messages: int = _limit(2**14, "messages of a conversation")
    max_tools: int = _limit(128, "tools of a chat")
    max_tool_name_chars: int = _limit(256, "characters of a tool's name")
    max_template_bytes: int = _limit(2**30, "memory the chat template may use for one conversation")
    # HTTP. While a body is parsed, the streams of all other clients wait.
    max_body_values: int = _limit(2**20, "values in a request body's JSON")
    max_body_containers: int = _limit(2**16, "keys, objects and lists in a request body's JSON")
    max_body_quotes: int = _limit(2**18, "quotation marks in a request body's JSON")
    max_head_bytes: int = _limit(2**16, "request line and headers together")
    max_request_id_chars: int = _limit(128, "characters of request_id; a longer X-Request-Id is not sent back")
    max_cache_salt_chars: int = _limit(1024, "characters of cache_salt")
    max_detokenize_tokens: int = _limit(2**20, "ids in a request to /detokenize")
    max_answer_tokens: int = _limit(2**22, "tokens that an answer may hold at once: max_tokens unless it is streamed, "
                                           "and an echoed prompt, for all choices and prompts")
    max_answer_logprobs: int = _limit(2**20, "log probabilities that an answer may hold at once: for each of its "
                                             "tokens 1 plus the alternatives")
    max_unread_tokens: int = _limit(2**18, "tokens and their alternatives that a client may leave unread before its "
                                           "stream fails")

    def check_params(self, params: SamplingParams) -> None:
        """Refuse sampling parameters that hold too much.

        Raises:
            RequestError: names the field.
        """
        if params.stop:
            check_at_most("stop", "strings", len(params.stop), self.max_stop_strings)
            check_at_most("stop", "characters in a string", max(map(len, params.stop)), self.max_stop_string_chars)
        if params.stop_token_ids:
            check_at_most("stop_token_ids", "ids", len(params.stop_token_ids), self.max_stop_token_ids)
        if params.logit_bias:
            check_at_most("logit_bias", "entries", len(params.logit_bias), self.max_logit_bias)
        if params.allowed_token_ids:
            check_at_most("allowed_token_ids", "ids", len(params.allowed_token_ids), self.max_allowed_token_ids)
        if params.bad_words:
            check_at_most("bad_words", "texts", len(params.bad_words), self.max_bad_words)
            check_at_most("bad_words", "characters in a text", max(map(len, params.bad_words)),
                          self.max_bad_word_chars)


LIMITS = Limits()


def check_at_most(param: str, what: str, count: int, maximum: int) -> None:
    """Refuse a request whose `param` holds more than `maximum` of `what`.

    Raises:
        RequestError: names the field and the number.
    """
    if count > maximum:
        raise RequestError(f"{param} may hold at most {maximum} {what}", param=param)
