"""What one connection may bring over HTTP, and hold; each limit is a flag. `jaxpaged.core.limits` has the rest."""

from dataclasses import dataclass

from jaxpaged.core.limits import check_limits, limit


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes are bytes unless they say characters.

    Raises:
        ConfigError: a limit that cannot be; names the flag.
    """

    max_request_bytes: int = limit(2**23, "largest request body", least=1024)
    max_body_values: int = limit(2**20, "most values in a request body; reading it holds up the streams of others",
                                 least=64)
    max_body_containers: int = limit(2**16, "most keys, objects and lists in a request body, which take longer",
                                     least=64)
    max_body_quotes: int = limit(2**18, "most quotation marks in a request body", least=128)
    max_head_bytes: int = limit(2**16, "largest request line with its headers", least=1024)
    max_request_id_chars: int = limit(128, "longest request_id; a longer X-Request-Id is not sent back", least=1)
    max_tools: int = limit(128, "most tools of a chat")
    max_tool_name_chars: int = limit(256, "longest name of a tool", most=256)
    max_template_bytes: int = limit(2**30, "memory that the chat template may take for one conversation", least=2**24)
    max_detokenize_tokens: int = limit(2**20, "most ids that /detokenize takes")
    max_unread_tokens: int = limit(2**18, "most tokens, and alternatives to them, that a client may leave unread until "
                                          "its stream fails", least=64)
    max_connections: int = limit(0, "most open connections; 0 for as many as the process may have files", most=2**20)

    def __post_init__(self) -> None:
        check_limits(self)
