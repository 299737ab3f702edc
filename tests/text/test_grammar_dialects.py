"""Grammars, regular expressions and choices as the field writes them."""

import pytest

from jaxpaged.core.errors import RequestError
from jaxpaged.core.sampling_params import StructuredOutputsParams
from jaxpaged.text.structured_outputs import GrammarCompiler
from tests.support.random_walk import accepts

COMPILER = GrammarCompiler()
COMMENTED = """
# a calculator
?start: sum            // the root
?sum: product | sum "+" product -> add
?product: atom | product "*" atom -> mul
atom: NUMBER -> number | "-" atom | "(" sum ")"
%import common.NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
"""
GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    "the root inlined": ('?start: "a" | "b"', ["a", "b"], ["c"]), "tokens kept": ('!start: "a"i', ["a", "A"], ["b"]),
    "a calculator": (COMMENTED, ["1 + 2*(3+-4)", "7"], ["1 +", "+"]),
    "several imports": ("start: INT WORD\n%import common (INT, WORD)", ["12ab"], ["ab"]),
    "an import renamed": ("start: N\n%import common.INT -> N", ["5"], ["a"]),
    "strings": ("start: ESCAPED_STRING\n%import common.ESCAPED_STRING", [r'"a\"b\\n"', '""'], ['"a\nb"', '"a"b"']),
    "strings renamed": ("start: S\n%import common.ESCAPED_STRING -> S", ['"a"'], ['"\n"']),
    "strings and words": ("start: WORD ESCAPED_STRING\n%import common (ESCAPED_STRING, WORD)\n", ['ab"a"'], ['a"\n"']),
    "flags": ("start: /a.c/is", ["A\nc"], ["ab"]), "a range": ('start: "a".."c"+', ["abc"], ["d"]),
    "repetitions": ('start: "a"~2 ["b"] "c"~1..2', ["aac", "aabcc"], ["ac", "aaccc"]),
    "priorities": ('start: A | B\nA.2: "x"\nB.-1: /[x-z]/', ["x", "y"], ["a"]),
    "a rule with a priority": ('start: a\n?a.3: "x"', ["x"], ["y"]),
    "an indented start": ('  start: "a"', ["a"], ["b"]), "escapes": (r'start: "\x41\u00e4\n\""', ['Aä\n"'], ["A"]),
    "GBNF": ('root ::= "yes" | "no"', ["yes", "no"], ["maybe"]),
    "GBNF over lines": ('# c\nroot ::= (\n  item |\n  "-"\n){1,2} # d\nitem ::= [a-z]+ "\\n"?\n', ["ab\n-", "-"], ["",
        "---"]),
    "GBNF escapes": (r'root ::= "\u00e4\U0001F600\x41" [\u0041-\u0043\]"]+ "\/"', ['ä😀AB]"/'], ["äA/"]),
    "GBNF control characters": ('root ::= "\x7f" [^"\\\\\\x7F\\x00-\\x1F]*', ["\x7fab"], ['\x7f"']),
    "GBNF names alike": ('root ::= camelCase camel-case start\ncamelCase ::= "x"\ncamel-case ::= "y"\nstart ::= "z"',
                         ["xyz"], ["xxz"]),
    "GBNF recursion": ('root ::= value\nvalue ::= "1" | "(" value ")"', ["((1))"], ["((1)"]),
}
REFUSED = {
    "a template": ('_sep{x, s}: x (s x)*\nstart: _sep{"a", ","}', "templates"), "%declare": ('%declare X\nstart: X',
        "%declare"),
    "%extend": ('%extend start: "a"\nstart: "b"', "%extend"), "%override": ('%override start: "a"', "%override"),
    "a foreign import": ("%import python.NAME\nstart: NAME", "%import python.NAME"),
    "a relative import": ("%import .a.B\nstart: B", r"%import \.a\.B"), "an unknown name": ("start: what",
        "line 1, column 8.*what"),
    "no start": ('value: "a"', "start"), "a look-behind": ('start: "x"\n | /(?<=a)b/', "line 1.*has a look-behind"),
    "an unknown GBNF rule": ("root ::= x-y", "uses x-y"), "no GBNF root": ('a ::= "b"', "no rule root"),
    "GBNF of another kind": ('root ::= !"a"', "malformed"), "text": ("hello", "line 1"),
        "an open string": ('start: "a', "line 1"),
}
REGEXES: dict[str, tuple[list[str], list[str]]] = {
    "^[0-9]+$": (["12"], ["a", ""]), "[0-9]+?x": (["1x", "12x"], ["x"]), "(?i)abc": (["ABC"], ["ab"]),
        r"\d{3}-\d{4}": (["555-1234"], []),
    "^a$|^b$": (["a", "b"], ["ab"]), r"\A\d+\Z": (["7"], ["a"]), "(?P<y>a)(?<z>b)(?:c)": (["abc"], ["ab"]),
        "a/b": (["a/b"], []),
    "[[:a]+[[:alpha:]]": (["[:ab"], ["b1"]),
    "[&&[]": (["&", "["], ["&["]), "x{": (["x{"], ["x"]), r"[\d-]+\<\/": (["1-2</"], ["<"]), ".*": (["", "a"], ["\n"]),
    r"\p{Lu}\p{Ll}{2}\P{L}": (["Éaß1"], ["éab1", "Éabc"]), r"\u{1F600}\x{41}\pL": (["😀Aé"], ["😀A1"]),
    r"[\b]\0[\0]\é": (["\b\0\0é"], ["b00é"]), r"[\w-.]+@([\w-]+\.)+[\w-]{2,4}": (["a.b-c@d-e.fg"], ["a,b@c.de"]),
    r"[a-\d][\p{Lu}-z][^\s-]": (["-zb", "a-b", "5Éb"], ["b-b", "az-", "ay5"]),
    r".\s": (["\r\x85", "a "], ["\n ", "aa"]),
}
CONSTRUCTS = {"(?=a)b": "a look-ahead", "(?!a)b": "a look-ahead", "(?<=a)b": "a look-behind",
    "(?<!a)b": "a look-behind",
              r"(a)\1": "a back reference", r"(?P<n>a)(?P=n)": "a back reference", r"(?<n>a)\k<n>": "a back reference",
              r"\bfoo": "a word boundary", "(?>a)b": "an atomic group", "a++b": "a possessive quantifier",
              r"\cA": "a control",
              "(a)?(?(1)b|c)": "a conditional", "a^b": "an assertion", "[+--]": "two hyphens"}


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars(name: str) -> None:
    text, good, bad = GRAMMARS[name]
    grammar = COMPILER.grammar(StructuredOutputsParams(grammar=text))
    assert [accepts(grammar, item) for item in good + bad] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_grammar_cannot_use_is_named(name: str) -> None:
    text, match = REFUSED[name]
    with pytest.raises(RequestError, match=match) as caught:
        COMPILER.grammar(StructuredOutputsParams(grammar=text))
    assert caught.value.param == "structured_outputs" and len(caught.value.message) < 220


