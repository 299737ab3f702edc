"""The engine's configuration: one frozen value, made from flags or keyword arguments and checked here.

Each field is one keyword of `LLM` and one flag of the server; `metadata` holds the flag's help text and choices.
"""

import difflib
import os
from dataclasses import dataclass, field, fields
from typing import Any

from jaxpaged.core.compatibility import UNSUPPORTED_CONFIG
from jaxpaged.core.errors import ConfigError
from jaxpaged.core.flags import flag_of
from jaxpaged.core.quantization_methods import AT_LOAD, METHODS
from jaxpaged.core.reasoning import REASONING_FORMATS
from jaxpaged.core.sampling_params import MAX_N

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_SWAP_BYTES = 4 * 2**30  # on GPU
MAX_SWAP_GIB = 2**20
BLOCK_SIZES = (16, 32, 64, 128)
DEFAULT_MEMORY_SHARE = 0.9
MAX_LOGPROBS = 1000


def _flag(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of the engine. What it learns later is never written back here.

    None means "chosen from the device and the model"; the start-up line says what was chosen.

    Raises:
        ConfigError: a value that cannot work, or one that is not supported yet; the text says what to change.
    """

    model: str = _flag(DEFAULT_MODEL, "directory in Hugging Face layout, .gguf file, hub id, or the default model",
                       group="model")
    tokenizer: str | None = _flag(None, "directory, .gguf file or hub id of the tokenizer, if not the model's",
                                  group="model")
    revision: str | None = _flag(None, "branch, tag or commit of a hub model", group="model")
    download_dir: str | None = _flag(None, "directory for downloads (default: the user's cache)", group="model")
    hf_overrides: dict[str, Any] | None = _flag(None, "JSON object with values to override in config.json",
                                                group="model")
    dtype: str = _flag("auto", "dtype of weights and activations; auto: the checkpoint's on GPU, float32 on CPU",
                       choices=("auto", "float32", "bfloat16", "float16"), group="model")
    max_model_len: int | None = _flag(None, "longest prompt plus output in tokens (default: the model's)",
                                      group="model")
    quantization: str | None = _flag(
        None, "none: all weights lie in memory in --dtype (default: on CPU those stored in 16 bits, in GGUF's "
        "blocks of Q4_0, Q4_1, Q8_0 and Q4_K to Q6_K, or in groups of 4 or 8 bits, stay so, with the results of "
        "float32); int8 and fp8 quantize the layers of a plain checkpoint as they are loaded, on a CPU; another "
        "method's name is checked against the checkpoint's",
        choices=("none", *dict.fromkeys((*METHODS, *AT_LOAD))), group="model")
    load_format: str = _flag("auto", "format of the weights", choices=("auto", "safetensors", "gguf"), group="model")
    seed: int | None = _flag(None, "seed of requests that set none", group="model")
    chat_template: str | None = _flag(None, "file with a chat template, or the template itself", group="model")
    chat_template_content_format: str = _flag(
        "auto", "form in which the chat template reads content: a string, or a list of parts as OpenAI's API has it; "
        "auto: found out at start", choices=("auto", "string", "openai"), group="model")
    reasoning_parser: str | None = _flag(
        None, "how the model marks its reasoning, which precedes structured output and which chats return apart: in "
        "<think> tags, for models that always reason (deepseek_r1) or that open the tag themselves (qwen3), or in "
        "[THINK] tags (mistral)", choices=tuple(REASONING_FORMATS), group="model")
    generation_config: str = _flag("auto", "sampling defaults; auto: from the model's files; vllm: the API's",
                                   choices=("auto", "vllm"), group="model")
    device: str = _flag("auto", "device to run on", choices=("auto", "cpu", "cuda"), group="memory")
    block_size: int = _flag(16, "tokens in one KV block", choices=BLOCK_SIZES, group="memory")
    gpu_memory_utilization: float | None = _flag(
        None, "share of the device's memory to use, allocated at start; engines that share a GPU split it this way "
        f"(default: {DEFAULT_MEMORY_SHARE}; on CPU the pool is 2 GiB, or a quarter of the memory the process may use "
        "if that is less)", group="memory")
    kv_cache_memory_bytes: int | None = _flag(None, "size of the KV pool in bytes, instead of a share", group="memory")
    num_gpu_blocks_override: int | None = _flag(
        None, "number of KV blocks, instead of a share; for a model with several KV groups, units of its pool",
        group="memory")
    kv_cache_dtype: str = _flag("auto", "dtype of the KV pool; auto: the model's; int8 and fp8 hold about twice "
                                "as many tokens as bfloat16, with a scale per token and head",
                                choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8"), group="memory")
    cpu_attention: str = _flag(
        "auto", "attention on CPU: a native kernel, compiled at the first start, or XLA; auto: native where it can be "
        "built", choices=("auto", "native", "xla"), group="memory")
    cpu_linear: str = _flag("auto", "matrix products on CPU, likewise", choices=("auto", "native", "xla"),
                            group="memory")
    gpu_attention: str = _flag(
        "auto", "how Pallas lowers attention for a GPU; mosaic: steps of few tokens by Mosaic GPU, on one Hopper GPU; "
        "auto: mosaic there, if a short trial at start finds its results right; neither has been timed on a GPU yet",
        choices=("auto", "triton", "mosaic"), group="memory")
    swap_space: str | None = _flag(
        None, "host memory for evicted KV blocks in GiB, as 16 or 16G (default: 4; on CPU 0)", group="memory")
    preemption_mode: str = _flag("recompute", "KV blocks of a preempted request: compute them again, or hold them in "
                                 "--swap-space until it resumes",
                                 choices=("recompute", "swap"), group="memory")
    compiled: str | None = _flag(None, "directory of programs compiled ahead of time", group="memory")
    enforce_eager: bool = _flag(False, "compile each program at first use instead of at start", group="memory")
    max_num_seqs: int | None = _flag(None, "maximum number of running requests (default: 256; 32 on CPU)",
                                     group="scheduling")
    max_num_batched_tokens: int | None = _flag(None, "maximum number of tokens in one step (default: 8192; 256 on CPU)",
                                               group="scheduling")
    enable_prefix_caching: bool = _flag(True, "reuse the KV blocks of equal prompt prefixes", group="scheduling")
    enable_chunked_prefill: bool = _flag(True, "process long prompts in chunks beside running requests",
                                         group="scheduling")
    scheduling_policy: str = _flag("fcfs", "order of waiting requests: by arrival (fcfs), by their priority, or by "
                                   "shortest predicted work", choices=("fcfs", "priority", "predicted"),
                                   group="scheduling")
    batch_invariant: bool = _flag(False, "bitwise equal results whatever else is in the batch", group="scheduling")
    enable_embeddings: bool = _flag(False, "serve /v1/embeddings; compiles one more program", group="model")
    logprobs_mode: str = _flag("raw_logprobs", "log probabilities before or after penalties and temperature",
                               choices=("raw_logprobs", "processed_logprobs"), group="model")
    tensor_parallel_size: int = _flag(1, "devices to shard each layer over", short="-tp", group="parallel")
    pipeline_parallel_size: int = _flag(1, "devices to spread the layers over", short="-pp", group="parallel")
    data_parallel_size: int = _flag(1, "copies of the model", short="-dp", group="parallel")
    enable_expert_parallel: bool = _flag(False, "shard experts over the devices", group="parallel")
    max_waiting_requests: int = _flag(1024, "maximum length of the waiting queue; further requests are refused",
                                      group="limits")
    max_n: int = _flag(128, "largest n and best_of of a request", group="limits")
    max_logprobs: int = _flag(20, "largest logprobs of a request: alternatives per position", group="limits")

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("model must name a directory, a .gguf file or a hub id")
        for item in fields(self):
            choices = item.metadata.get("choices")
            if choices and getattr(self, item.name) not in (*choices, item.default):
                raise ConfigError(f"{item.name} must be one of {', '.join(map(str, choices))}, "
                                  f"not {getattr(self, item.name)!r}")
            if isinstance(item.default, bool) and not isinstance(getattr(self, item.name), bool):
                raise ConfigError(f"{item.name} must be True or False, not {getattr(self, item.name)!r}")
        for name in ("max_model_len", "kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens",
                     "max_waiting_requests", "tensor_parallel_size", "pipeline_parallel_size",
                     "data_parallel_size"):
            _check_positive(name, getattr(self, name))
        if self.num_gpu_blocks_override is not None:
            _check_positive("num_gpu_blocks_override", self.num_gpu_blocks_override, minimum=2)
        share = self.gpu_memory_utilization
        if share is not None and not (isinstance(share, (int, float)) and 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {share!r}")
        for name, minimum, maximum in (("max_logprobs", 0, MAX_LOGPROBS), ("max_n", 1, MAX_N)):
            value = getattr(self, name)
            if type(value) is not int or not minimum <= value <= maximum:
                raise ConfigError(f"{name} must be an integer from {minimum} to {maximum}, not {value!r}")
        if self.seed is not None and not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an integer, not {self.seed!r}")
        self.swap_bytes("cpu")
        self._refuse_unsupported()

    def swap_bytes(self, platform: str) -> int:
        """Bytes of host memory for evicted blocks.

        Raises:
            ConfigError: swap_space is not a number of GiB.
        """
        if self.swap_space is None:
            return 0 if platform == "cpu" else DEFAULT_SWAP_BYTES
        text = str(self.swap_space).strip().upper().removesuffix("B").removesuffix("I").removesuffix("G")
        try:
            size = float(text)
        except ValueError:
            size = -1
        if not 0 <= size < MAX_SWAP_GIB:
            raise ConfigError(f"swap_space must be a number of GiB, as 16 or 16G, not {self.swap_space!r}")
        return int(size * 2**30)

    def _refuse_unsupported(self) -> None:
        for name in UNSUPPORTED_CONFIG:
            item = type(self).__dataclass_fields__[name]
            value = getattr(self, name)
            if value != item.default:
                raise ConfigError(f"{flag_of(name)} {value} is not supported yet; leave it out")

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "EngineConfig":
        """Make a config from keyword arguments; a path may be a `Path`.

        Raises:
            ConfigError: an unknown keyword, with the nearest one, or a bad value.
        """
        names = [item.name for item in fields(cls)]
        for name in kwargs:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"unknown engine argument {name}{hint}")
        return cls(**{name: os.fspath(value) if isinstance(value, os.PathLike) else value
                      for name, value in kwargs.items()})


def _check_positive(name: str, value: object, minimum: int = 1) -> None:
    if value is not None and (type(value) is not int or value < minimum):
        raise ConfigError(f"{name} must be an integer of at least {minimum}, not {value!r}")
