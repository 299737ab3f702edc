"""Regular expressions of ECMA and Python, written as llguidance reads them, and the constructs that it lacks."""

import re

# What a pattern consists of, as far as it matters here. Later alternatives see what earlier ones have left.
_PIECES = re.compile(r"""
    (?P<reference> \\[1-9] | \\k[<{'] | \(\?P= )
  | (?P<boundary>  \\[bB] )
  | (?P<control>   \\c )
  | (?P<end>       \\Z )
  | (?P<braced>    \\[pPux]\{[^}]{0,64}\} )
  | (?P<zero>      \\0(?![0-9]) )
  | (?P<itself>    \\(?: [<>] | [^\x00-\x7f] ) )
  | (?P<space>     \\[sS] )
  | (?P<escape>    \\. )
  | (?P<dot>       \. )
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
_SET_PIECES = re.compile(r"""
    (?P<close>    \] )
  | (?P<class>    \\ (?: [dDsSwW] | [pP](?:\{[^}]{0,64}\}|.) ) ) (?P<hyphen>-(?!\]))?  # which is no range's
  | (?P<literal>  -(?=\\[dDsSwWpP]) )
  | (?P<zero>     \\0(?![0-9]) )
  | (?P<backspace> \\b )
  | (?P<itself>   \\(?: [<>] | [^\x00-\x7f] ) )
  | (?P<escape>   \\. )
  | (?P<open>     \[(?!:\^?[a-z]{4,6}:\]) )
  | (?P<operator> && | ~~ )
""", re.VERBOSE | re.DOTALL)

# What patterns of JSON schemas mean by a dot and by white space in ECMA's dialect and in Python's alike, so that
# whatever reads the values finds that they match. Rust's own have carriage returns, or U+0085.
_DOT = r"[^\n\r\u2028\u2029]"
_SPACES = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ONLY_SOMEWHERE = r"\x1c-\x1f\x85\ufeff"
_DOT_IS_ALL = re.compile(r"\(\?[a-zA-Z]*s")

_UNSUPPORTED = {"reference": "a back reference", "boundary": "a word boundary", "control": "a control escape",
                "ahead": "a look-ahead", "behind": "a look-behind", "atomic": "an atomic group",
                "condition": "a conditional", "possessive": "a possessive quantifier",
                "hyphens": "two hyphens in a character class"}


def translate_regex(pattern: str, *, of_schema: bool = False) -> tuple[str, str | None]:
    """A pattern as llguidance reads it, and the first construct that it lacks, such as "a look-ahead, (?=", or None.

    Braces, brackets and operators are escaped where only Rust's syntax gives them a meaning.

    Args:
        of_schema: it is a JSON schema's, and so in ECMA's dialect; otherwise it is in Python's.
    """
    out: list[str] = []
    position = 0
    dot = _DOT if of_schema and not _DOT_IS_ALL.search(pattern) else "."
    spaces = {r"\s": f"[{_SPACES}]", r"\S": rf"[^\s{_ONLY_SOMEWHERE}]"} if of_schema else {}
    while found := _PIECES.search(pattern, position):
        out.append(pattern[position:found.start()])
        position = found.end()
        kind, text = found.lastgroup, found[0]
        if kind in _UNSUPPORTED:
            return pattern, f"{_UNSUPPORTED[kind]}, {text[-12:]}"
        if kind == "set":
            body, position = _translate_set(pattern, position, text.startswith("[^"), of_schema)
            out.append(text + body)
        elif kind == "itself":
            out.append(text[1:])
        elif kind == "space":
            out.append(spaces.get(text, text))
        else:
            out.append({"end": r"\z", "brace": r"\{", "zero": r"\x00", "dot": dot}.get(kind or "", text))
    return "".join([*out, pattern[position:]]), None


def _translate_set(pattern: str, position: int, negated: bool, of_schema: bool) -> tuple[str, int]:
    """The rest of a character class, and where the pattern goes on."""
    out: list[str] = []
    spaces: dict[str, str] = {}
    if of_schema:
        spaces = ({r"\s": rf"\s{_ONLY_SOMEWHERE}", r"\S": rf"\S{_ONLY_SOMEWHERE}"} if negated
                  else {r"\s": _SPACES, r"\S": rf"[^\s{_ONLY_SOMEWHERE}]"})
    while found := _SET_PIECES.search(pattern, position):
        out.append(pattern[position:found.start()])
        position, text = found.end(), found[0]
        if found["close"]:
            return "".join([*out, text]), position
        if found["class"]:
            text = spaces.get(found["class"], found["class"]) + r"\-" * bool(found["hyphen"])
        elif found["itself"]:
            text = text[1:]
        elif found["operator"]:
            text = f"{text[0]}\\{text[1]}"
        else:
            text = {"literal": r"\-", "zero": r"\x00", "backspace": r"\x08", "open": r"\["}.get(
                found.lastgroup or "", text)
        out.append(text)
    return "".join([*out, pattern[position:]]), len(pattern)  # not closed: the compiler says so