@pytest.mark.parametrize("pattern", REGEXES)
def test_regular_expressions_match_the_whole_text(pattern: str) -> None:
    good, bad = REGEXES[pattern]
    grammar = COMPILER.grammar(StructuredOutputsParams(regex=pattern))
    assert [accepts(grammar, item) for item in good + bad] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize("pattern", CONSTRUCTS)
def test_constructs_of_other_engines_are_named_with_their_pattern(pattern: str) -> None:
    for wanted in ({"regex": pattern}, {"json": {"type": "string", "pattern": pattern}}):
        with pytest.raises(RequestError) as caught:
            COMPILER.grammar(StructuredOutputsParams(**wanted))
        assert CONSTRUCTS[pattern] in caught.value.message
    with pytest.raises(RequestError) as caught:
        COMPILER.grammar(StructuredOutputsParams(regex=pattern))
    assert repr(pattern) in caught.value.message


def test_choices_of_every_kind_of_character() -> None:
    texts = ["\x7f", "\x00", "a\tb\r\n", '"\\/', "//", "#", "\u2028\x85", "\ufeff", "😀", "{}", " ", "%ignore",
        "\U0010ffff"]
    grammar = COMPILER.grammar(StructuredOutputsParams(choice=texts))
    assert all(accepts(grammar, text) for text in texts) and not accepts(grammar, "x")
    all_in_one = "".join(map(chr, [*range(0x100), *range(0x100, 0xd800, 97), *range(0xe000, 0x10000, 211)]))
    assert accepts(COMPILER.grammar(StructuredOutputsParams(choice=[all_in_one])), all_in_one)


def test_half_a_character_is_no_choice() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        COMPILER.grammar(StructuredOutputsParams(choice=["a", "\ud83d"]))
