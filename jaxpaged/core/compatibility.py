"""Names that other servers know and this one ignores or refuses: of flags, of config fields and of request fields."""

# Flag -> whether it takes a value, and why it has no effect. Each is accepted with one warning.
OLD_FLAGS = {
    "--use-v2-block-manager": (False, "there is one block manager"),
    "--enable-dynamic-batching": (False, "continuous batching is always on"),
    "--use-contiguous-batching": (False, "continuous batching is always on"),
    "--disable-log-requests": (False, "requests are logged only with --enable-log-requests"),
    "--trust-remote-code": (False, "code in model folders is never run"),
    "--max-paddings": (True, "use --max-num-batched-tokens to bound the size of a step"),
}
# Fields of EngineConfig that accept nothing but their default so far.
UNSUPPORTED_CONFIG = ("load_format", "enable_chunked_prefill", "batch_invariant",
                      "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")

# Request field -> the key of `structured_outputs` that replaces it. Each still works; the first one is logged.
OLD_STRUCTURED_FIELDS = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
                         "guided_grammar": "grammar", "guided_json_object": "json_object"}
# Request fields that describe the caller or the server, not the text: they have no effect and are not worth a log line.
IGNORED_FIELDS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                            "guided_decoding_backend"})
# Request field -> the values that ask for nothing; any other value is refused. Some are supported by one route only.
UNSUPPORTED_FIELDS: dict[str, tuple[object, ...]] = {
    "suffix": ("",), "echo": (False,), "top_logprobs": (0,), "max_completion_tokens": (),
    "continue_final_message": (False,), "chat_template_kwargs": ({},), "parallel_tool_calls": (True, False),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "documents": ([],), "chat_template": (), "prompt_embeds": (), "modalities": (["text"],), "audio": (),
    "prediction": (), "web_search_options": (), "logits_processors": (), "kv_transfer_params": (), "adapter": (),
    "adapter_id": (), "lora_request": (), "guided_whitespace_pattern": (), "structural_tag": (),
    "thinking_token_budget": (), "vllm_xargs": ({},), "return_tokens_as_token_ids": (False,),
}
# Sampling parameter -> why it changes nothing here.
PARAMS_WITHOUT_EFFECT = {"spaces_between_special_tokens": "the decoders put no spaces there"}
# Sampling parameters that a beam search ignores, because it does not sample.
BEAM_SEARCH_IGNORES = ("temperature", "top_p", "top_k", "min_p", "seed")
