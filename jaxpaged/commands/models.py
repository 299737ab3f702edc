"""`python -m jaxpaged.models`: what can be served, by the architecture that config.json names."""

import argparse
from collections.abc import Sequence

from jaxpaged.commands.quiet_jax import import_jax


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpaged.models") -> int:
    """Run the command and return its exit code."""
    argparse.ArgumentParser(prog=prog, description="Print the supported architectures, as config.json names them, and "
                            "what of each is supported.").parse_args(argv)
    import_jax()
    for name, facts in support_matrix().items():
        print(name)
        for key, value in facts.items():
            print(f"  {key:<11}{value}")
    return 0


def support_matrix() -> dict[str, dict[str, str]]:
    """For each architecture what is supported of it, from the registry and the tables of formats."""
    from jaxpaged.loading.gguf_checkpoint import gguf_names  # slow to import
    from jaxpaged.loading.hf_checkpoint import reads_quantized
    from jaxpaged.models.registry import FAMILIES

    rows = {}
    for name, family in sorted(FAMILIES.items()):
        files = gguf_names(name)
        rows[name] = {
            "models": family.models,
            "model_type": family.model_type,
            "sizes": family.sizes,
            "formats": "safetensors, PyTorch .bin, Orbax" + (f", GGUF ({', '.join(files)})" if files else ""),
            "quantized": "; ".join(
                ["AWQ, GPTQ, compressed-tensors, fp8: as stored on a CPU"] * reads_quantized(family)
                + ["GGUF: Q4_0, Q4_1, Q8_0, Q4_K to Q6_K as stored on a CPU, others widened"] * bool(files)) or "no",
            "parallel": "tensor",
            "windows": family.windows or "no",
            "tested by": family.tested,
        }
    return rows
