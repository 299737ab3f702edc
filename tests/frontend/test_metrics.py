"""Metrics: vLLM's names, valid text, counters that never go down, one count per request."""

import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from jaxpaged.core.kv_groups import KVGroup
from jaxpaged.core.messages import EngineInfo, EngineStats
from jaxpaged.core.outputs import RequestMetrics
from jaxpaged.frontend.metrics import Metrics
from jaxpaged.frontend.output_processor import FinishedRequest, NewTokens, ProcessedOutputs

INFO = EngineInfo(model="m", architecture="Llama", device="cpu", dtype="float32", vocab_size=100, max_model_len=2048,
                  block_size=16, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64, num_programs=3,
                  weight_bytes=1, kv_cache_bytes=1, start_seconds=1.0, num_compiled=2)
GAUGES = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
          "vllm:cache_config_info", "vllm:gpu_cache_usage_perc", "jaxpaged:kv_internal_fragmentation_ratio",
          "jaxpaged:kv_group_blocks_used"}
COUNTERS = {"vllm:num_preemptions", "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:prompt_tokens_cached",
            "vllm:request_success", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "jaxpaged:padding_tokens",
            "jaxpaged:compilations", "jaxpaged:device_idle_seconds", "jaxpaged:blocks_swapped_out",
            "jaxpaged:blocks_swapped_in"}
HISTOGRAMS = {"vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
              "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds",
              "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds", "vllm:request_prompt_tokens",
              "vllm:request_generation_tokens", "vllm:request_params_n", "vllm:request_params_max_tokens",
              "vllm:iteration_tokens_total", "vllm:time_per_output_token_seconds", "jaxpaged:step_seconds"}


