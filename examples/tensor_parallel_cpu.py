"""Share one model between three CPU devices, as between GPUs, and compare with a single device.

    python examples/tensor_parallel_cpu.py

The default model has nine query heads and three KV heads, so three devices get three and one each. On one CPU this is
no faster; it shows that the result is the same before there are GPUs.
"""

import jaxpaged

ENGINE = {"model": "smollm2-135m-instruct", "device": "cpu", "max_num_seqs": 2, "max_num_batched_tokens": 8,
          "max_model_len": 256, "enforce_eager": True}  # compiles only what is used


def complete(devices: int) -> tuple[int, ...]:
    params = jaxpaged.SamplingParams(temperature=0, max_tokens=8)
    with jaxpaged.LLM(tensor_parallel_size=devices, **ENGINE) as llm:
        [output] = llm.generate("The capital of France is", params, use_tqdm=False)
    print(f"tensor_parallel_size={devices}:{output.outputs[0].text!r}")
    return output.outputs[0].token_ids


def main() -> None:
    # The larger number first: a process splits its CPU once, before JAX starts.
    assert complete(devices=3) == complete(devices=1)


if __name__ == "__main__":
    main()
