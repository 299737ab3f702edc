"""Texts that a grammar allows, drawn token by token as by a model without a mind, though one that ends."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from jaxpaged.core.messages import Grammar
from jaxpaged.engine.structured_output_manager import StructuredOutputManager
from jaxpaged.text.structured_outputs import GrammarVocabulary
from jaxpaged.text.tokenizer import Tokenizer

MAX_TOKENS = 2000
_CLOSING = '"}],:'


class RandomModel:
    """Draws tokens that a grammar allows: any, or more and more often one of those that close what is open.

    Args:
        patience: tokens until it closes whatever it can.
    """

    def __init__(self, manager: StructuredOutputManager, tokenizer: Tokenizer, *, patience: int = 40) -> None:
        self._manager, self._patience = manager, patience
        self._bytes = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        drawn = np.array([0 < len(text) <= 3 and not text.isspace() for text in self._bytes])
        drawn[list(tokenizer.eos_token_ids)] = False
        self._drawn = np.flatnonzero(drawn)
        self._all = np.array([token for token in range(len(self._bytes)) if token not in tokenizer.eos_token_ids])
        self._closing = np.array([token for char in _CLOSING for token, text in enumerate(self._bytes)
                                  if text == char.encode()])

    def write(self, grammar: Grammar, seed: int) -> str:
        """One text that fits the grammar."""
        chance, matcher, found = random.Random(seed), self._manager.create_matcher(grammar), b""
        for step in range(MAX_TOKENS):
            mask = matcher.mask()
            if matcher.accepting and (step > self._patience or chance.random() < 0.5):
                break
            tokens = self._allowed(mask, self._closing)
            if not len(tokens) or chance.random() < (0.7 if step < self._patience else 0.1):
                tokens = self._allowed(mask, self._drawn)
            if not len(tokens):  # the rest of a word, which the grammar wants as its tokenizer would cut it
                tokens = self._allowed(mask, self._all)
            if matcher.accepting and not len(tokens):
                break
            assert len(tokens), f"nothing may follow {found!r}"
            token = int(chance.choice(tokens))
            found += self._bytes[token]
            if matcher.advance(token):
                break
        else:
            raise AssertionError(f"no end in {MAX_TOKENS} tokens: {found[:200]!r}")
        return found.decode()

    @staticmethod
    def _allowed(mask: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return tokens[(mask[tokens >> 5] >> (tokens & 31).astype(np.uint32)) & 1 == 1]


@contextmanager
def random_model(tokenizer: Tokenizer, patience: int = 40) -> Iterator[RandomModel]:
    """A random model with a tokenizer."""
    manager = StructuredOutputManager(lambda: tokenizer, eos_token_ids=(), vocab_size=tokenizer.vocab_size,
                                      num_logits=tokenizer.vocab_size, max_bytes=2**28)
    yield RandomModel(manager, tokenizer, patience=patience)
    manager.close()


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether a text as a whole fits a grammar, read byte by byte."""
    from llguidance import LLMatcher, LLTokenizer

    vocabulary = GrammarVocabulary([*(bytes([byte]) for byte in range(256)), b"<end>"], [256], [256])
    matcher = LLMatcher(LLTokenizer(vocabulary), grammar.text, log_level=0)  # type: ignore[arg-type]
    found = list(text.encode())
    return matcher.try_consume_tokens(found) == len(found) and matcher.is_accepting()
