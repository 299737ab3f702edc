"""How much one request may hold or ask for. Each limit is a flag of the server and a keyword argument of `LLM`.

What a value may be is checked where the value is made; here is only how many and how large.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from jaxpaged.core.errors import ConfigError, RequestError
from jaxpaged.core.flags import flag_of
from jaxpaged.core.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_N, SamplingParams


def limit(default: int, help: str, *, least: int = 0, most: int | None = None) -> Any:
    """A field of limits; `most` is what the rest of the program can do."""
    return field(default=default, metadata={"help": help, "group": "limits", "least": least, "most": most})


def check_limits(limits: Any) -> None:
    """Check the fields of a dataclass of limits.

    Raises:
        ConfigError: one is out of its range; names the flag.
    """
    for item in fields(limits):
        value, least, most = getattr(limits, item.name), item.metadata["least"], item.metadata["most"]
        if type(value) is not int or value < least or (most is not None and value > most):
            span = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
            raise ConfigError(f"{flag_of(item.name)} must be {span}, not {value!r}")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may hold, whoever brings it.

    Raises:
        ConfigError: a limit that cannot be; names the flag.
    """

    max_n: int = limit(128, "most choices of a request (n, best_of)", least=1, most=MAX_N)
    max_stop_strings: int = limit(64, "most stop strings")
    max_stop_string_chars: int = limit(4096, "longest stop string")
    max_stop_token_ids: int = limit(1024, "most ids in stop_token_ids")
    max_logit_bias: int = limit(MAX_LOGIT_BIAS, "most entries of logit_bias", most=MAX_LOGIT_BIAS)
    max_allowed_token_ids: int = limit(2**20, "most ids in allowed_token_ids")
    max_bad_words: int = limit(MAX_BAD_WORDS, "most texts in bad_words", most=MAX_BAD_WORDS)
    max_bad_word_chars: int = limit(1024, "longest text in bad_words")
    max_bad_word_tokens: int = limit(MAX_BAD_WORD_TOKENS, "most tokens of a text in bad_words",
                                     most=MAX_BAD_WORD_TOKENS)
    max_cache_salt_chars: int = limit(1024, "longest cache_salt")
    max_messages: int = limit(2**14, "most messages of a conversation", least=1)
    max_schema_chars: int = limit(2**17, "longest JSON schema")
    max_schema_depth: int = limit(64, "deepest nesting of a JSON schema", most=256)
    max_multiple_of: int = limit(100_000, "most remainders of a multipleOf in a JSON schema: each is a state")
    max_regex_chars: int = limit(2**14, "longest regular expression")
    max_grammar_chars: int = limit(2**16, "longest Lark or GBNF grammar")
    max_choices: int = limit(1024, "most texts of a structured choice")
    max_choices_chars: int = limit(2**16, "most characters of a structured choice's texts together")
    max_grammar_bytes: int = limit(2**26, "memory that one schema, regular expression, choice or grammar may take "
                                          "while it is compiled")
    max_grammar_cache_bytes: int = limit(2**28, "memory of compiled ones that are kept for later requests")

    def __post_init__(self) -> None:
        check_limits(self)

    def check(self, params: SamplingParams) -> None:
        """Refuse sampling parameters that ask for more.

        Raises:
            RequestError: names the field and the flag.
        """
        self.at_most("n", "choices", params.n, "max_n")
        if params.best_of is not None:
            self.at_most("best_of", "choices", params.best_of, "max_n")
        if params.stop:
            self.at_most("stop", "strings", len(params.stop), "max_stop_strings")
            self.at_most("stop", "characters in a string", max(map(len, params.stop)), "max_stop_string_chars")
        if params.stop_token_ids:
            self.at_most("stop_token_ids", "ids", len(params.stop_token_ids), "max_stop_token_ids")
        if params.logit_bias:
            self.at_most("logit_bias", "entries", len(params.logit_bias), "max_logit_bias")
        if params.allowed_token_ids:
            self.at_most("allowed_token_ids", "ids", len(params.allowed_token_ids), "max_allowed_token_ids")
        if params.bad_words:
            self.at_most("bad_words", "texts", len(params.bad_words), "max_bad_words")
            self.at_most("bad_words", "characters in a text", max(map(len, params.bad_words)), "max_bad_word_chars")

    def at_most(self, param: str, what: str, count: int, name: str) -> None:
        """Refuse a request whose `param` holds more than the limit called `name`.

        Raises:
            RequestError: names the field and the flag.
        """
        most: int = getattr(self, name)
        if count > most:
            raise too_many(param, what, most, name)


def too_many(param: str, what: str, most: int, name: str) -> RequestError:
    """The error of a request that holds more than the limit called `name`."""
    return RequestError(f"{param} may hold at most {most} {what} ({flag_of(name)})", param=param)
