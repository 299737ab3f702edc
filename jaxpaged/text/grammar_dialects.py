"""Grammars in the notations of Lark and of llama.cpp (GBNF), as llguidance reads them."""

import re

from jaxpaged.core.errors import NotSupportedError, RequestError
from jaxpaged.text.regex_constructs import translate_regex

_PARAM = "structured_outputs"
_GBNF = re.compile(r"^\s*[A-Za-z][\w-]*\s*::=", re.MULTILINE)
_GBNF_PIECES = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*")|(?P<set>\[(?:\\.|[^\]\\])*\])|#[^\n]*|(?P<repeat>\{[\d,\s]*\})'
    r"|(?P<name>[A-Za-z0-9_][\w-]*)(?P<defines>\s*::=)?", re.DOTALL)
_GBNF_CHAR = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|[\x00-\x1f\x7f]", re.DOTALL)
# What Lark has and llguidance does not.
_TEMPLATE = re.compile(r"^\s*[?!_]*[a-z]\w*\s*\{[^}\n]*\}[^:\n]*:", re.MULTILINE)
_STATEMENT = re.compile(r"^\s*(%[a-z]+)", re.MULTILINE)
_STATEMENTS = ("%import", "%ignore", "%llguidance")
_IMPORT = re.compile(r"^\s*%import\s+(?!common\b)(\S+)", re.MULTILINE)
_IMPORTED = re.compile(r"^[ \t]*%import\s+common\s*\.?\s*(\([^)]*\)|\w+)(?:[ \t]*->[ \t]*(\w+))?", re.MULTILINE)
# The order in which rules and terminals are tried has no meaning where all ways to read a text count.
_PRIORITY = re.compile(r"^(\s*[?!_]*[A-Za-z]\w*)\.-?\d+(\s*:)", re.MULTILINE)
_INVALID_REGEX = re.compile(r'invalid regex "(.*)" \(in ')
_ERROR = re.compile(r"(?:at )?(\d+)\((\d+)\): ([^\n]*)")


def to_lark(grammar: str) -> str:
    """A grammar in llguidance's dialect of Lark.

    Raises:
        RequestError: it is malformed, or uses what is not supported; the text names it.
    """
    if _GBNF.search(grammar):
        return _gbnf_to_lark(grammar)
    if _TEMPLATE.search(grammar):
        raise NotSupportedError("templates in a Lark grammar are not supported", param=_PARAM)
    for found in _STATEMENT.finditer(grammar):
        if found[1] not in _STATEMENTS:
            raise NotSupportedError(f"{found[1][:30]} in a Lark grammar is not supported", param=_PARAM)
    if foreign := _IMPORT.search(grammar):
        raise NotSupportedError(f"%import {foreign[1][:60]} is not supported, only %import common", param=_PARAM)
    return _IMPORTED.sub(_without_escaped_string, _PRIORITY.sub(r"\1\2", grammar))


def _without_escaped_string(found: re.Match[str]) -> str:
    """An import of common.ESCAPED_STRING as a definition: Lark's has no line ends inside, llguidance's has."""
    names = [name.strip() for name in found[1].strip("()").split(",")]
    if "ESCAPED_STRING" not in names:
        return found[0]
    rest = [name for name in names if name != "ESCAPED_STRING"]
    kept = f"%import common ({', '.join(rest)})\n" if rest else ""
    return f"{kept}{found[2] or 'ESCAPED_STRING'}: " + r'/"([^"\\\n]|\\[^\n])*"/'


def explain_grammar_error(error: str) -> str:
    """The compiler's complaint about a grammar as an error for a client."""
    found = _ERROR.match(error)
    where, what = (f" at line {found[1]}, column {found[2]}", found[3]) if found else ("", error.split("\n", 1)[0])
    if regex := _INVALID_REGEX.match(what):
        _, construct = translate_regex(regex[1])
        what = f"the regular expression /{regex[1][:60]}/ " + (
            f"has {construct}, which is not supported" if construct else "is invalid or not supported")
    return f"the grammar cannot be compiled{where}: {what[:120]}"


def _gbnf_to_lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    defined: dict[str, str] = {}
    used: dict[str, None] = {}
    for found in _GBNF_PIECES.finditer(grammar):
        name = found["name"]
        if name and found["defines"]:
            defined.setdefault(name, "root" if name == "root" else f"rule{len(defined)}")
        elif name:
            used[name] = None
    if "root" not in defined:
        raise RequestError("the GBNF grammar has no rule root", param=_PARAM)
    for name in used:
        if name not in defined:
            raise RequestError(f"the GBNF grammar uses {name[:60]} and does not define it", param=_PARAM)

    def rewrite(found: re.Match[str]) -> str:
        if found["name"]:  # the converter joins names that differ in case or hyphens
            return defined[found["name"]] + (found["defines"] or "")
        return _GBNF_CHAR.sub(_plain_char, found[0]) if found["text"] or found["set"] else found[0]

    try:
        return gbnf_to_lark(_GBNF_PIECES.sub(rewrite, grammar))
    except Exception as error:  # of several kinds; the first line says where
        raise RequestError(f"the GBNF grammar is malformed: {str(error)[:120]}", param=_PARAM) from None


def _plain_char(found: re.Match[str]) -> str:
    """A character as both notations write it."""
    code = found[1] or found[2]
    if code is None and found[3] is not None:
        return found[3] if found[3] == "/" else found[0]
    number = int(code, 16) if code else ord(found[0])
    return f"\\x{number:02x}" if number < 0x80 else chr(number)
