"""Write data/reference_smollm2.json: greedy ids of the reference, with margins, for a few requests.

    PYTHONPATH=. python tests/support/make_reference.py MODEL.gguf [WORKLOAD.json ...]

The requests are a few texts and the first four of each workload. `test_reference.py` computes the file's ids again.
"""

import argparse
import json
from pathlib import Path

from transformers import AutoTokenizer

from tests.support.reference_model import ReferenceModel

FILE = Path(__file__).parent / "data" / "reference_smollm2.json"
LENGTH = 48
PER_WORKLOAD = 4
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "Les élèves apprennent à écrire ; 日本語も少し。 One, two, three,",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("workloads", type=Path, nargs="*")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model.parent, gguf_file=args.model.name)
    prompts = {f"text {number}": tokenizer(text).input_ids for number, text in enumerate(TEXTS)}
    for path in args.workloads:
        workload = json.loads(path.read_text())
        for number, request in enumerate(workload["requests"][:PER_WORKLOAD]):
            prompts[f"{workload['name']} {number}"] = request["prompt_token_ids"]
    model = ReferenceModel(args.model)
    rows = []
    for name, prompt in prompts.items():
        found = model.greedy(prompt, LENGTH)
        rows.append({"name": name, "prompt_token_ids": prompt, "ids": found.ids,
                     "gaps": [round(gap, 5) for gap in found.gaps]})
        print(f"{name}: {len(prompt)} tokens, smallest margin {min(found.gaps):.2g}, {tokenizer.decode(found.ids)!r}")
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
