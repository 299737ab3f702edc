"""Runs an engine: receives messages, and sends one batch of outputs per step."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from jaxpaged.core.errors import RequestError
from jaxpaged.core.messages import (
    AbortRequests,
    DescribePool,
    EngineOutputs,
    EngineRequest,
    ResetPrefixCache,
    Shutdown,
    TokenDelta,
)
from jaxpaged.engine.engine import Engine


class EngineCall:
    """A function to call with the engine between two steps, by the thread that owns it; within one process only."""

    def __init__(self, action: Callable[[Engine], Any]) -> None:
        self.result: Future[Any] = Future()
        self._action = action

    def run(self, engine: Engine) -> None:
        """Call it and set the result, unless the caller has cancelled it."""
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self._action(engine))
        except Exception as error:  # raised again in the caller
            self.result.set_exception(error)


Message = EngineRequest | AbortRequests | ResetPrefixCache | DescribePool | EngineCall | Shutdown


def run_engine_loop(
    engine: Engine, receive: Callable[[bool], Iterable[Message]], send: Callable[[EngineOutputs], None]
) -> None:
    """Serve until a Shutdown message.

    Args:
        receive: returns the messages that have arrived; waits for one if its argument is true.
        send: called with each step's outputs.
    """
    while True:
        refused: list[TokenDelta] = []
        describe = False
        for message in receive(not engine.has_work()):
            if isinstance(message, Shutdown):
                return
            if isinstance(message, AbortRequests):
                engine.abort(message.request_ids)
                continue
            if isinstance(message, ResetPrefixCache):
                engine.reset_prefix_cache()
                continue
            if isinstance(message, EngineCall):
                message.run(engine)
                continue
            if isinstance(message, DescribePool):
                describe = True
                continue
            try:
                engine.add_request(message)
            except RequestError as error:
                refused.append(TokenDelta(message.request_id, (), finish_reason="error", error=str(error)))
        outputs = engine.step() if engine.has_work() else EngineOutputs((), engine.stats())
        if refused or describe:
            pool = engine.pool_state() if describe else None
            outputs = replace(outputs, deltas=(*refused, *outputs.deltas), pool=pool)
        send(outputs)
