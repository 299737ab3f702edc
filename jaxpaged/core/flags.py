"""Makes the commands' flags from the fields of config dataclasses, so that each flag is defined once.

Only the standard library is imported here: `--help` and a typo answer at once.
"""

import argparse
import difflib
import json
import typing
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from jaxpaged.core.compatibility import UNSUPPORTED_CONFIG
from jaxpaged.core.errors import ConfigError
from jaxpaged.core.limits import LIMITS

GROUPS = {"model": "model", "memory": "device and memory", "scheduling": "scheduling", "parallel": "parallel",
          "server": "server", "limits": "limits and timeouts"}


class Parser(argparse.ArgumentParser):
    """Prints one line per error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def new_parser(prog: str, description: str) -> Parser:
    """A parser of `PROG [MODEL] [flags]` with only --help. Flags that are not given stay out of the namespace: the
    defaults are those of the dataclasses.
    """
    parser = Parser(prog=prog, allow_abbrev=False, argument_default=argparse.SUPPRESS, add_help=False,
                    usage=f"{prog} [MODEL] [flags]", description=description)
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action="help", help="show this text and exit")
    return parser


def add_flags(parser: Parser, configs: Sequence[type], leave_out: Collection[str] = ()) -> None:
    """Add a flag for each field with help text; its `metadata` has the group, the choices and other names."""
    sections = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    for config in configs:
        types = typing.get_type_hints(config)
        for item in fields(config):
            if item.name not in leave_out and "help" in item.metadata:
                _add_flag(sections[item.metadata["group"]], item, types[item.name])


def merge_model(given: dict[str, Any]) -> None:
    """Merge the positional MODEL into --model.

    Raises:
        ConfigError: both are given and differ.
    """
    positional = given.pop("model_argument", None)
    if positional is None:
        return
    if given.setdefault("model", positional) != positional:
        raise ConfigError(f"the model is given twice, as {positional} and as --model {given['model']}; leave one out")


def _add_flag(group: Any, item: Any, kind: Any) -> None:
    meta = item.metadata
    names = [flag_of(item.name), *(meta[key] for key in ("short", "alias") if key in meta)]
    help = meta["help"]
    if item.name in UNSUPPORTED_CONFIG:
        only = "on" if item.default is True else item.default
        help += f" (only {only} is supported so far)" if only else " (not supported yet)"
    elif item.default not in (None, False, (), "") and "default:" not in help:
        default = " ".join(item.default) if isinstance(item.default, tuple) else item.default
        default = f"{default:g}" if isinstance(default, float) else default
        help += f" (default: {'on' if default is True else default})"
    help = help.replace("%", "%%")
    options = [option for option in (typing.get_args(kind) or (kind,)) if option is not type(None)]
    if kind is bool:
        switch: Any = "store_true" if item.name.startswith("disable_") else argparse.BooleanOptionalAction
        group.add_argument(*names, dest=item.name, action=switch, help=help)
    elif typing.get_origin(kind) is tuple:
        group.add_argument(*names, dest=item.name, action=_Several, nargs="+", metavar=meta.get("metavar"), help=help)
    else:
        reader = _json_object if typing.get_origin(options[0]) is dict else options[0]
        metavar = meta.get("metavar", None if "choices" in meta else _metavar(options[0]))
        group.add_argument(*names, dest=item.name, type=reader, choices=meta.get("choices"), metavar=metavar, help=help)


class _Several(argparse.Action):
    """Values after one flag, after the same flag again, or as one JSON list."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        if len(values) == 1 and values[0].startswith("["):
            try:
                values = json.loads(values[0])
            except ValueError:
                values = None
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                raise argparse.ArgumentError(self, "neither plain values nor a JSON list of strings")
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *values))


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X"}.get(kind, "JSON" if typing.get_origin(kind) is dict else "TEXT")


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


_json_object.__name__ = "JSON object"


def flag_of(name: str) -> str:
    """The flag of a config field."""
    return "--" + name.replace("_", "-")


def parse_flags(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """The given values by field; an unknown flag ends the process with a hint at the nearest known one."""
    namespace, unknown = parser.parse_known_args([_with_dashes(item) for item in argv])
    if unknown:
        flags = [item for item in unknown if item.startswith("-")]
        if not flags:
            parser.error(f"unexpected argument {unknown[0]}: only one MODEL can be given")
        known = [name for action in parser._actions for name in action.option_strings
                 if action.help != argparse.SUPPRESS]
        wrong = flags[0].partition("=")[0]
        name = wrong.removeprefix("--").replace("-", "_")
        if name in {item.name for item in fields(LIMITS)}:
            parser.error(f"{wrong} is not a flag: this limit is fixed at {getattr(LIMITS, name):,}; docs/limits.md "
                         "lists the flags and the fixed limits")
        near = difflib.get_close_matches(wrong, known, 1)
        parser.error(f"unknown flag {wrong}" + (f"; did you mean {near[0]}?" if near else "; --help lists all flags"))
    return vars(namespace)


def _with_dashes(item: str) -> str:
    # accept --max_model_len, the spelling of the keyword argument
    name, equals, value = item.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else item
