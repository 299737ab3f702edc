"""Asynchronous use in one process: notebooks, reinforcement learning loops, own servers."""

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

import jax

from jaxpaged.core.config import DEFAULT_MODEL, EngineConfig
from jaxpaged.core.errors import ConfigError, EngineDeadError, OverloadedError, RequestError
from jaxpaged.core.messages import AbortRequests, EngineInfo, EngineOutputs, ResetPrefixCache, Shutdown
from jaxpaged.core.outputs import RequestOutput, WeightsUpdate
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.engine.batches import Prompt, params_of
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.in_memory import in_memory_model
from jaxpaged.engine.llm import print_line
from jaxpaged.engine.loop import EngineCall, Message, run_engine_loop
from jaxpaged.execution.devices import without_caller_contexts
from jaxpaged.frontend.front import Front, load_text_files
from jaxpaged.frontend.input_processor import ProcessedRequest


class AsyncLLM:
    """A model whose requests come and go one by one; the engine runs in a thread of its own.

    Its requests belong to one event loop at a time: once all have finished, another loop may use it.

    Args:
        model, devices, mesh, configure_jax, engine_args: as for `LLM`.
    """

    def __init__(
        self, model: Any = DEFAULT_MODEL, *, devices: Sequence[jax.Device] | None = None,
        mesh: jax.sharding.Mesh | None = None, configure_jax: bool = False, **engine_args: Any,
    ) -> None:
        in_memory = in_memory_model(model)
        config = EngineConfig.from_kwargs(model="in-memory" if in_memory else model, **engine_args)
        with without_caller_contexts():
            engine = Engine(
                config, print_line, model=in_memory, devices=devices, mesh=mesh, own_process=configure_jax)
        self._engine: Engine | None = engine  # for as long as its thread runs
        self.info: EngineInfo = engine.info
        self._front = Front(config, self.info, load_text_files(config, in_memory=in_memory is not None))
        self._max_waiting = config.max_waiting_requests + self.info.max_num_seqs
        self._num_live = 0
        self._idle: asyncio.Future[None] | None = None  # set once no request is live
        self._gate: asyncio.Future[None] | None = None  # set once new requests may begin
        self._ordinals = itertools.count()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keys: dict[str, str] = {}  # name of a running request -> the engine's key for it
        self._aborted: set[str] = set()
        self._streams: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._calls: set[Future[Any]] = set()  # that the engine has not answered yet
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(engine,), name="jaxpaged-engine", daemon=True)
        self._thread.start()
        print_line(self.info.summary())

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
        priority: int = 0, **sampling: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they arrive; leaving the loop early aborts it.

        Args:
            prompt: a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: None for the model's defaults; `output_kind` says what each output holds.
            request_id: unique among the running ones; generated if not given.
            priority: the smaller is served first, with scheduling_policy="priority".
            sampling: fields of `SamplingParams`, instead of `sampling_params`.

        Raises:
            RequestError: the request cannot be served.
            EngineDeadError: the engine has ended.
        """
        self._bind_to_loop(asyncio.get_running_loop())
        [params] = params_of(sampling_params, sampling, 1)
        name = request_id or f"request-{next(self._ordinals)}"
        if name in self._keys:
            raise RequestError("a request with this request_id is running", param="request_id")
        # The engine may still deliver the end of a request whose name is used again, so each has a key of its own.
        key = f"{next(self._ordinals)}:{name}"
        self._keys[name] = key
        try:
            request = await asyncio.to_thread(self._front.inputs.process, key, prompt, params,
                                              priority=priority)
            while self._gate is not None:
                await asyncio.shield(self._gate)
            if self._failure is not None:  # checked only now: `_fail_all` does not reach prompts in preparation
                raise self._failure
            if self._num_live + len(request.sequences) > self._max_waiting:
                raise OverloadedError("too many requests are waiting; try again later, or raise max_waiting_requests")
            self._front.add_request(request)
            async with contextlib.aclosing(self._outputs_of(request)) as outputs:
                async for output in outputs:
                    yield replace(output, request_id=name)
        finally:
            del self._keys[name]
            self._aborted.discard(key)

    def _bind_to_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None and self._loop is not loop and self._keys and not self._loop.is_closed():
            raise RequestError("requests of another event loop are running; wait for them, or make an AsyncLLM for "
                               "each event loop")
        self._loop = loop

    async def _outputs_of(self, request: ProcessedRequest) -> AsyncGenerator[RequestOutput, None]:
        key = request.request_id
        stream: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self._streams[key] = stream
        self._num_live += len(request.sequences)
        try:
            for sequence in request.sequences:
                self._inbox.put(sequence)
            if key in self._aborted:
                self._inbox.put(AbortRequests(self._front.sequences(key)))
            finished = False
            while not finished:
                output = await stream.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            self._num_live -= len(request.sequences)
            if not self._num_live and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)
            del self._streams[key]
            sequences = self._front.abort(key, time.monotonic())
            if sequences:
                self._inbox.put(AbortRequests(tuple(sequences)))

    async def abort(self, request_id: str) -> None:
        """Abort a request; its iterator yields a last output with finish_reason "abort"."""
        key = self._keys.get(request_id)
        if key in self._streams:
            self._inbox.put(AbortRequests(self._front.sequences(key)))
        elif key is not None:
            self._aborted.add(key)  # its prompt is still being processed

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes, so that later requests share nothing computed so far; always succeeds."""
        self._inbox.put(ResetPrefixCache())
        return True

    async def get_params(self) -> dict[Any, Any]:
        """The weights on the device, as the nested dict that `update_weights` takes. They must not be donated."""
        return dict(await self._call(lambda engine: engine.get_params()))

    async def update_weights(
        self, params: Mapping[Any, Any], *, running: Literal["continue", "finish", "abort"] = "continue",
        partial: bool = False, donate: bool = False,
    ) -> WeightsUpdate:
        """Replace the weights by others of the same shapes and dtypes; see `LLM.update_weights`.

        Args:
            running: what requests do that are running now: "continue" with the new weights from the next step on,
                "finish" with the old ones, while new requests wait, or "abort". Their outputs' `weight_versions` say
                which weights made which tokens.

        Raises:
            ConfigError: the tree, a shape or a dtype differs.
            EngineDeadError: the engine has ended.
        """
        if running not in ("continue", "finish", "abort"):
            raise ConfigError('running must be "continue", "finish" or "abort"')

        def update(engine: Engine) -> WeightsUpdate:
            return engine.update_weights(params, partial=partial, donate=donate)

        if running != "finish":
            if running == "abort":
                for name in list(self._keys):
                    await self.abort(name)
            updated: WeightsUpdate = await self._call(update)
            return updated
        while self._gate is not None:  # another update waits already
            await asyncio.shield(self._gate)
        self._gate = asyncio.get_running_loop().create_future()
        try:
            while self._num_live:
                self._idle = asyncio.get_running_loop().create_future()
                await self._idle
            updated = await self._call(update)
            return updated
        finally:
            self._gate.set_result(None)
            self._gate = None

    async def sleep(self) -> None:
        """Give the memory of the KV pool back until `wake_up`; see `LLM.sleep`.

        Raises:
            RequestError: requests are running.
        """
        await self._call(lambda engine: engine.sleep())

    async def wake_up(self) -> None:
        """Make the KV pool again; nothing is compiled."""
        await self._call(lambda engine: engine.wake_up())

    @contextlib.asynccontextmanager
    async def asleep(self) -> AsyncGenerator[None, None]:
        """`sleep` inside, `wake_up` at the end."""
        await self.sleep()
        try:
            yield
        finally:
            await self.wake_up()

    async def _call(self, action: Callable[[Engine], Any]) -> Any:
        call = EngineCall(action)
        self._calls.add(call.result)
        self._inbox.put(call)
        try:
            if self._failure is not None:  # checked only now: it is set before the pending calls are failed
                raise self._failure
            return await asyncio.wrap_future(call.result)
        finally:
            self._calls.discard(call.result)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self._front.tokenizer.hf

    def get_metrics(self) -> dict[str, float]:
        """Metrics by name, as the server's /metrics spells them; histograms as name_sum and name_count."""
        return self._front.metrics.values()

    def shutdown(self) -> None:
        """End the engine and every running request."""
        self._inbox.put(Shutdown())
        self._thread.join()
        self._engine = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def _run(self, engine: Engine) -> None:
        try:
            run_engine_loop(engine, self._receive, self._send)
            engine.shutdown()
            failure = EngineDeadError("this AsyncLLM has been shut down")
        except Exception as error:  # whatever it is, every waiting request and call gets it
            failure = EngineDeadError(f"the engine has failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._failure = failure
        for call in list(self._calls):
            if not call.done():
                call.set_exception(failure)
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
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all waiting callers
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call, argument)

    def _deliver(self, outputs: EngineOutputs) -> None:
        done = self._front.process_outputs(outputs, time.monotonic())
        if done.to_abort:
            self._inbox.put(AbortRequests(tuple(done.to_abort)))
        for output in done.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)

    def _fail_all(self, failure: Exception) -> None:
        for stream in self._streams.values():
            stream.put_nowait(failure)