def samples(metrics: Metrics) -> dict[str, float]:
    """Sample name, with labels other than the two common ones, to value; read by the reference parser."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition()[0].decode()):
        for sample in family.samples:
            assert sample.labels["engine"] == "0" or family.name.endswith("_created")
            assert sample.labels["model_name"] == "m"
            extra = [sample.labels[name] for name in ("finished_reason", "kind", "le") if name in sample.labels]
            found[" ".join([sample.name, *extra])] = sample.value
    return found


def test_every_promised_name_is_there_with_its_type_before_any_traffic() -> None:
    text, content_type = Metrics("m", INFO).exposition()
    assert content_type.startswith("text/plain")
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text.decode(), re.MULTILINE))
    for names, kind, suffix in ((GAUGES, "gauge", ""), (COUNTERS, "counter", "_total"), (HISTOGRAMS, "histogram", "")):
        for name in names:
            assert types[name + suffix] == kind, name
    families = {family.name for family in text_string_to_metric_families(text.decode())}
    assert families >= GAUGES | COUNTERS | HISTOGRAMS


def test_openmetrics_clients_get_their_format() -> None:
    text, content_type = Metrics("m", INFO).exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text") and text.endswith(b"# EOF\n")
    plain, _ = Metrics("m", INFO).exposition()
    found, wanted = ({sample.name for family in parse(content.decode()) for sample in family.samples}
                     for parse, content in ((parse_openmetrics, text), (text_string_to_metric_families, plain)))
    assert found == wanted


def test_compilations_count_the_start_before_any_request() -> None:
    assert samples(Metrics("m", INFO))["jaxpaged:compilations_total"] == 2


def test_engine_stats_become_gauges_counters_and_histograms() -> None:
    metrics = Metrics("m", INFO)
    metrics.record_stats(EngineStats(
        num_running=3, num_waiting=2, blocks_used=16, blocks_total=64, kv_slots_held=256, kv_slots_empty=64,
        num_preemptions=5, blocks_swapped_out=9, blocks_swapped_in=8, padding_tokens=7, compilations=3,
        device_idle_seconds=0.25, step_seconds=(("decode", 0.02), ("mixed", 0.2)), step_tokens=(3, 64)))
    found = samples(metrics)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 2
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] == 0.25
    assert found["jaxpaged:kv_internal_fragmentation_ratio"] == 0.25
    assert found["vllm:num_preemptions_total"] == 5
    assert (found["jaxpaged:blocks_swapped_out_total"], found["jaxpaged:blocks_swapped_in_total"]) == (9, 8)
    assert found["jaxpaged:padding_tokens_total"] == 7
    assert found["jaxpaged:compilations_total"] == 3
    assert found["jaxpaged:device_idle_seconds_total"] == 0.25
    assert found["jaxpaged:step_seconds_count decode"] == 1 and found["jaxpaged:step_seconds_sum mixed"] == 0.2
    assert found["vllm:iteration_tokens_total_sum"] == 67


@settings(max_examples=50, deadline=None)
@given(st.lists(st.builds(
    EngineStats, num_preemptions=st.integers(-5, 100), padding_tokens=st.integers(-5, 100),
    device_idle_seconds=st.floats(allow_nan=True, allow_infinity=False), blocks_used=st.integers(-1, 200),
    blocks_total=st.integers(-1, 100), kv_slots_held=st.integers(-1, 9), kv_slots_empty=st.integers(-1, 9),
    step_seconds=st.just((("decode", float("nan")), ("unheard of", 1.0), ("mixed", -1.0)))), max_size=8))
def test_counters_never_go_down_and_shares_stay_shares_whatever_the_engine_says(history: list[EngineStats]) -> None:
    metrics = Metrics("m", INFO)
    before = samples(metrics)
    for stats in history:
        metrics.record_stats(stats)
        after = samples(metrics)
        for name, value in after.items():
            if name.partition(" ")[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert value >= before[name]
        assert 0 <= after["vllm:kv_cache_usage_perc"] <= 1
        assert 0 <= after["jaxpaged:kv_internal_fragmentation_ratio"] <= 1
        before = after


def test_a_request_counts_once_whatever_its_n() -> None:
    metrics = Metrics("m", INFO, prefix_caching=True)
    metrics.start_request("r", prompt_tokens=40, n=2, max_tokens=8, arrival_time=10.0)
    for count in ((0, 1), (1, 1)):
        metrics.record_outputs(ProcessedOutputs(new_tokens=[NewTokens("r", *count, 32)]), 10.5)
    metrics.record_outputs(ProcessedOutputs(new_tokens=[NewTokens("r", 0, 1, 32)]), 10.6)
    metrics.record_outputs(ProcessedOutputs(new_tokens=[NewTokens("r", 1, 2, 32)]), 10.7)
    times = RequestMetrics(arrival_time=10.0, first_scheduled_time=10.25, first_token_time=10.5, last_token_time=10.75,
                           finished_time=10.75)
    metrics.record_outputs(ProcessedOutputs(
        finished=[FinishedRequest("r", "length", times)]), 10.75)
    metrics.abort_request("r", 99.0)  # an end comes once
    metrics.record_outputs(ProcessedOutputs(new_tokens=[NewTokens("r", 0, 5, 32)]), 99.0)
    found = samples(metrics)
    assert found["vllm:prompt_tokens_total"] == found["vllm:prefix_cache_queries_total"] == 40
    assert found["vllm:prompt_tokens_cached_total"] == found["vllm:prefix_cache_hits_total"] == 32
    assert found["vllm:generation_tokens_total"] == 5
    assert {name: value for name, value in found.items() if name.startswith("vllm:request_success_total")} == {
        "vllm:request_success_total stop": 0, "vllm:request_success_total length": 1,
        "vllm:request_success_total abort": 0, "vllm:request_success_total error": 0}
    for name, total in (("vllm:time_to_first_token_seconds", 0.5), ("vllm:e2e_request_latency_seconds", 0.75),
                        ("vllm:request_queue_time_seconds", 0.25), ("vllm:request_prefill_time_seconds", 0.25),
                        ("vllm:request_decode_time_seconds", 0.25), ("vllm:request_prompt_tokens", 40),
                        ("vllm:request_generation_tokens", 5), ("vllm:request_params_n", 2),
                        ("vllm:request_params_max_tokens", 8)):
        assert (found[name + "_count"], found[name + "_sum"]) == (1, total), name
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        assert found[name + "_count"] == 3
        assert abs(found[name + "_sum"] - 0.3) < 1e-9


def test_an_aborted_request_without_a_token_has_no_first_token_time() -> None:
    metrics = Metrics("m", INFO)
    metrics.start_request("r", prompt_tokens=40, n=1, max_tokens=8, arrival_time=0.0)
    metrics.abort_request("r", 1.0)
    found = samples(metrics)
    assert found["vllm:request_success_total abort"] == 1
    assert found["vllm:prompt_tokens_total"] == found["vllm:time_to_first_token_seconds_count"] == 0


def test_the_snapshot_agrees_with_the_text() -> None:
    metrics = Metrics("m", INFO)
    metrics.start_request("r", prompt_tokens=40, n=1, max_tokens=8, arrival_time=0.0)
    metrics.record_outputs(ProcessedOutputs(
        new_tokens=[NewTokens("r", 0, 3, 0)],
        finished=[FinishedRequest("r", "stop", RequestMetrics(arrival_time=0.0))]), 1.0)
    values = {value.name: value for value in metrics.snapshot()}
    assert (values["vllm:generation_tokens"].kind, values["vllm:generation_tokens"].value) == ("counter", 3)
    histogram = values["vllm:request_generation_tokens"]
    assert (histogram.kind, histogram.count, histogram.value) == ("histogram", 1, 3)
    assert histogram.buckets is not None and histogram.buckets["2.0"] == 0 and histogram.buckets["5.0"] == 1
    assert {value.name for value in metrics.snapshot()} >= GAUGES | COUNTERS | HISTOGRAMS


def test_the_log_line_comes_only_with_work() -> None:
    metrics = Metrics("m", INFO)
    assert metrics.log_line(1e9) is None
    metrics.start_request("r", prompt_tokens=40, n=1, max_tokens=8, arrival_time=0.0)
    metrics.record_outputs(ProcessedOutputs(new_tokens=[NewTokens("r", 0, 10, 0)]), 1.0)
    metrics.record_stats(EngineStats(num_running=1, blocks_used=32, blocks_total=64))
    line = metrics.log_line(1e9 + 10)
    assert line is not None
    assert "prompt 4.0 tokens/s, generation 1.0 tokens/s, running 1, waiting 0" in line and "50.0 %" in line
    metrics.record_stats(EngineStats())
    assert metrics.log_line(1e9 + 20) is None


def test_the_blocks_of_each_kv_group() -> None:
    metrics = Metrics("m", replace(INFO, kv_groups=(KVGroup(), KVGroup(4096, 2))))
    metrics.record_stats(EngineStats(group_blocks_used=(5, 8)))
    text = metrics.exposition()[0].decode()
    found = {sample.labels["window"]: sample.value for family in text_string_to_metric_families(text)
             for sample in family.samples if sample.name == "jaxpaged:kv_group_blocks_used"}
    assert found == {"all": 5, "4096": 8}
