"""Hold answers to a JSON schema, a list of choices, and a regular expression.

    python examples/structured_output.py
"""

import json

import jaxpaged

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "capital": {"type": "boolean"}},
    "required": ["city", "capital"],
    "additionalProperties": False,
}


def main() -> None:
    def held_to(**form: object) -> jaxpaged.SamplingParams:
        return jaxpaged.SamplingParams(temperature=0, max_tokens=48,
                                       structured_outputs=jaxpaged.StructuredOutputsParams(**form))

    chats = [[{"role": "user", "content": text}] for text in (
        "Describe Paris as JSON.", "Is Paris in France?", "When did the French Revolution begin?")]
    forms = [held_to(json=SCHEMA), held_to(choice=["yes", "no"]), held_to(regex=r"1[0-9]{3}")]
    with jaxpaged.LLM(model="smollm2-135m-instruct") as llm:
        described, answer, year = (output.outputs[0].text for output in llm.chat(chats, forms))
    print(json.loads(described), answer, int(year))


if __name__ == "__main__":
    main()
