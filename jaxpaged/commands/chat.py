"""`jaxpaged chat`: talk to a server from the terminal; answers appear as they are generated."""

import http.client
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from jaxpaged.core.errors import ConfigError, JaxpagedError
from jaxpaged.core.flags import Parser

HELP = "/reset forgets the conversation, /undo its last turn; Ctrl-C ends an answer, Ctrl-D or /quit the program"
TIMEOUT = 600.0  # seconds without a word from the server
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class ServerError(JaxpagedError):
    """The server cannot be reached, or refuses a request."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpaged.chat") -> int:
    """Run the command.

    Returns:
        0 at the end of the input; 1 if the server cannot be reached, or a single message is refused.
    """
    parser = Parser(prog=prog, allow_abbrev=False, description="Chat with a model on a server, jaxpaged's or another "
                    f"of OpenAI's protocol. {HELP}.")
    parser.add_argument("--url", default="http://localhost:8000/v1", help="of the server (default: %(default)s)")
    parser.add_argument("--model-name", metavar="NAME", help="the model (default: the first that the server names)")
    parser.add_argument("--api-key", metavar="KEY", help="if the server asks for one")
    parser.add_argument("--system-prompt", metavar="TEXT", help="how the model is to behave")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="print the answer to one message, and end")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the longest answer")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 for the most likely answer")
    given = parser.parse_args(argv)
    try:
        server = Server(given.url, given.api_key)
        model = given.model_name or server.first_model()
        options = {"max_tokens": given.max_tokens, "temperature": given.temperature}
        chat = Chat(server, {"model": model} | {key: value for key, value in options.items() if value is not None},
                    given.system_prompt)
        if given.quick is not None:
            chat.say(given.quick)
            return 0
        print(f"{model} at {given.url}\n{HELP}", file=sys.stderr)
        talk(chat)
    except KeyboardInterrupt:
        return 130
    except JaxpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def talk(chat: "Chat") -> None:
    """Read lines until the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  lines can be edited, and called back
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            return
        if line == "/quit":
            return
        if line == "/reset":
            chat.forget(everything=True)
        elif line == "/undo":
            chat.forget(everything=False)
        elif line:
            try:
                chat.say(line)
            except ServerError as error:
                print(f"error: {error}", file=sys.stderr)
            except KeyboardInterrupt:
                print(" ...")


class Chat:
    """A conversation, which the server gets whole with each message.

    Args:
        options: more fields of each request.
        system: the first message, if there is one.
    """

    def __init__(self, server: "Server", options: dict[str, Any], system: str | None) -> None:
        self._server, self._options = server, options
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)

    def say(self, text: str) -> None:
        """Send a message and print the answer. A message without any answer is not kept; half an answer is."""
        self._messages.append({"role": "user", "content": text})
        answer, thinking = "", False
        try:
            for kind, piece in self._server.stream(self._options | {"messages": self._messages}):
                if (kind == "reasoning") != thinking:
                    thinking = kind == "reasoning"
                    print((DIM if thinking else f"{PLAIN}\n\n") if sys.stdout.isatty() else "\n\n" * (not thinking),
                          end="")
                print(piece, end="", flush=True)
                answer += piece * (kind == "content")
        finally:
            if thinking and sys.stdout.isatty():
                print(PLAIN, end="")
            if answer:
                self._messages.append({"role": "assistant", "content": answer})
            else:
                self._messages.pop()
        print()

    def forget(self, *, everything: bool) -> None:
        """Forget all messages, or the last and its answer."""
        self._messages[len(self._start) if everything else max(len(self._start), len(self._messages) - 2):] = []


class Server:
    """A server of OpenAI's protocol.

    Args:
        url: its base address, such as http://localhost:8000/v1.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"--url must be an address such as http://localhost:8000/v1, not {url}")
        self._url, self._path = url, parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._address = parts.hostname, port
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def first_model(self) -> str:
        """The name of the model that it serves."""
        with self._ask("GET", "/models") as answer:
            try:
                return str(json.loads(answer.read())["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError):
                raise ServerError(f"{self._url} names no model; give --model-name") from None

    def stream(self, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """The pieces of an answer, each with its kind: content or reasoning."""
        with self._ask("POST", "/chat/completions", json.dumps(body | {"stream": True})) as answer:
            for line in answer:
                if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                    continue
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    raise ServerError(_message(chunk))
                for choice in chunk["choices"]:
                    delta = choice["delta"]
                    for kind, name in (("reasoning", "reasoning_content"), ("content", "content")):
                        if piece := delta.get(name):
                            yield kind, piece

    def _ask(self, method: str, path: str, body: str | None = None) -> http.client.HTTPResponse:
        connection = self._kind(*self._address, timeout=TIMEOUT)
        try:
            connection.request(method, self._path + path, body, self._headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or error
            raise ServerError(f"no server answers at {self._url} ({reason}); `jaxpaged serve` starts one") from None
        if answer.status != 200:
            content = answer.read()
            try:
                raise ServerError(_message(json.loads(content)))
            except ValueError:
                raise ServerError(f"{self._url}{path} answers with status {answer.status}") from None
        return answer


def _message(content: Any) -> str:
    error = content.get("error") if isinstance(content, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else str(content)[:300]


if __name__ == "__main__":
    sys.exit(main())
