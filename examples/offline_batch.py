"""Complete a batch of prompts in this process; they share the steps of one engine, and the blocks of equal prefixes.

    python examples/offline_batch.py
"""

import jaxpaged

PREFIX = "List of capitals. Germany: Berlin. Spain: Madrid. Norway: Oslo. "


def main() -> None:
    prompts = [f"{PREFIX}{country}:" for country in ("France", "Italy", "Japan", "Greece")]
    greedy = jaxpaged.SamplingParams(temperature=0, max_tokens=8, stop=["."])
    drawn = jaxpaged.SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=1, n=2)
    with jaxpaged.LLM(model="smollm2-135m-instruct") as llm:
        for output in llm.generate(prompts, greedy):  # in the order of the prompts
            print(f"{output.prompt.removeprefix(PREFIX)}{output.outputs[0].text}")
        [output] = llm.generate(prompts[:1], drawn)
        print([choice.text for choice in output.outputs], f"{output.num_cached_tokens} prompt tokens were cached")


if __name__ == "__main__":
    main()
