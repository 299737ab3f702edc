"""Prometheus' configuration, rules and alerts, and Grafana's dashboards: by Debian's prometheus, from a live server."""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxpaged.frontend.metrics import Metrics
from tests.frontend.test_metrics import INFO
from tests.support.live_server import ROOT, LiveServer, write_tiny_model

DEPLOY = ROOT / "deploy"
needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="prometheus is not installed: apt install prometheus")


def dashboards() -> Any:
    spec = spec_from_file_location("make_dashboards", DEPLOY / "make_dashboards.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = dashboards()


def queries() -> Iterator[tuple[str, str]]:
    """The panel and the text of each query of the dashboards."""
    for name, (_, panels) in MADE.DASHBOARDS.items():
        for panel in panels:
            for query, _ in panel.queries:
                yield f"{name}, {panel.title}", query


@pytest.mark.parametrize("name", MADE.DASHBOARDS)
def test_the_dashboards_are_those_that_the_script_makes(name: str) -> None:
    assert (DEPLOY / "grafana" / f"{name}.json").read_text() == MADE.text(name), "python deploy/make_dashboards.py"
    assert {file.stem for file in (DEPLOY / "grafana").iterdir()} == set(MADE.DASHBOARDS)


def test_rules_and_dashboards_name_metrics_that_are_there() -> None:
    exposed = generate_latest(Metrics("m", INFO).registry).decode()
    found = {sample.name for family in text_string_to_metric_families(exposed) for sample in family.samples}
    rules = [rule for group in yaml.safe_load((DEPLOY / "rules.yml").read_text())["groups"] for rule in group["rules"]]
    found |= {rule["record"] for rule in rules if "record" in rule}
    texts = [rule["expr"] for rule in rules] + [query for _, query in queries()]
    named = {name for text in texts for name in re.findall(r"\b(?:vllm|jaxpaged|instance):[\w:]+", text)}
    assert len(named) > 20 and named <= found


@needs_prometheus
def test_every_alert_fires_and_clears() -> None:
    for command in (["check", "config", "deploy/prometheus.yml"], ["test", "rules", "tests/deploy/rules_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = (ROOT / "tests" / "deploy" / "rules_test.yml").read_text()
    alerts = re.findall(r"alert: (\w+)", (DEPLOY / "rules.yml").read_text())
    for alert in alerts:
        assert f"        alertname: {alert}\n        exp_alerts" in tested, f"{alert} is never made to fire"
        assert re.search(rf"{{eval_time: \w+, alertname: {alert}}}\n", tested), f"{alert} is never made to clear"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that has watched a server under load for half a minute."""
    folder = tmp_path_factory.mktemp("prometheus")
    model = write_tiny_model(folder / "tiny")
    with LiveServer(folder / "log", str(model), "--enforce-eager", "--max-num-seqs", "4",
                    "--max-num-batched-tokens", "16") as server:
        server.wait_ready()
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(DEPLOY / "rules.yml", folder)
        url = f"http://127.0.0.1:{free_port()}"
        with (folder / "prometheus.log").open("wb") as log:
            process = subprocess.Popen(
                ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
                 f"--web.listen-address={url.removeprefix('http://')}"], stdout=log, stderr=log)
        try:
            end = time.monotonic() + 30

            def ask(number: int) -> None:
                while time.monotonic() < end:
                    answer = httpx.post(f"{server.url}/v1/completions", timeout=60, json={
                        "prompt": "the same for all, over and over " * 2 + str(number % 3), "max_tokens": 20, "n": 2})
                    assert answer.status_code == 200

            with ThreadPoolExecutor(6) as threads:
                list(threads.map(ask, range(6)))
            yield url
        finally:
            process.terminate()
            process.wait(30)


def query(url: str, text: str) -> list[Any]:
    for variable, value in (("$model", ".*"), ("$instance", ".*"), ("$__rate_interval", "20s")):
        text = text.replace(variable, value)
    answer = httpx.get(f"{url}/api/v1/query", params={"query": text}, timeout=30).json()
    assert answer["status"] == "success", (text, answer)
    return list(answer["data"]["result"])


@pytest.mark.slow
@needs_prometheus
def test_every_rule_is_evaluated_and_every_panel_shows_data(prometheus: str) -> None:
    groups = httpx.get(f"{prometheus}/api/v1/rules", timeout=30).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 14
    for rule in rules:
        assert rule["health"] == "ok", rule
        assert rule["type"] == "alerting" or query(prometheus, rule["name"]), f"{rule['name']} has no value"
    assert not [rule for rule in rules if rule.get("state") == "firing"]
    for panel, text in queries():
        found = [float(item["value"][1]) for item in query(prometheus, text)]
        assert any(value >= 0 for value in found) or "error" in text, f"{panel}: no data from {text}"
        assert not any(value < 0 for value in found), f"{panel}: {found}"


@pytest.mark.slow
@needs_prometheus
def test_names_of_vllm_s_own_dashboard_are_there(prometheus: str) -> None:
    """Those that its published Grafana dashboard asks for."""
    for name in ("vllm:e2e_request_latency_seconds_bucket", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
                 "vllm:time_per_output_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
                 "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:time_to_first_token_seconds_bucket",
                 "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:request_prompt_tokens_bucket",
                 "vllm:request_generation_tokens_bucket", "vllm:request_success_total",
                 "vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum",
                 "vllm:request_decode_time_seconds_sum"):
        assert query(prometheus, f'{name}{{model_name=~".+"}}'), name
