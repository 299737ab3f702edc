"""A chat with a running server through OpenAI's client, streamed.

    python -m jaxpaged.server &
    python examples/chat_openai_client.py
    python examples/chat_openai_client.py http://localhost:9000/v1
"""

import sys

import openai


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
    client = openai.OpenAI(base_url=base_url, api_key="EMPTY")
    model = client.models.list().data[0].id
    messages = [{"role": "system", "content": "Answer in one short sentence."},
                {"role": "user", "content": "Why is the sky blue?"}]
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0, stream=True,
                                            stream_options={"include_usage": True})
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} generated")


if __name__ == "__main__":
    main()
