"""Prometheus metrics under vLLM's names, so that existing dashboards work unchanged.

Engine totals come from EngineStats, request figures from the OutputProcessor.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import prometheus_client as prometheus
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from jaxpaged.core.messages import EngineInfo, EngineStats
from jaxpaged.core.outputs import FinishReason, RequestMetrics
from jaxpaged.frontend.output_processor import ProcessedOutputs

_FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 4, 8)
_COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_STEP_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class MetricValue:
    """One metric at one moment. `name` has no `_total`; `value` of a histogram is the sum of its observations.

    Attributes:
        kind: "counter", "gauge" or "histogram".
        count: number of observations of a histogram, else None.
        buckets: of a histogram, upper bound to number of observations up to it.
    """

    name: str
    kind: str
    labels: dict[str, str]
    value: float
    count: int | None = None
    buckets: dict[str, int] | None = None


class Metrics:
    """All metrics of one engine, in a registry of their own."""

    def __init__(self, model_name: str, info: EngineInfo, *, kv_cache_dtype: str = "auto",
                 prefix_caching: bool = False, engine: str = "0") -> None:
        self.registry = prometheus.CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": engine}
        self._prefix_caching = prefix_caching
        self._seen: dict[str, float] = {}
        self._prompt_tokens = self._generation_tokens = 0
        self._first_tokens, self._first_token_seconds = 0, 0.0
        self._last_log: tuple[float, int, int] = (time.monotonic(), 0, 0)
        self._stats = EngineStats()
        self._live: dict[str, _Live] = {}
        lengths = tuple(_one_two_five(info.max_model_len))

        self._running = self._gauge("vllm:num_requests_running", "Sequences that own a slot.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Sequences that wait for a slot or for blocks.")
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.")
        self._empty = self._gauge("jaxpaged:kv_internal_fragmentation_ratio",
                                  "KV slots held but empty over KV slots held.")
        groups = prometheus.Gauge("jaxpaged:kv_group_blocks_used", "KV blocks in use by the layers that keep the same "
                                  "tokens: all, those of a sliding window, or a state.", [*self._labels, "window"],
                                  registry=self.registry)
        self._groups = [groups.labels(**self._labels, window=group.name) for group in info.kv_groups]
        cache = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks),
                 "cache_dtype": kv_cache_dtype, "enable_prefix_caching": str(prefix_caching)}
        prometheus.Gauge("vllm:cache_config_info", "The KV cache.", [*self._labels, *cache],
                         registry=self.registry).labels(**self._labels, **cache).set(1)

        self._totals = {
            "num_preemptions": self._counter("vllm:num_preemptions", "Sequences that gave their blocks back."),
            "blocks_swapped_out": self._counter("jaxpaged:blocks_swapped_out", "KV blocks copied to host memory."),
            "blocks_swapped_in": self._counter("jaxpaged:blocks_swapped_in", "KV blocks copied back from host memory."),
            "padding_tokens": self._counter("jaxpaged:padding_tokens", "Rows of steps that carried no token."),
            "compilations": self._counter("jaxpaged:compilations", "Programs compiled or loaded; constant once ready."),
            "device_idle_seconds": self._counter("jaxpaged:device_idle_seconds",
                                                 "Seconds in which the device waited although there was work."),
        }
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of requests whose prompt is processed.")
        self._cached = self._counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._generated = self._counter("vllm:generation_tokens", "Generated tokens.")
        success = prometheus.Counter("vllm:request_success", "Finished requests.",
                                     [*self._labels, "finished_reason"], registry=self.registry)
        reasons: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
        self._success = {reason: success.labels(**self._labels, finished_reason=reason) for reason in reasons}

        self._first_token = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.",
                                            _FIRST_TOKEN_BUCKETS)
        self._between = self._histogram("vllm:inter_token_latency_seconds", "Time between tokens of one choice.",
                                        _TOKEN_BUCKETS)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", _REQUEST_BUCKETS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Arrival to first step.", _REQUEST_BUCKETS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "First step to first token.",
                                        _REQUEST_BUCKETS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First token to last.", _REQUEST_BUCKETS)
        self._prompt_length = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self._output_length = self._histogram("vllm:request_generation_tokens", "Generated tokens of a request.",
                                              lengths)
        self._n = self._histogram("vllm:request_params_n", "Parameter n of a request.", _COUNT_BUCKETS)
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", "Parameter max_tokens of a request.",
                                           lengths)
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens in a step.", _STEP_TOKEN_BUCKETS)
        steps = prometheus.Histogram("jaxpaged:step_seconds", "Time of a step.", [*self._labels, "kind"],
                                     registry=self.registry, buckets=_STEP_BUCKETS)
        self._steps = {kind: steps.labels(**self._labels, kind=kind) for kind in ("decode", "prefill", "mixed")}
        self.registry.register(_OldNames(self.registry, {
            "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
            "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
        }))
        self.record_stats(EngineStats(compilations=info.num_compiled))  # the start of its counters

    def _gauge(self, name: str, text: str) -> prometheus.Gauge:
        return prometheus.Gauge(name, text, [*self._labels], registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> prometheus.Counter:
        return prometheus.Counter(name, text, [*self._labels], registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> prometheus.Histogram:
        return prometheus.Histogram(name, text, [*self._labels], registry=self.registry,
                                    buckets=buckets).labels(**self._labels)

    def record_stats(self, stats: EngineStats) -> None:
        """Record the engine's state after a step; counters never decrease."""
        self._stats = stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._usage.set(_share(stats.blocks_used, stats.blocks_total))
        for gauge, used in zip(self._groups, stats.group_blocks_used, strict=False):
            gauge.set(used)
        self._empty.set(_share(stats.kv_slots_empty, stats.kv_slots_held))
        for name, counter in self._totals.items():
            total = getattr(stats, name)
            if total > self._seen.get(name, 0):
                counter.inc(total - self._seen.get(name, 0))
                self._seen[name] = total
        for kind, seconds in stats.step_seconds:
            if kind in self._steps:
                _observe(self._steps[kind], seconds)
        for tokens in stats.step_tokens:
            _observe(self._step_tokens, tokens)

    def start_request(self, request_id: str, *, prompt_tokens: int, n: int, max_tokens: int,
                      arrival_time: float) -> None:
        """Start the record of one request, which counts once whatever its n.

        Args:
            prompt_tokens: tokens of the prompt.
            arrival_time: seconds of `time.monotonic()`.
        """
        self._live[request_id] = _Live(prompt_tokens, n, max_tokens, arrival_time)

    def record_outputs(self, done: ProcessedOutputs, now: float) -> None:
        """Count the result of a batch of deltas; `now` is seconds of `time.monotonic()`."""
        for new in done.new_tokens:
            live = self._live.get(new.request_id)
            if live is not None:
                self._record_tokens(live, new.choice, new.count, new.num_cached_tokens, now)
        for ended in done.finished:
            self._finish(ended.request_id, ended.finish_reason, ended.metrics, now)

    def abort_request(self, request_id: str, now: float) -> None:
        """Close the record of an aborted request; an unknown or finished one is ignored."""
        self._finish(request_id, "abort", None, now)

    def fail_request(self, request_id: str, now: float) -> None:
        """Close the record of a request with a failed choice, whatever the others do; otherwise as `abort_request`."""
        self._finish(request_id, "error", None, now)

    def _record_tokens(self, live: "_Live", choice: int, count: int, cached_tokens: int, now: float) -> None:
        if not live.generated:
            self._prompt_tokens += live.prompt_tokens
            self._prompt.inc(live.prompt_tokens)
            self._cached.inc(cached_tokens)
            if self._prefix_caching:
                self._queries.inc(live.prompt_tokens)
                self._hits.inc(cached_tokens)
            _observe(self._first_token, now - live.arrival_time)
            self._first_tokens += 1
            self._first_token_seconds += now - live.arrival_time
        last = live.last_times.get(choice)
        if last is not None:
            for _ in range(count):
                _observe(self._between, (now - last) / count)
        live.last_times[choice] = now
        live.generated += count
        self._generation_tokens += count
        self._generated.inc(count)

    def _finish(self, request_id: str, reason: FinishReason, times: RequestMetrics | None, now: float) -> None:
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self._success[reason].inc()
        _observe(self._e2e, now - live.arrival_time)
        _observe(self._prompt_length, live.prompt_tokens)
        _observe(self._output_length, live.generated)
        _observe(self._n, live.n)
        _observe(self._max_tokens, live.max_tokens)
        if times is None or times.first_scheduled_time is None:
            return
        _observe(self._queue, times.first_scheduled_time - times.arrival_time)
        if times.first_token_time is not None and times.last_token_time is not None:
            _observe(self._prefill, times.first_token_time - times.first_scheduled_time)
            _observe(self._decode, times.last_token_time - times.first_token_time)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics as text in a format that the `Accept` header allows, and its content type."""
        encode, content_type = choose_encoder(accept)
        if content_type.startswith("application/openmetrics-text"):
            # Unless told, prometheus_client 0.26 writes vllm_ for vllm: in this format's samples.
            text = openmetrics.generate_latest(self.registry, escaping=openmetrics.ALLOWUTF8)
            return text, openmetrics.CONTENT_TYPE_LATEST
        return encode(self.registry), content_type

    def snapshot(self) -> list[MetricValue]:
        """All metrics as values."""
        return [value for family in self.registry.collect() for value in _values_of(family)]

    def values(self) -> dict[str, float]:
        """Every metric by name, a histogram as name_sum and name_count; labels beyond the engine's own are added up."""
        values: dict[str, float] = {}
        for metric in self.snapshot():
            parts = ({metric.name: metric.value} if metric.count is None else
                     {f"{metric.name}_sum": metric.value, f"{metric.name}_count": float(metric.count)})
            for name, value in parts.items():
                values[name] = values.get(name, 0.0) + value
        return values

    def activity(self) -> dict[str, float]:
        """Running and waiting sequences, and totals since the start; a repeated reader subtracts them."""
        stats = self._stats
        return {"running": stats.num_running, "waiting": stats.num_waiting, "preemptions": stats.num_preemptions,
                "prompt_tokens": self._prompt_tokens, "generation_tokens": self._generation_tokens,
                "first_tokens": self._first_tokens, "first_token_seconds": self._first_token_seconds}

    def log_line(self, now: float) -> str | None:
        """A log line about the time since the last call; None if nothing ran or runs."""
        then, prompt, generated = self._last_log
        self._last_log = now, self._prompt_tokens, self._generation_tokens
        prompt, generated = self._prompt_tokens - prompt, self._generation_tokens - generated
        stats = self._stats
        if not (prompt or generated or stats.num_running or stats.num_waiting):
            return None
        seconds = max(now - then, 1e-3)
        return (f"prompt {prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s, "
                f"running {stats.num_running}, waiting {stats.num_waiting}, "
                f"KV blocks in use {100 * _share(stats.blocks_used, stats.blocks_total):.1f} %")


