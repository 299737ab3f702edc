"""The methods by which the weights of a checkpoint may be quantized, as --quantization spells them."""

# Each spelling, with the name that the checkpoint's config has for the method. Which kernel computes is not asked for.
METHODS = {"awq": "awq", "awq_marlin": "awq", "gptq": "gptq", "gptq_marlin": "gptq",
           "compressed-tensors": "compressed-tensors", "fp8": "fp8", "mxfp4": "mxfp4", "gguf": "gguf"}
# Those by which plain weights can be quantized as they are loaded.
AT_LOAD = ("int8", "fp8")
# Those that a config.json may name.
IN_CONFIG = ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4")
