"""How many requests fit on an absent GPU? Needs a config.json, neither weights nor the GPU.

    python examples/plan_for_gpu.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

# The shape of an 8-billion Llama 3.1; a directory in Hugging Face layout, or a hub id, does as well.
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        for device, more in (("l40s", []), ("h200", ["-tp", "2"]), ("h200", ["--kv-cache-dtype", "fp8"])):
            # --no-compile takes an upper bound of the temporaries; without it the largest step is compiled for the GPU.
            command = [sys.executable, "-m", "jaxpaged.plan", "--model", folder, "--device", device, *more,
                       "--max-model-len", "8192", "--lengths", "2048", "8192", "--no-compile"]
            print(f"--- {' '.join([device, *more])}", flush=True)
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
