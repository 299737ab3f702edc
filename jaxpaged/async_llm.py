"""Asynchronous use in one process: notebooks, reinforcement learning loops, own servers."""

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from jaxpaged.config import DEFAULT_MODEL, EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.engine_loop import Message, run_engine_loop
from jaxpaged.errors import EngineDeadError, NotSupportedError, OverloadedError
from jaxpaged.front import Front
from jaxpaged.llm import Prompt, in_memory_model, print_line
from jaxpaged.messages import AbortRequests, EngineInfo, EngineOutputs, Shutdown
from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import SamplingParams


class AsyncLLM:
    """A model whose requests come and go one by one; the engine runs in a thread of its own.

    Its methods belong to one event loop, the one that is running at the first `generate`.

    Args:
        model, engine_args: as for `LLM`.
    """

    def __init__(self, model: Any = DEFAULT_MODEL, **engine_args: Any) -> None:
        in_memory = in_memory_model(model)
        config = EngineConfig.from_kwargs(model="in-memory" if in_memory else model, **engine_args)
        self._engine = Engine(config, print_line, model=in_memory)
        self.info: EngineInfo = self._engine.info
        self._front = Front(config, self.info, has_files=in_memory is None)
        self._max_waiting = config.max_waiting_requests + self.info.max_num_seqs
        self._num_live = 0
        self._ordinals = itertools.count()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="jaxpaged-engine", daemon=True)
        self._thread.start()
        print_line(self.info.summary())

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come; leaving the loop early stops it.

        Args:
            prompt: a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: None for the model's defaults; `output_kind` says what each output holds.
            request_id: unique among the running ones; made up if not given.

        Raises:
            RequestError: the request cannot be served.
            EngineDeadError: the engine has ended.
        """
        self._loop = self._loop or asyncio.get_running_loop()
        if priority:
            raise NotSupportedError("priority is not supported yet; leave it out", param="priority")
        name = request_id or f"request-{next(self._ordinals)}"
        request = await asyncio.to_thread(self._front.inputs.process, name, prompt, sampling_params)
        if self._failure is not None:  # asked for only now: a failure while the prompt was read has told nobody
            raise self._failure
        if self._num_live + len(request.sequences) > self._max_waiting:
            raise OverloadedError("too many requests are waiting; try again later, or raise max_waiting_requests")
        self._front.begin(request)
        stream: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self._streams[name] = stream
        self._num_live += len(request.sequences)
        try:
            for sequence in request.sequences:
                self._inbox.put(sequence)
            finished = False
            while not finished:
                output = await stream.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            self._num_live -= len(request.sequences)
            del self._streams[name]
            self._stop(name)

    async def abort(self, request_id: str) -> None:
        """Stop a request; whoever iterates over it gets a last output with finish_reason "abort"."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._inbox.put(AbortRequests(self._front.sequences(request_id)))

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self._front.needed_tokenizer.hf

    def get_metrics(self) -> dict[str, float]:
        """Metrics by name, as the server's /metrics spells them; histograms as name_sum and name_count."""
        return self._front.metrics.values()

    def shutdown(self) -> None:
        """End the engine and every request that is still running."""
        self._inbox.put(Shutdown())
        self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def _stop(self, request_id: str) -> None:
        sequences = self._front.abort(request_id, time.monotonic())
        if sequences:
            self._inbox.put(AbortRequests(tuple(sequences)))

    def _run(self) -> None:
        try:
            run_engine_loop(self._engine, self._receive, self._send)
            self._engine.shutdown()
            failure = EngineDeadError("this AsyncLLM has been shut down")
        except Exception as error:
            failure = EngineDeadError(f"the engine has failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._failure = failure
        self._on_loop(self._fail_all, failure)

    def _receive(self, block: bool) -> list[Message]:
        messages = [self._inbox.get()] if block else []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get_nowait())
        return messages

    def _send(self, outputs: EngineOutputs) -> None:
        self._on_loop(self._deliver, outputs)

    def _on_loop(self, call: Any, argument: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call, argument)

    def _deliver(self, outputs: EngineOutputs) -> None:
        done = self._front.process(outputs, time.monotonic())
        if done.to_abort:
            self._inbox.put(AbortRequests(tuple(done.to_abort)))
        for output in done.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)

    def _fail_all(self, failure: Exception) -> None:
        for stream in self._streams.values():
            stream.put_nowait(failure)
