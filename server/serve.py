"""The life cycle of the server: start both processes, serve, and end both."""

import asyncio
import contextlib
import errno
import gc
import importlib.util
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn

from jaxpaged.core.errors import ConfigError, EngineDeadError, JaxpagedError
from jaxpaged.core.limits import LIMITS
from jaxpaged.frontend.metrics import Metrics
from jaxpaged.server.args import Arguments, ServerConfig
from jaxpaged.server.http_protocol import HttpBounds, http_protocol
from jaxpaged.server.logs import set_up_logging
from jaxpaged.server.service import Service

logger = logging.getLogger(__name__)

# Long enough for a load balancer's health check to see the 503 before connections are refused.
DEAD_ENGINE_GRACE_SECONDS = 10.0
STATISTICS_SECONDS = 10.0
THREAD_SECONDS = 1.0  # for threads that prepare requests to end
SPARE_FILES = 64  # for all that is no connection: models, logs, pipes to the other processes
CLOSE_SECONDS = 5  # for complete responses that are not yet read, and for the engine to end


def serve(arguments: Arguments) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        0 after a signal; 1 after a failed start, reported in one line, or if the engine has died.
    """
    set_up_logging(arguments.server.uvicorn_log_level)
    for warning in arguments.warnings:
        logger.warning("%s", warning)
    try:
        _check_certificate(arguments.server)
        with _listener(arguments.server) as listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
            files = _raise_file_limit()
            code = runner.run(_Server(arguments, listener, files).run())
    except JaxpagedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _end_with_threads(code)
    return code


def _end_with_threads(code: int) -> None:
    """End the process here if threads are still at work: the interpreter would wait for them, however long that is."""
    deadline = time.monotonic() + THREAD_SECONDS
    threads = [thread for thread in threading.enumerate()
               if not thread.daemon and thread is not threading.current_thread()]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        logging.shutdown()
        os._exit(code)


class _Server:
    """One run: starting, serving, draining, ending."""

    def __init__(self, arguments: Arguments, listener: socket.socket, files: int) -> None:
        self._config = arguments.server
        self._listener, self._files = listener, files
        self._service = Service(arguments.server, arguments.engine, on_engine_death=self._on_engine_death,
                                on_engine_stall=self._on_engine_stall)
        self._http: _Http | None = None
        self._ending: asyncio.Task[None] | None = None
        self._exit_code = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self._service.start()
            await self._serve()
        except BaseException:  # interrupts included: the engine's process must end; `serve` reports the reason
            self._service.kill()
            raise
        await self._service.shutdown(CLOSE_SECONDS)
        return self._exit_code

    async def _serve(self) -> None:
        from jaxpaged.server.app import make_app

        self._http = _Http(uvicorn.Config(
            make_app(self._service.api), log_config=None, log_level=self._config.uvicorn_log_level,
            access_log=not self._config.disable_access_log, http=self._http_protocol(), ws="none", lifespan="off",
            server_header=False, timeout_keep_alive=self._config.keep_alive_timeout,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            ssl_keyfile=self._config.ssl_keyfile, ssl_certfile=self._config.ssl_certfile), self._config.head_timeout)
        # The objects of the start are permanent: walking through them again would hold up all streams for a while.
        gc.collect()
        gc.freeze()
        statistics = None
        if not self._config.disable_log_stats:
            statistics = asyncio.create_task(_log_statistics(self._service.metrics))
        await self._http.serve([self._listener])
        if statistics is not None:
            statistics.cancel()
        self._service.close()

    def _http_protocol(self) -> type[asyncio.Protocol]:
        config = self._config
        return http_protocol(HttpBounds(
            max_head_bytes=LIMITS.max_head_bytes, head_timeout=config.head_timeout, write_timeout=config.write_timeout,
            max_connections=config.max_connections or max(16, self._files - SPARE_FILES)))

    def _on_signal(self, number: int) -> None:
        if self._http is None or self._ending is not None:
            # Still starting, or the second signal: end at once, whatever the threads are doing.
            self._service.kill()
            os._exit(0 if self._ending is None else 128 + number)
        logger.info("shutting down: running requests have %g s to finish", self._config.shutdown_timeout)
        self._ending = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        assert self._http is not None
        self._service.api.refuse("the server is shutting down")
        await self._service.client.wait_until_idle(self._config.shutdown_timeout)
        self._service.client.fail_all(EngineDeadError("the server is shutting down"))
        self._http.should_exit = True

    def _on_engine_death(self) -> None:
        self._exit_code = 1
        if self._ending is None:
            logger.error("the engine has ended; exiting in %g s", DEAD_ENGINE_GRACE_SECONDS)
            self._ending = asyncio.create_task(self._end_later())

    def _on_engine_stall(self) -> None:
        if self._config.exit_on_engine_timeout and self._ending is None:
            self._exit_code = 1
            logger.error("exiting in %g s (--exit-on-engine-timeout)", DEAD_ENGINE_GRACE_SECONDS)
            self._ending = asyncio.create_task(self._end_later())

    async def _end_later(self) -> None:
        assert self._http is not None
        await asyncio.sleep(DEAD_ENGINE_GRACE_SECONDS)
        self._http.should_exit = True


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers, which refuse connections at once and change the exit code.

    Args:
        handshake_timeout: seconds for a TLS handshake.
    """

    def __init__(self, config: uvicorn.Config, handshake_timeout: float) -> None:
        super().__init__(config)
        self._handshake_timeout = handshake_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, then log the address. uvicorn's own gives every TLS handshake a minute."""
        assert sockets
        config = self.config
        protocol: Any = config.http_protocol_class
        make = partial(protocol, config=config, server_state=self.server_state, app_state=self.lifespan.state)
        bounds: dict[str, Any] = {"ssl_handshake_timeout": self._handshake_timeout,
                                  "ssl_shutdown_timeout": CLOSE_SECONDS} if config.is_ssl else {}
        self.servers = [await asyncio.get_running_loop().create_server(
            make, sock=listener, ssl=config.ssl, backlog=config.backlog, **bounds) for listener in sockets]
        self.started = True
        logger.info("serving on %s", _url(config, sockets[0]))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _log_statistics(metrics: Metrics) -> None:
    while True:
        await asyncio.sleep(STATISTICS_SECONDS)
        line = metrics.log_line(time.monotonic())
        if line is not None:
            logger.info("%s", line)


def _listener(config: ServerConfig) -> socket.socket:
    """A socket bound to the address, before the model loads: a port in use is reported at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--host {config.host} is not an address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        hint = "choose another --port" if error.errno == errno.EADDRINUSE else "choose another --host or --port"
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror}; {hint}") from None
    return listener


def _check_certificate(config: ServerConfig) -> None:
    """Report a bad certificate before the model loads; uvicorn reads it only after."""
    if config.ssl_certfile is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:
            raise ConfigError("--ssl-certfile and --ssl-keyfile cannot be used together: "
                              f"{error.strerror or type(error).__name__}") from None


def _url(config: uvicorn.Config, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if config.is_ssl else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _raise_file_limit() -> int:
    """Raise the limit of open files as far as allowed and return it: each connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, if installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory
