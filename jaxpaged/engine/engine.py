"""The engine's step: schedule, dispatch, and process what the step before has sampled."""

import dataclasses
import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.errors import ConfigError, RequestError
from jaxpaged.core.limits import LIMITS
from jaxpaged.core.messages import EngineInfo, EngineOutputs, EngineRequest, EngineStats, PoolState, TokenDelta
from jaxpaged.core.outputs import WeightsUpdate
from jaxpaged.engine.beam_search import BeamSearches
from jaxpaged.engine.in_memory import InMemoryModel
from jaxpaged.engine.startup import prepare
from jaxpaged.engine.structured_output_manager import StructuredOutputManager
from jaxpaged.execution.model_runner import ModelRunner, StepInFlight
from jaxpaged.execution.step_functions import Params
from jaxpaged.frontend.context_window import ContextWindow
from jaxpaged.frontend.front import resolve_tokenizer
from jaxpaged.scheduling.block_pool import BlockPool
from jaxpaged.scheduling.host_tier import HostTier
from jaxpaged.scheduling.policy import POLICIES
from jaxpaged.scheduling.scheduler import Scheduler
from jaxpaged.text.tokenizer_files import load_tokenizer

_MASK_WAIT_SECONDS = 0.1  # then new requests and aborts are processed


def _silent(line: str) -> None:
    pass


class Engine:
    """One model on one device, serving many requests at once. Not thread-safe: one thread owns it.

    Args:
        config: what to load and how to run it.
        report: called with each line that the user should see at start.
        model: a model already in memory, in place of `config.model`.
        devices, mesh: see `choose_devices`.
        own_process: JAX's process-wide settings may be changed, since nothing else in this process uses JAX.

    Attributes:
        info: sizes and choices made at start.
        broken: an exception has interrupted a step; the engine cannot continue.

    Raises:
        ConfigError, CheckpointError: the message says what to change.
    """

    def __init__(
        self, config: EngineConfig, report: Callable[[str], None] = _silent, *, model: InMemoryModel | None = None,
        devices: Sequence[jax.Device] | None = None, mesh: jax.sharding.Mesh | None = None, own_process: bool = True,
    ) -> None:
        ready = prepare(config, report, model, devices, mesh, own_process)
        self.info: EngineInfo = ready.info
        self._context = ContextWindow(ready.info.max_model_len)
        self._runner: ModelRunner = ready.runner
        self._pool = BlockPool(ready.info.num_blocks, [group.width for group in ready.info.kv_groups])
        host_blocks = ready.info.num_host_blocks
        self._host = HostTier(host_blocks, ready.shape.transfer_sizes) if host_blocks else None
        self._scheduler = Scheduler(
            self._pool,
            block_size=ready.info.block_size,
            groups=ready.info.kv_groups,
            max_num_seqs=ready.info.max_num_seqs,
            max_num_batched_tokens=ready.info.max_num_batched_tokens,
            step_sizes=ready.shape.sizes,
            policy=POLICIES[config.scheduling_policy](),
            prefix_caching=config.enable_prefix_caching,
            host=self._host,
            swap=config.preemption_mode == "swap",
        )
        self._structured_outputs = StructuredOutputManager(
            lambda: load_tokenizer(resolve_tokenizer(config)), eos_token_ids=ready.info.eos_token_ids,
            vocab_size=ready.info.vocab_size, num_logits=self._runner.num_logits,
            max_bytes=LIMITS.max_grammar_cache_bytes)
        self._beams = BeamSearches()
        self._seed = config.seed
        self._num_seeded = 0
        self._in_flight: StepInFlight | None = None
        self._undelivered: list[TokenDelta] = []
        self._stats = EngineStats(blocks_total=self._pool.num_usable, compilations=self._runner.num_compiled)
        self._busy_since: float | None = None
        self._shares_weights = model is not None  # with code that may donate or delete them
        self._asleep = False
        self.broken = False

    @property
    def params(self) -> Params:
        """The weights on the device, as a nested dict."""
        return self._runner.params

    def get_params(self) -> Params:
        """The same, for code that may do anything with them: from now on each step checks that they are still there."""
        self._shares_weights = True
        return self._runner.params

    def check_weights(self) -> None:
        """Raise ConfigError, which names it, if a weight's memory is gone, as after it was donated elsewhere."""
        if self._shares_weights and (name := self._runner.deleted_weight()) is not None:
            raise ConfigError(f"the weight {name} has been deleted, or donated elsewhere; set new weights with "
                              "update_weights")

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: its id is already running, or it can never fit.
        """
        if self._scheduler.is_live(request.request_id) or self._beams.is_live(request.request_id):
            raise RequestError("a request with this id is already running", param="request_id")
        if self._asleep:
            raise RequestError("the engine is asleep; call wake_up first")
        if not request.prompt_token_ids:
            raise RequestError("the prompt has no tokens", param="prompt")
        self._context.resolve_max_tokens(len(request.prompt_token_ids), request.max_tokens)
        if request.params.use_beam_search:
            first = self._beams.add_request(request)
            if first is not None:
                self._scheduler.add_request(first[0], branches=first[1])
            return
        if request.seed is None:
            request = dataclasses.replace(request, seed=self._next_seed())
        grammar = request.grammar
        matcher = None if grammar is None else self._structured_outputs.create_matcher(grammar)
        self._scheduler.add_request(request, matcher)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; the next step delivers their last delta. Unknown ids are ignored."""
        request_ids = list(request_ids)
        deltas, beams = self._beams.abort(request_ids)
        self._undelivered += deltas + self._scheduler.abort(request_ids)
        self._scheduler.abort(beams)

    def has_work(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return self._scheduler.has_unfinished() or self._in_flight is not None or bool(self._undelivered)

    def step(self) -> EngineOutputs:
        """Dispatch the next step, then wait for the one before it.

        Returns:
            The outputs of the step before; none on the first call, since a step's ids arrive with the next one.
        """
        try:
            self.check_weights()
        except ConfigError as error:
            return self._fail_all(str(error))
        self.broken = True
        self._note_idle_device()
        step = self._scheduler.schedule(time.monotonic())
        dispatched = self._runner.dispatch(step) if step.chunks else None
        if dispatched is None and self._in_flight is None and not self._undelivered:
            self._structured_outputs.wait_for_mask(_MASK_WAIT_SECONDS)  # requests can wait for nothing else
        deltas, self._undelivered = self._undelivered, []
        version = self._runner.weights_version
        if self._in_flight is not None:
            version = self._in_flight.weights_version
            deltas += self._with_beams(self._collect(self._in_flight))
        self._in_flight = dispatched
        stats = self.stats()
        self._stats = dataclasses.replace(self._stats, step_seconds=(), step_tokens=())
        self.broken = False
        return EngineOutputs(tuple(deltas), stats, weights_version=version)

    def stats(self) -> EngineStats:
        """The engine's state now."""
        held, empty = self._scheduler.kv_slots()
        return dataclasses.replace(
            self._stats,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            blocks_used=self._pool.num_used,
            group_blocks_used=self._pool.num_used_of_groups,
            kv_slots_held=held,
            kv_slots_empty=empty,
            num_preemptions=self._scheduler.num_preemptions,
            blocks_swapped_out=self._scheduler.num_swapped[0],
            blocks_swapped_in=self._scheduler.num_swapped[1],
            compilations=self._runner.num_compiled,
        )

    def pool_state(self) -> PoolState:
        """The current use of every KV block."""
        swapped = self._host.num_used if self._host is not None else 0
        return PoolState(self._pool.state_codes(), swapped, self._pool.group_codes())

    def update_weights(
        self, params: Mapping[Any, Any], *, partial: bool = False, donate: bool = False
    ) -> WeightsUpdate:
        """Use other weights from the next step on, in running requests too.

        Args:
            partial: weights that are missing stay.
            donate: the given arrays are not needed any more.

        Raises:
            ConfigError: the tree, a shape or a dtype is not that of the loaded weights; it names what differs.
        """
        began = time.monotonic()
        moved = self._runner.replace_params(params, partial=partial, donate=donate)
        self._shares_weights = True
        self.reset_prefix_cache()
        return WeightsUpdate(self._runner.weights_version, moved, time.monotonic() - began)

    def sleep(self) -> None:
        """Give the memory of the KV pool back until `wake_up`; weights and programs stay.

        Raises:
            RequestError: requests are running.
        """
        if self._scheduler.has_unfinished() or self._undelivered:
            raise RequestError("requests are running; wait for them or abort them before sleep")
        if self._in_flight is not None:  # of requests that have ended meanwhile
            self._collect(self._in_flight)
            self._in_flight = None
        if not self._asleep:
            self.reset_prefix_cache()
            self._runner.free_pools()
        self._asleep = True

    def wake_up(self) -> None:
        """Make the KV pool again; nothing is compiled."""
        if self._asleep:
            self._runner.make_pools()
        self._asleep = False

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks: later requests share nothing that has been computed so far."""
        self._scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Assert that the bookkeeping of blocks, slots and queues agrees."""
        self._scheduler.check_integrity()

    def shutdown(self) -> None:
        """Drop all requests and wait for the device, so that nothing uses the weights any more."""
        self._scheduler.abort(self._scheduler.live_ids())
        self._structured_outputs.close()
        self._undelivered.clear()
        if self._in_flight is not None:
            self._in_flight.sampled()
            self._in_flight = None

    def _fail_all(self, error: str) -> EngineOutputs:
        """End all requests with an error; the engine can continue."""
        deltas, self._undelivered = self._undelivered, []
        if self._in_flight is not None:
            deltas += self._with_beams(self._collect(self._in_flight))
            self._in_flight = None
        deltas += self._with_beams(self._scheduler.abort(self._scheduler.live_ids(), error))
        return EngineOutputs(tuple(deltas), self.stats(), weights_version=self._runner.weights_version)

    def _collect(self, running: StepInFlight) -> list[TokenDelta]:
        sampled = running.sampled()
        now = time.monotonic()
        held, empty = self._scheduler.kv_slots()
        began, self._busy_since = self._busy_since or now, now
        self._stats = dataclasses.replace(
            self._stats,
            blocks_used_sum=self._stats.blocks_used_sum + self._pool.num_used,
            blocks_shared_sum=self._stats.blocks_shared_sum + self._pool.num_shared,
            kv_slots_held_sum=self._stats.kv_slots_held_sum + held,
            kv_slots_empty_sum=self._stats.kv_slots_empty_sum + empty,
            padding_tokens=self._stats.padding_tokens + running.size - running.step.num_tokens,
            step_seconds=((running.step.kind, now - began),),
            step_tokens=(running.step.num_tokens,),
        )
        return self._scheduler.update_from_output(running.step, sampled, running.sampled_logprobs(),
                                                  [rows.result() for rows in running.scored])

    def _with_beams(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Advance the beam searches by the deltas of their beams; return the deltas of choices."""
        if not self._beams:
            return deltas
        outputs, ended, branches = self._beams.process_deltas(deltas)
        self._scheduler.abort(ended)
        self._scheduler.resume(branches)
        return outputs

    def _note_idle_device(self) -> None:
        """Count the time in which the device was idle although there was work."""
        now = time.monotonic()
        if self._in_flight is None:
            self._busy_since = now
        elif self._in_flight.is_ready() and self._busy_since is not None:
            # An upper bound: it may have become ready during this time.
            idle = now - self._busy_since
            self._stats = dataclasses.replace(self._stats,
                                              device_idle_seconds=self._stats.device_idle_seconds + idle)

    def _next_seed(self) -> int:
        """A random seed, or one derived from the engine's seed and the request's ordinal."""
        if self._seed is None:
            return secrets.randbits(64)
        self._num_seeded += 1
        digest = hashlib.blake2b(f"{self._seed} {self._num_seeded}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")
