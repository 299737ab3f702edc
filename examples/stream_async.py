"""Stream two requests at once out of one engine with AsyncLLM, and stop one of them early.

    python examples/stream_async.py
"""

import asyncio

import jaxpaged

DELTA = jaxpaged.RequestOutputKind.DELTA  # each output holds only what is new


async def stream(llm: jaxpaged.AsyncLLM, prompt: str, most: int) -> str:
    params = jaxpaged.SamplingParams(temperature=0, max_tokens=24, output_kind=DELTA)
    parts: list[str] = []
    async for output in llm.generate(prompt, params):
        parts.append(output.outputs[0].text)
        if len(parts) == most:
            break  # leaving the loop stops the request
    return prompt + "".join(parts)


async def main() -> None:
    async with jaxpaged.AsyncLLM(model="smollm2-135m-instruct") as llm:
        stories = await asyncio.gather(stream(llm, "Once upon a time", most=24), stream(llm, "The sea is", most=4))
    print(*stories, sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