@dataclass(slots=True)
class _Live:
    """The record of an unfinished request; `last_times` is by choice."""

    prompt_tokens: int
    n: int
    max_tokens: int
    arrival_time: float
    generated: int = 0
    last_times: dict[int, float] = field(default_factory=dict)


class _OldNames(Collector):
    """Metrics repeated under the names of older dashboards, made at each scrape."""

    def __init__(self, registry: prometheus.CollectorRegistry, names: dict[str, str]) -> None:
        self._registry, self._names = registry, names
        self._busy = False

    def collect(self) -> Iterator[Metric]:
        if self._busy:  # the registry below calls every collector, this one too
            return
        self._busy = True
        try:
            families = list(self._registry.collect())
        finally:
            self._busy = False
        for family in families:
            if family.name in self._names:
                name = self._names[family.name]
                old = Metric(name, f"Old name of {family.name}.", family.type)
                old.samples = [sample._replace(name=sample.name.replace(family.name, name))
                               for sample in family.samples]
                yield old


def _values_of(family: Metric) -> Iterable[MetricValue]:
    kind = "counter" if family.type == "counter" else "histogram" if family.type == "histogram" else "gauge"
    if kind != "histogram":
        return [MetricValue(family.name, kind, dict(sample.labels), sample.value)
                for sample in family.samples if not sample.name.endswith("_created")]
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    buckets: dict[tuple[tuple[str, str], ...], dict[str, int]] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(sorted(labels.items()))
        if sample.name.endswith("_bucket"):
            buckets.setdefault(key, {})[sample.labels["le"]] = int(sample.value)
        else:
            found.setdefault(key, {})[sample.name.removeprefix(family.name)] = sample.value
    return [MetricValue(family.name, kind, dict(key), values["_sum"], int(values["_count"]), buckets[key])
            for key, values in found.items()]


def _observe(histogram: prometheus.Histogram, value: float) -> None:
    # a clock or an engine that misbehaves must not end the server, nor spoil a sum for good
    if 0 <= value < math.inf:
        histogram.observe(value)


def _share(part: int, whole: int) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def _one_two_five(limit: int) -> Iterator[int]:
    scale = 1
    while True:
        for step in (1, 2, 5):
            if scale * step > limit:
                return
            yield scale * step
        scale *= 10
