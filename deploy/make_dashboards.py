"""Writes grafana/*.json, to be imported into Grafana: `python deploy/make_dashboards.py`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "grafana"
WHERE = '{model_name=~"$model", instance=~"$instance"}'
WIDTH, HEIGHT = 12, 8  # of a panel; a row of Grafana's grid has 24 columns


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph: a title, a unit of Grafana's, and queries with their legends."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str = ""


def rate(counter: str, by: str = "instance", where: str = WHERE) -> str:
    return f"sum by ({by}) (rate({counter}{where}[$__rate_interval]))"


def quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'le')})", f"P{100 * share:g}")
                 for share in (0.5, 0.9, 0.99))


def mean(histogram: str) -> str:
    return f"{rate(f'{histogram}_sum')} / {rate(f'{histogram}_count')}"


RUNNING = (f"sum by (instance) (vllm:num_requests_running{WHERE})", "running, {{instance}}")
WAITING = (f"sum by (instance) (vllm:num_requests_waiting{WHERE})", "waiting, {{instance}}")
TOKENS = Panel("Tokens", "short", (
    (rate("vllm:generation_tokens_total"), "generated, {{instance}}"),
    (rate("vllm:prompt_tokens_total"), "of prompts, {{instance}}")), "Per second.")
REQUESTS = Panel("Requests now", "short", (RUNNING, WAITING))
USAGE = Panel("KV blocks in use", "percentunit", (
    (f"max by (instance) (vllm:kv_cache_usage_perc{WHERE})", "{{instance}}"),))
FIRST = Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds"))
BETWEEN = Panel("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds"))
ENDS = Panel("Requests ended", "reqps", (
    (rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),))

DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "overview": ("jaxpaged: overview", (TOKENS, REQUESTS, FIRST, BETWEEN, USAGE, ENDS)),
    "requests": ("jaxpaged: requests", (
        FIRST, BETWEEN, ENDS,
        Panel("Arrival to end", "s", quantiles("vllm:e2e_request_latency_seconds")),
        Panel("Arrival to first step", "s", quantiles("vllm:request_queue_time_seconds")),
        Panel("First step to first token", "s", quantiles("vllm:request_prefill_time_seconds")),
        Panel("First token to last", "s", quantiles("vllm:request_decode_time_seconds")),
        Panel("Prompt tokens of a request", "short", quantiles("vllm:request_prompt_tokens")),
        Panel("Generated tokens of a request", "short", quantiles("vllm:request_generation_tokens")),
        Panel("Choices and limits that requests ask for, on average", "short", (
            (mean("vllm:request_params_n"), "n, {{instance}}"),
            (mean("vllm:request_params_max_tokens"), "max_tokens, {{instance}}"))))),
    "kv-memory": ("jaxpaged: KV memory", (
        USAGE,
        Panel("KV slots held but empty", "percentunit", (
            (f"max by (instance) (jaxpaged:kv_internal_fragmentation_ratio{WHERE})", "{{instance}}"),)),
        Panel("KV blocks in use, by the window of their layers", "short", (
            (f"sum by (instance, window) (jaxpaged:kv_group_blocks_used{WHERE})", "{{window}}, {{instance}}"),)),
        Panel("Prompt tokens found in the prefix cache", "percentunit", (
            (f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}", "{{instance}}"),)),
        Panel("Preemptions", "ops", ((rate("vllm:num_preemptions_total"), "{{instance}}"),)),
        Panel("Blocks copied to host memory and back", "ops", (
            (rate("jaxpaged:blocks_swapped_out_total"), "out, {{instance}}"),
            (rate("jaxpaged:blocks_swapped_in_total"), "in, {{instance}}"))))),
    "scheduler": ("jaxpaged: scheduler", (
        REQUESTS,
        Panel("Time of a step, on average", "s", (
            (f"{rate('jaxpaged:step_seconds_sum', 'kind')} / {rate('jaxpaged:step_seconds_count', 'kind')}",
             "{{kind}}"),)),
        Panel("Steps", "ops", ((rate("jaxpaged:step_seconds_count", "kind"), "{{kind}}"),)),
        Panel("Tokens in a step", "short", quantiles("vllm:iteration_tokens_total")),
        Panel("Rows of steps without a token", "ops", ((rate("jaxpaged:padding_tokens_total"), "{{instance}}"),)),
        Panel("Time in which the device waited although there was work", "percentunit", (
            (rate("jaxpaged:device_idle_seconds_total"), "{{instance}}"),)),
        Panel("Programs compiled or loaded", "short", (
            (f"sum by (instance) (jaxpaged:compilations_total{WHERE})", "{{instance}}"),),
            "Constant once a server is ready."))),
    "replicas": ("jaxpaged: replicas", (
        Panel("Servers that answer", "short", (('up{job="jaxpaged", instance=~"$instance"}', "{{instance}}"),)),
        Panel("Requests now", "short", tuple(
            (query.replace("(instance)", "(instance, engine)"), legend + " {{engine}}")
            for query, legend in (RUNNING, WAITING))),
        Panel("Tokens generated", "short", (
            (rate("vllm:generation_tokens_total", "instance, engine"), "{{instance}} {{engine}}"),), "Per second."),
        Panel("P99 of the time to first token", "s", (
            ("histogram_quantile(0.99, "
             f"{rate('vllm:time_to_first_token_seconds_bucket', 'instance, engine, le')})",
             "{{instance}} {{engine}}"),)),
        Panel("KV blocks in use", "percentunit", (
            (f"max by (instance, engine) (vllm:kv_cache_usage_perc{WHERE})", "{{instance}} {{engine}}"),)),
        Panel("Requests that failed", "reqps", (
            (rate("vllm:request_success_total", "instance, engine",
                  WHERE.replace("}", ', finished_reason="error"}')), "{{instance}} {{engine}}"),)))),
}


def dashboard(name: str) -> dict[str, Any]:
    """Grafana's JSON model of one dashboard."""
    title, panels = DASHBOARDS[name]
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "uid": f"jaxpaged-{name}", "title": title, "tags": ["jaxpaged"], "timezone": "browser", "schemaVersion": 38,
        "refresh": "10s", "time": {"from": "now-30m", "to": "now"}, "editable": True,
        "links": [{"type": "dashboards", "tags": ["jaxpaged"], "title": "jaxpaged", "asDropdown": False,
                   "keepTime": True, "includeVars": True}],
        "templating": {"list": [
            {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
            *({"name": variable, "type": "query", "datasource": source, "refresh": 2, "multi": True,
               "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
               "query": {"query": f"label_values(vllm:num_requests_running, {label})", "refId": variable}}
              for variable, label in (("model", "model_name"), ("instance", "instance")))]},
        "panels": [{
            "id": index + 1, "type": "timeseries", "title": panel.title, "description": panel.text,
            "datasource": source, "gridPos": {"x": index % 2 * WIDTH, "y": index // 2 * HEIGHT, "w": WIDTH,
                                              "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10}},
                            "overrides": []},
            "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
            "targets": [{"refId": chr(ord("A") + number), "datasource": source, "expr": query, "legendFormat": legend}
                        for number, (query, legend) in enumerate(panel.queries)],
        } for index, panel in enumerate(panels)],
    }


def text(name: str) -> str:
    """The file of one dashboard."""
    return json.dumps(dashboard(name), indent=1) + "\n"


if __name__ == "__main__":
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(text(name))
