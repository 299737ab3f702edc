"""`jaxpaged run-batch`: read the flags, answer what has no answer yet, and write a bar of the progress."""

import asyncio
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import ConfigError, JaxpagedError
from jaxpaged.core.flags import add_flags, merge_model, new_parser, parse_flags
from jaxpaged.server.args import ServerConfig, fields_of
from jaxpaged.server.batch.files import Answers, BatchRequest, read_ids, read_requests

if TYPE_CHECKING:
    from starlette.types import ASGIApp
    from tqdm import tqdm

# Settings of the server that have a meaning for a batch; all others are about HTTP.
SERVER_FIELDS = frozenset({"served_model_name", "enable_auto_tool_choice", "tool_call_parser", "chat_template_timeout",
                           "structured_outputs_timeout", "engine_timeout"})
CLOSE_SECONDS = 5
RETRY_SECONDS = (1, 2, 4, 8, 16, 32)  # after an answer that says to try again later


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """The files of a batch."""

    input_file: str = field(default="", metadata={
        "help": "the requests, in OpenAI's batch format: one JSON object a line with custom_id, url and body",
        "group": "server", "short": "-i", "metavar": "FILE.jsonl"})
    output_file: str = field(default="", metadata={
        "help": "takes the answers; one that an interrupted batch has begun is continued",
        "group": "server", "short": "-o", "metavar": "FILE.jsonl"})

    def __post_init__(self) -> None:
        if not self.input_file or not self.output_file:
            raise ConfigError("name both files: -i REQUESTS.jsonl -o ANSWERS.jsonl")
        if Path(self.input_file).resolve() == Path(self.output_file).resolve():
            raise ConfigError("--input-file and --output-file must be different files")


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpaged.run_batch") -> int:
    """Answer a batch.

    Args:
        argv: the arguments after the program's name; None for those of the process.
        prog: what the user typed, for help and errors.

    Returns:
        0 if every request has an answer, be it an error that says what is wrong with it; 1 after a failed start or if
        the engine has ended; 130 after an interrupt. The same command continues a batch that was not finished.
    """
    parser = new_parser(prog, "Answer the requests of a file, without a server; without MODEL, by a small default one. "
                        "The same command continues a batch that was interrupted, whatever ended it.")
    leave_out = {name for name in ServerConfig.__dataclass_fields__ if name not in SERVER_FIELDS}
    add_flags(parser, (BatchConfig, EngineConfig, ServerConfig), leave_out)
    given = parse_flags(parser, sys.argv[1:] if argv is None else argv)
    try:
        merge_model(given)
        files = BatchConfig(**fields_of(BatchConfig, given))
        engine = EngineConfig(**fields_of(EngineConfig, given))
        server = ServerConfig(**fields_of(ServerConfig, given))
    except ConfigError as error:
        parser.error(str(error))
    try:
        return _run(files, engine, server)
    except JaxpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(files: BatchConfig, engine: EngineConfig, server: ServerConfig) -> int:
    source = Path(files.input_file)
    names = read_ids(source)
    answers = Answers(Path(files.output_file))
    try:
        if strangers := answers.answered.difference(names):
            raise ConfigError(f"--output-file {files.output_file} has answers to other requests, such as "
                              f"{min(strangers)[:80]!r}; name a new file")
        missing = len(names) - len(answers.answered)
        if not missing:
            print(f"all {len(names):,} requests have their answers in {files.output_file}", file=sys.stderr)
            return 0
        if answers.answered:
            print(f"{len(answers.answered):,} of {len(names):,} requests have their answers already", file=sys.stderr)
        batch = _Batch(engine, server, source, answers, len(names))
        return asyncio.run(batch.run())
    finally:
        answers.close()


class _Batch:
    """One run: starting the engine, answering, ending it."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, source: Path, answers: Answers, total: int) -> None:
        self._engine, self._server = engine, server
        self._source, self._answers, self._total = source, answers, total
        self._stopped: str | None = None

    async def run(self) -> int:
        from jaxpaged.server.logs import set_up_logging  # what --help does not need
        from jaxpaged.server.service import Service

        set_up_logging()
        service = Service(self._server, self._engine, on_engine_death=lambda: self._stop("the engine has ended"),
                          on_engine_stall=lambda: self._stop("the engine has not answered for "
                                                             f"{self._server.engine_timeout:g} s (--engine-timeout)"))
        interrupt = asyncio.current_task()
        assert interrupt is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, interrupt.cancel)
        try:
            await service.start()
            from jaxpaged.server.app import make_app

            await self._answer_all(make_app(service.api), 2 * service.info.max_num_seqs)
        except asyncio.CancelledError:
            service.kill()
            print("interrupted; the same command continues", file=sys.stderr)
            return 130
        except BaseException:
            service.kill()
            raise
        service.close()
        await service.shutdown(CLOSE_SECONDS)
        if self._stopped is not None:
            print(f"error: {self._stopped}; the same command continues", file=sys.stderr)
            return 1
        refused = f", {self._answers.num_refused:,} of them errors" if self._answers.num_refused else ""
        print(f"{self._total:,} requests have their answers{refused}", file=sys.stderr)
        return 0

    def _stop(self, reason: str) -> None:
        self._stopped = self._stopped or reason

    async def _answer_all(self, app: "ASGIApp", width: int) -> None:
        """Keep `width` requests under way: those that run, and as many that wait for their slots."""
        from tqdm import tqdm

        done = len(self._answers.answered)
        missing = iter((number, request) for number, request in enumerate(read_requests(self._source))
                       if request.custom_id not in self._answers.answered)
        with tqdm(total=self._total, initial=done, unit="request", desc="Answering", smoothing=0.05) as bar:
            async with asyncio.TaskGroup() as group:
                for _ in range(width):
                    group.create_task(self._answer_some(app, missing, bar))

    async def _answer_some(self, app: "ASGIApp", missing: Iterator[tuple[int, BatchRequest]], bar: "tqdm[Any]") -> None:
        from jaxpaged.server.batch.asgi_call import post

        for number, request in missing:
            for pause in (*RETRY_SECONDS, 0):
                status, content = await post(app, request.url, request.body)
                if status not in (429, 503) or self._stopped is not None:
                    break
                await asyncio.sleep(pause)
            else:
                self._stop("requests cannot be served: " + content.decode(errors="replace")[:300])
            if self._stopped is not None:
                return
            self._answers.write(request, number, status, json.loads(content))
            bar.update()


if __name__ == "__main__":
    sys.exit(main())
