"""Flags of the server, made from the fields of its two configs, so that each is defined once.

Only the standard library is imported here: `--help` and a typo answer at once.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jaxpaged import __version__
from jaxpaged.core.compatibility import OLD_FLAGS
from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import ConfigError
from jaxpaged.core.flags import Parser, add_flags, flag_of, merge_model, new_parser, parse_flags
from jaxpaged.server.parsers.tool_calls import TOOL_PARSERS

MAX_SECONDS = 10**6  # of a timeout: the system's waits count milliseconds in 32 bits
BODIES = 8  # bodies of the largest size that may be half received at once


def _flag(default: Any, help: str, *, group: str = "server", show: bool = True, **more: Any) -> Any:
    return field(default=default, repr=show, metadata={"help": help, "group": group, **more})


def _seconds(default: float, help: str) -> Any:
    return _flag(default, help, group="limits", metavar="SECONDS")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All settings of the HTTP side; `EngineConfig` has the engine's. Times are seconds, sizes bytes.

    Raises:
        ConfigError: a value that cannot work, or one that is not supported yet; the text says what to change.
    """

    host: str = _flag("0.0.0.0", "address to listen on; 127.0.0.1 for this machine only")
    port: int = _flag(8000, "port to listen on; 0 for any free one")
    served_model_name: tuple[str, ...] = _flag((), "names that requests may use for the model (default: MODEL)",
                                               metavar="NAME")
    api_key: tuple[str, ...] = _flag((), "accepted bearer tokens; with one, every route but /health, /ping and the "
                                     "page at / requires it", metavar="KEY", show=False)
    ssl_keyfile: str | None = _flag(None, "private key for https", metavar="FILE")
    ssl_certfile: str | None = _flag(None, "certificate for https", metavar="FILE")
    allowed_origins: tuple[str, ...] = _flag(("*",), "origins of web pages that may call the API, or a JSON list",
                                             metavar="ORIGIN")
    root_path: str = _flag("", "path prefix under which a proxy serves the API", metavar="PATH")
    uvicorn_log_level: str = _flag("info", "log level of the HTTP server",
                                   choices=("critical", "error", "warning", "info", "debug", "trace"))
    disable_access_log: bool = _flag(False, "no log line for each HTTP request", alias="--disable-uvicorn-access-log")
    enable_log_requests: bool = _flag(False, "log the sizes and sampling parameters of each request, never its texts")
    disable_log_stats: bool = _flag(False, "no statistics in the log every 10 seconds")
    enable_reset_prefix_cache: bool = _flag(False, "serve POST /reset_prefix_cache")
    enable_auto_tool_choice: bool = _flag(False, "let the model decide to call tools; needs --tool-call-parser")
    tool_call_parser: str | None = _flag(None, "format of the model's tool calls; Qwen writes hermes, too",
                                         choices=tuple(TOOL_PARSERS))
    max_connections: int = _flag(0, "maximum number of open connections; 0: as many as the process may open files",
                                 group="limits")
    max_request_bytes: int = _flag(2**23, "maximum size of a request body; all that are still being received may "
                                   f"together take {BODIES} times that", group="limits")
    body_timeout: float = _seconds(60.0, "time for a client to send a request's body")
    head_timeout: float = _seconds(30.0, "time for a client to send a request's line and headers, and for a "
                                  "TLS handshake before")
    write_timeout: float = _seconds(300.0, "time for a client to read on while an answer waits for it")
    keep_alive_timeout: int = _seconds(65, "time that an idle connection stays open")
    chat_template_timeout: float = _seconds(10.0, "time for the chat template to render one conversation")
    structured_outputs_timeout: float = _seconds(2.0, "time to compile one schema, regular expression or grammar")
    stream_keep_alive: float = _seconds(15.0, "idle streams receive an SSE keep-alive comment this often; 0: never")
    engine_timeout: float = _seconds(60.0, "time without a message from the engine until running requests fail and "
                                     "/health answers 503")
    exit_on_engine_timeout: bool = _flag(False, "end with exit code 1 after --engine-timeout, for a supervisor to "
                                         "start the server again", group="limits")
    shutdown_timeout: float = _seconds(30.0, "time for running requests to finish after SIGTERM or SIGINT")

    def __post_init__(self) -> None:
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be from 0 to 65535, not {self.port!r}")
        if not all(self.api_key):
            raise ConfigError("--api-key must not be empty; leave it out to serve without a key")
        if not all(self.served_model_name):
            raise ConfigError("--served-model-name must not be empty")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile must be given together")
        for name in ("ssl_keyfile", "ssl_certfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag_of(name)}: there is no file {path}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError("--root-path must begin with a slash and not end with one")
        for name, minimum, maximum in (("max_request_bytes", 1024, 2**40), ("max_connections", 0, 2**20)):
            value = getattr(self, name)
            if type(value) is not int or not minimum <= value <= maximum:
                raise ConfigError(f"{flag_of(name)} must be an integer from {minimum} to {maximum}, not {value!r}")
        for name in ("shutdown_timeout", "stream_keep_alive"):
            if not 0 <= getattr(self, name) <= MAX_SECONDS:
                raise ConfigError(f"{flag_of(name)} must be from 0 to {MAX_SECONDS} seconds, not {getattr(self, name)}")
        for name in ("engine_timeout", "head_timeout", "body_timeout", "write_timeout", "keep_alive_timeout",
                     "chat_template_timeout", "structured_outputs_timeout"):
            if not 0 < getattr(self, name) <= MAX_SECONDS:
                raise ConfigError(f"{flag_of(name)} must be above 0 and at most {MAX_SECONDS} seconds, not "
                                  f"{getattr(self, name)}")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError("--enable-auto-tool-choice needs --tool-call-parser: hermes, llama3_json or mistral")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The parsed command line, and warnings to log once."""

    server: ServerConfig
    engine: EngineConfig
    warnings: tuple[str, ...] = ()


def parse_args(argv: Sequence[str], prog: str = "python -m jaxpaged.server") -> Arguments:
    """Parse the flags.

    Args:
        argv: the arguments after the program's name. `--config FILE.yaml` adds flags from a file;
            those in `argv` take precedence.
        prog: what the user typed, for help and errors.

    Raises:
        SystemExit: 0 after --help or --version; 2 after one line that names the flag at fault.
    """
    parser = _make_parser(prog)
    given = parse_flags(parser, argv)
    try:
        path = given.pop("config", None)
        if path is not None:
            from_file = parse_flags(parser, _flags_of_file(path))
            if "config" in from_file:
                raise ConfigError(f"{path} must not name another --config file")
            merge_model(from_file)
            merge_model(given)
            old = from_file.pop("old_flags", []) + given.pop("old_flags", [])
            given = {**from_file, **given, "old_flags": old}
        merge_model(given)
        warnings = tuple(dict.fromkeys(given.pop("old_flags", [])))
        engine = EngineConfig(**fields_of(EngineConfig, given))
        server = ServerConfig(**fields_of(ServerConfig, given))
    except ConfigError as error:
        parser.error(str(error))
    return Arguments(server, engine, warnings)


def fields_of(config: type, given: dict[str, Any]) -> dict[str, Any]:
    """The given values of a config's own fields."""
    names = {item.name for item in fields(config)}
    return {name: value for name, value in given.items() if name in names}


class _OldFlag(argparse.Action):
    """A flag without effect: one warning."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        warnings = [*getattr(namespace, "old_flags", []), f"{option_string} has no effect: {self.const}"]
        namespace.old_flags = warnings


def _make_parser(prog: str) -> Parser:
    parser = new_parser(prog, "Serve a model over the OpenAI protocol; without MODEL, a small default one.")
    parser.add_argument("-v", "--version", action="version", version=f"jaxpaged {__version__}",
                        help="show the version and exit")
    parser.add_argument("--config", metavar="FILE.yaml", help="file with flags, which the command line overrides")
    add_flags(parser, (EngineConfig, ServerConfig))
    for name, (takes_value, reason) in OLD_FLAGS.items():
        parser.add_argument(name, action=_OldFlag, nargs=None if takes_value else 0, const=reason,
                            help=argparse.SUPPRESS)
    return parser


def _flags_of_file(path: str) -> list[str]:
    import yaml  # slow to import, needed only here

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"--config {path} cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"--config {path} is not valid YAML{where}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(f"--config {path} must have one flag per line, such as `port: 8000`")
    flags: list[str] = []
    for name, value in content.items():
        flag = flag_of(name.removeprefix("--"))
        if value is True:
            flags.append(flag)
        elif value is False:
            flags += [] if name.startswith("disable") else ["--no-" + flag.removeprefix("--")]
        elif isinstance(value, list):
            flags.append(f"{flag}={json.dumps([str(item) for item in value])}")
        elif isinstance(value, dict):
            flags.append(f"{flag}={json.dumps(value)}")
        elif value is not None:
            flags.append(f"{flag}={value}")
    return flags


