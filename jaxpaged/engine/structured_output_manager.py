"""Structured output at run time: which tokens may come next, computed beside the engine's thread.

A mask depends on the last token, so a constrained sequence skips the step that would follow at once; other sequences
run on.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxpaged.core.messages import Grammar
from jaxpaged.text.bounded_cache import BoundedCache
from jaxpaged.text.structured_outputs import GrammarVocabulary
from jaxpaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_COMPILED = 64  # compiled grammars in the cache
_THREADS = 2


class GrammarMatcher:
    """One sequence's state in its grammar. All methods belong to the engine's thread.

    Attributes:
        failed: the mask cannot be computed: once `ready`, it allows no token.
        accepting: the text so far fits, once `ready`.
    """

    def __init__(self, submit: Callable[[Callable[[], Any]], Future[Any]], compile: Callable[[], Any],
                 words: int) -> None:
        self._submit, self._words = submit, words
        self._matcher: Any = None
        self.failed = self.accepting = False
        self._job: Future[Any] = submit(lambda: self._guarded(lambda: self._start(compile)))

    @property
    def ready(self) -> bool:
        """Whether the next token's mask has been computed."""
        return self._job.done()

    def mask(self) -> np.ndarray:
        """uint32 [W], one bit per token that may come next; all zero where none may."""
        found: np.ndarray = self._job.result()
        return found

    def advance(self, token: int) -> bool:
        """Accept a sampled token; True if nothing may follow it."""
        self._job.result()
        if self._matcher is None or not self._matcher.consume_token(token) or self._matcher.is_stopped():
            return True
        self._job = self._submit(lambda: self._guarded(self._compute))
        return False

    def _guarded(self, compute: Callable[[], np.ndarray]) -> np.ndarray:
        try:
            return compute()
        except Exception:  # whatever it is, it must stay with this request, which ends with an error
            logger.exception("a structured output mask cannot be computed")
            self.failed = True
            return np.zeros(self._words, np.uint32)

    def _start(self, compile: Callable[[], Any]) -> np.ndarray:
        matcher = compile()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        self._matcher = matcher
        return self._compute()

    def _compute(self) -> np.ndarray:
        mask = np.zeros(self._words, np.uint32)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():  # the grammar has reached its limits
            raise ValueError(self._matcher.get_error())
        self.accepting = self._matcher.is_accepting()
        mask[: len(bits)] = bits[: len(mask)]  # its last word may be beyond the vocabulary
        return mask


class StructuredOutputManager:
    """Creates the matchers of one model and caches compiled grammars.

    Args:
        load_tokenizer: called once, in another thread, for the first grammar.
        eos_token_ids: the model's end-of-text ids.
        vocab_size: number of ids that the model knows.
        num_logits: bits of a mask; those beyond the vocabulary are never set.
        max_bytes: of all cached grammars together.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], *, eos_token_ids: tuple[int, ...], vocab_size: int,
                 num_logits: int, max_bytes: int) -> None:
        self._load, self._eos, self._vocab_size = load_tokenizer, eos_token_ids, vocab_size
        self._words = -(-num_logits // 32)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="structured-output")
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._compiled: BoundedCache[str, Any] = BoundedCache(MAX_COMPILED, max_bytes)
        self._mask_computed = threading.Event()

    def create_matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the start of its grammar, which is compiled in another thread."""
        return GrammarMatcher(self._submit, lambda: self._compile(grammar), self._words)

    def wait_for_mask(self, timeout: float) -> None:
        """Wait until a mask has been computed since the last call, at most `timeout` seconds."""
        self._mask_computed.wait(timeout)
        self._mask_computed.clear()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, job: Callable[[], Any]) -> Future[Any]:
        future = self._threads.submit(job)
        future.add_done_callback(lambda _: self._mask_computed.set())
        return future

    def _compile(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher

        made = self._compiled.get(grammar.text)
        if made is None:
            with self._lock:
                if self._vocabulary is None:
                    self._vocabulary = self._read_vocabulary()
            made = LLMatcher(self._vocabulary, grammar.text, log_level=0)
            self._compiled.put(grammar.text, made, grammar.num_bytes)
        with self._lock:
            return made.deep_copy()

    def _read_vocabulary(self) -> Any:
        from llguidance import LLTokenizer

        tokenizer = self._load()
        count = min(tokenizer.vocab_size, self._vocab_size)
        tokens = [tokenizer.token_bytes(token) for token in range(count)]
        special = [token for token in range(count) if tokenizer.is_special(token)]
        ends, num_ids = sorted(tokenizer.eos_token_ids.union(self._eos)), self._vocab_size
        if not ends:  # the grammar needs one: beyond what a mask holds, so that it is never sampled
            num_ids = 32 * self._words + 1
            ends = [num_ids - 1]
            tokens += [b""] * (num_ids - 1 - count) + [b"<end>"]
            special += ends
        vocabulary = GrammarVocabulary(tokens, special, ends, tokenizer.encode_continuation)
        return LLTokenizer(vocabulary, n_vocab=num_ids, eos_token=ends)  # type: ignore[arg-type]
