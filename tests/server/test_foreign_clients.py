"""Clients that others wrote, each in an environment of its own: what they need would not fit beside ours."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.foreign_environments import environment, run
from tests.support.live_server import LiveServer
from tests.support.tiny_llama import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FUZZING_SECONDS = 300
LOAD = 40  # requests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("foreign") / "model")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(tmp_path_factory.mktemp("foreign-log") / "log", str(model), "--served-model-name", "m",
                    "--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--num-gpu-blocks-override", "129",
                    "--enable-embeddings", "--enable-reset-prefix-cache", "--enable-auto-tool-choice",
                    "--tool-call-parser", "hermes", "--disable-access-log") as live:
        yield live.wait_ready()


def test_schemathesis_finds_no_server_error(server: LiveServer, tmp_path: Path) -> None:
    """What the published schema allows, and what it does not: nothing ends in a 5xx."""
    programs = environment("schemathesis", "schemathesis>=4")
    run(programs / "st", "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error",
        "--max-time", str(FUZZING_SECONDS), "--request-timeout", "60", "--continue-on-failure", "--no-color",
        "--suppress-health-check", "all", cwd=tmp_path, timeout=FUZZING_SECONDS + 600)
    server.wait_idle(60)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert "Traceback" not in server.log


CASES = [("The sea ", "is deep"), ("abc", "abcabc"), ("ü ", "ß?"), ("Two and two?\nAnswer:", " four"), ("x", "y")]


def test_lm_eval_scores_as_transformers_does(server: LiveServer, model: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the reference needs PyTorch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    programs = environment("lm_eval", "lm_eval[api]>=0.4.9", "transformers")
    (tmp_path / "cases.jsonl").write_text("".join(
        json.dumps({"context": context, "continuation": continuation}) + "\n" for context, continuation in CASES))
    (tmp_path / "task.yaml").write_text(json.dumps({  # JSON is YAML
        "task": "ours", "dataset_path": "json", "dataset_kwargs": {"data_files": str(tmp_path / "cases.jsonl")},
        "test_split": "train", "output_type": "loglikelihood", "doc_to_text": "{{context}}",
        "doc_to_target": "{{continuation}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}]}))
    run(programs / "lm_eval", "run", "--model", "local-completions", "--tasks", "ours", "--include_path", tmp_path,
        "--model_args", f"model=m,base_url={server.url}/v1/completions,num_concurrent=2,max_retries=1,"
        f"tokenizer={model},tokenizer_backend=huggingface", "--log_samples", "--output_path", tmp_path / "out",
        cwd=tmp_path, env={"PATH": str(programs), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    [samples] = (tmp_path / "out").rglob("samples_ours_*.jsonl")
    found = {(sample["doc"]["context"], sample["doc"]["continuation"]): sample["resps"][0][0]
             for sample in map(json.loads, samples.read_text().splitlines())}
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for context, continuation in CASES:
        # lm_eval counts spaces at the end of a context as part of what follows
        ids, start = tokenizer(context + continuation).input_ids, len(tokenizer(context.rstrip()).input_ids)
        with torch.no_grad():
            logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(float(logprobs[index - 1, ids[index]]) for index in range(start, len(ids)))
        greedy = all(int(logprobs[index - 1].argmax()) == ids[index] for index in range(start, len(ids)))
        score, is_greedy = found[context, continuation]
        assert float(score) == pytest.approx(expected, abs=1e-3) and (str(is_greedy) == "True") == greedy


def test_guidellm_loads_the_server(server: LiveServer, model: Path, tmp_path: Path) -> None:
    programs = environment("guidellm", "guidellm>=0.8")
    before = server.metrics()["vllm:request_success_total length"]
    run(programs / "guidellm", "run", "--backend",
        f"kind=openai_http,target={server.url},model=m,request_format=/v1/completions",
        "--profile", "kind=concurrent,streams=8", "--constraint", f"kind=max_requests,count={LOAD}",
        "--tokenizer", f"kind=huggingface_auto,model={model}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console", cwd=tmp_path,
        env={"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == LOAD and not requests["errored"]
    assert all(request["output_tokens"] == 16 for request in requests["successful"])
    assert server.metrics()["vllm:request_success_total length"] - before >= LOAD
    assert "Traceback" not in server.log
