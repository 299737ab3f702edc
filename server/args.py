"""Flags of the server: read from the fields of its configs and their limits, so that each has one home.

Only the standard library is imported here: `--help` and a typo answer at once.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jaxpaged import __version__
from jaxpaged.core.config import NOT_SUPPORTED, EngineConfig
from jaxpaged.core.errors import ConfigError
from jaxpaged.core.flags import GROUPS, Parser, add_flags, flag_of, new_parser, parse_flags, settle_model
from jaxpaged.core.limits import RequestLimits
from jaxpaged.server.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from jaxpaged.server.protocol.http_limits import HttpLimits

_OLD_SWITCHES = {
    "--use-v2-block-manager": "there is one block manager",
    "--enable-dynamic-batching": "continuous batching is always on",
    "--use-contiguous-batching": "continuous batching is always on",
    "--disable-log-requests": "requests are logged only with --enable-log-requests",
    "--trust-remote-code": "code in model folders is never run",
}
_OLD_OPTIONS = {"--max-paddings": "use --max-num-batched-tokens to bound the size of a step"}


def _flag(default: Any, help: str, *, show: bool = True, **more: Any) -> Any:
    return field(default=default, repr=show, metadata={"help": help, "group": "server", **more})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the HTTP side is told; EngineConfig holds the rest.

    Times are seconds, sizes bytes.

    Raises:
        ConfigError: a value that cannot work, or one that is not supported yet; the text says what to change.
    """

    host: str = _flag("0.0.0.0", "address to listen on; 127.0.0.1 for this machine alone")
    port: int = _flag(8000, "port to listen on; 0 takes a free one")
    served_model_name: tuple[str, ...] = _flag((), "names that requests may use for the model (default: as given)",
                                               metavar="NAME")
    api_key: tuple[str, ...] = _flag((), "keys of which requests must send one as a bearer token; every route "
                                     "but /health, /ping and the page at / asks for it", metavar="KEY", show=False)
    ssl_keyfile: str | None = _flag(None, "private key for https", metavar="FILE")
    ssl_certfile: str | None = _flag(None, "certificate for https", metavar="FILE")
    allowed_origins: tuple[str, ...] = _flag(("*",), "origins of web pages that may call the API, or a JSON list",
                                             metavar="ORIGIN")
    root_path: str = _flag("", "path prefix under which a proxy serves the API", metavar="PATH")
    shutdown_timeout: float = _flag(30.0, "seconds that running requests get to finish after SIGTERM or SIGINT",
                                    metavar="SECONDS")
    engine_timeout: float = _flag(60.0, "seconds without a sign of life from the engine until /health turns 503",
                                  metavar="SECONDS")
    body_timeout: float = _flag(60.0, "seconds that a client gets to send a request's body", metavar="SECONDS")
    keep_alive_timeout: int = _flag(65, "seconds that an idle connection stays open", metavar="SECONDS")
    stream_keep_alive: float = _flag(15.0, "seconds without news after which a stream gets a comment, so that neither "
                                     "clients nor proxies give up on a long prompt; 0 for none", metavar="SECONDS")
    uvicorn_log_level: str = _flag("info", "log level of the HTTP server",
                                   choices=("critical", "error", "warning", "info", "debug", "trace"))
    disable_access_log: bool = _flag(False, "no log line for each HTTP request", alias="--disable-uvicorn-access-log")
    enable_log_requests: bool = _flag(False, "log the sizes and sampling parameters of each request, never its text")
    disable_log_stats: bool = _flag(False, "no statistics in the log every 10 seconds")
    enable_reset_prefix_cache: bool = _flag(False, "offer POST /reset_prefix_cache")
    chat_template_timeout: float = _flag(10.0, "seconds that the chat template may take on one conversation",
                                         metavar="SECONDS")
    structured_outputs_timeout: float = _flag(2.0, "seconds that compiling a schema, regular expression or grammar "
                                                   "may take", metavar="SECONDS")
    enable_auto_tool_choice: bool = _flag(False, "let the model call tools of its own accord; needs --tool-call-parser")
    tool_call_parser: str | None = _flag(None, "how the model writes tool calls; hermes is Qwen's way too",
                                         choices=tuple(TOOL_PARSERS))
    reasoning_parser: str | None = _flag(None, "how the model writes its reasoning: in <think> tags, always "
                                         "(deepseek_r1) or where it opens them (qwen3)", choices=REASONING_PARSERS)
    limits: HttpLimits = field(default_factory=HttpLimits)

    def __post_init__(self) -> None:
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be from 0 to 65535, not {self.port!r}")
        if not all(self.api_key):
            raise ConfigError("--api-key must not be empty; leave it out to serve without a key")
        if not all(self.served_model_name):
            raise ConfigError("--served-model-name must not be empty")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together; give both or neither")
        for name in ("ssl_keyfile", "ssl_certfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag_of(name)}: there is no file {path}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError("--root-path must begin with a slash and not end with one")
        for name in ("shutdown_timeout", "stream_keep_alive"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{flag_of(name)} must be at least 0 seconds, not {getattr(self, name)}")
        for name in ("engine_timeout", "body_timeout", "keep_alive_timeout", "chat_template_timeout",
                     "structured_outputs_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{flag_of(name)} must be above 0 seconds, not {getattr(self, name)}")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError("--enable-auto-tool-choice needs --tool-call-parser: hermes, llama3_json or mistral")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line, read: what each side is told, and warnings to log once."""

    server: ServerConfig
    engine: EngineConfig
    warnings: tuple[str, ...] = ()


def parse_args(argv: Sequence[str], prog: str = "python -m jaxpaged.server") -> Arguments:
    """Read the flags.

    Args:
        argv: without the program's name. `--config FILE.yaml` adds flags from a file; those of `argv` win.
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
            settle_model(from_file)
            settle_model(given)
            old = from_file.pop("old_flags", []) + given.pop("old_flags", [])
            given = {**from_file, **given, "old_flags": old}
        settle_model(given)
        warnings = tuple(dict.fromkeys(given.pop("old_flags", [])))
        engine = EngineConfig(**_those_of(EngineConfig, given), limits=RequestLimits(**_those_of(RequestLimits, given)))
        server = ServerConfig(**_those_of(ServerConfig, given), limits=HttpLimits(**_those_of(HttpLimits, given)))
    except ConfigError as error:
        parser.error(str(error))
    return Arguments(server, engine, warnings)


def _those_of(config: type, given: dict[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(config)}
    return {name: value for name, value in given.items() if name in names}


class _OldFlag(argparse.Action):
    """A flag of older releases: no effect, one warning."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        warnings = [*getattr(namespace, "old_flags", []), f"{option_string} has no effect: {self.const}"]
        namespace.old_flags = warnings


def _make_parser(prog: str) -> Parser:
    parser = new_parser(prog, "Serve a model over the OpenAI protocol; without a model, a small embedded one.")
    parser.add_argument("-v", "--version", action="version", version=f"jaxpaged {__version__}",
                        help="show the version and exit")
    parser.add_argument("--config", metavar="FILE.yaml", help="file with flags; those of the command line win")
    add_flags(parser, (EngineConfig, ServerConfig, RequestLimits, HttpLimits), GROUPS, NOT_SUPPORTED)
    for name, reason in _OLD_SWITCHES.items():
        parser.add_argument(name, action=_OldFlag, nargs=0, const=reason, help=argparse.SUPPRESS)
    for name, reason in _OLD_OPTIONS.items():
        parser.add_argument(name, action=_OldFlag, const=reason, help=argparse.SUPPRESS)
    return parser


def _flags_of_file(path: str) -> list[str]:
    import yaml  # a dependency of huggingface_hub; slow to import, needed only here

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
        raise ConfigError(f"--config {path} must hold one flag a line, such as `port: 8000`")
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


