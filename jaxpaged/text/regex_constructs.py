"""Regular expressions of ECMA and Python, written as llguidance reads them, and the constructs that it lacks."""

import re

# What a pattern consists of, as far as it matters here. Later alternatives see what earlier ones have left.
_PIECES = re.compile(r"""
    (?P<reference> \\[1-9] | \\k[<{'] | \(\?P= )
  | (?P<boundary>  \\[bB] )
  | (?P<control>   \\c )
  | (?P<end>       \\Z )
  | (?P<angle>     \\[<>] )
  | (?P<escape>    \\. )
  | (?P<ahead>     \(\?[=!] )
  | (?P<behind>    \(\?<[=!] )
  | (?P<atomic>    \(\?> )
  | (?P<condition> \(\?\( )
  | (?P<possessive> (?: [*+?] | \{[0-9]+(?:,[0-9]*)?\} ) \+ )
  | (?P<repeat>    \{[0-9]+(?:,[0-9]*)?\} )
  | (?P<brace>     \{ )
  | (?P<hyphens>   \[ (?: \\. | [^\]\\] )* -- )
  | (?P<set>       \[\^?\]? )
""", re.VERBOSE | re.DOTALL)
_SET_PIECES = re.compile(
    r"(?P<close>\])|(?P<escape>\\.)|(?P<open>\[(?!:))|(?P<operator>&&|~~)", re.DOTALL)

_UNSUPPORTED = {"reference": "a back reference", "boundary": "a word boundary", "control": "a control escape",
                "ahead": "a look-ahead", "behind": "a look-behind", "atomic": "an atomic group",
                "condition": "a conditional", "possessive": "a possessive quantifier",
                "hyphens": "two hyphens in a character class"}


def translate_regex(pattern: str) -> tuple[str, str | None]:
    """A pattern as llguidance reads it, and the first construct that it lacks, such as "a look-ahead, (?=", or None.

    Braces, brackets and operators are escaped where only Rust's syntax gives them a meaning.
    """
    out: list[str] = []
    position = 0
    while found := _PIECES.search(pattern, position):
        out.append(pattern[position:found.start()])
        position = found.end()
        kind, text = found.lastgroup, found[0]
        if kind in _UNSUPPORTED:
            return pattern, f"{_UNSUPPORTED[kind]}, {text[-12:]}"
        if kind == "set":
            body, position = _translate_set(pattern, position)
            out.append(text + body)
        else:
            out.append({"end": r"\z", "angle": text[1:], "brace": r"\{"}.get(kind or "", text))
    return "".join([*out, pattern[position:]]), None


def _translate_set(pattern: str, position: int) -> tuple[str, int]:
    """The rest of a character class, and where the pattern goes on."""
    out: list[str] = []
    while found := _SET_PIECES.search(pattern, position):
        out.append(pattern[position:found.start()])
        position, text = found.end(), found[0]
        if found.lastgroup == "operator":
            text = f"{text[0]}\\{text[1]}"
        elif text in (r"\<", r"\>"):
            text = text[1:]
        out.append(r"\[" if found.lastgroup == "open" else text)
        if found.lastgroup == "close":
            return "".join(out), position
    return "".join([*out, pattern[position:]]), len(pattern)  # not closed: the compiler says so
