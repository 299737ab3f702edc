"""How much one answer may hold, decided before any of it is computed."""

from collections.abc import Sequence

from jaxpaged.core.errors import RequestError
from jaxpaged.core.limits import Limits
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.frontend.input_processor import ProcessedRequest


def max_output_tokens(params: SamplingParams, num_prompts: int, limits: Limits) -> int:
    """The largest max_tokens of each choice with which a whole answer keeps within the limits; at least 1."""
    choices = num_prompts * params.num_sequences
    most = limits.max_answer_tokens // choices
    if params.logprobs is not None:
        most = min(most, limits.max_answer_logprobs // (choices * (1 + params.logprobs)))
    return max(most, 1)


def check_answer_size(requests: Sequence[ProcessedRequest], params: SamplingParams, limits: Limits, *, stream: bool,
                      echo: bool, prompt_ids: bool, prompt_logprobs: bool) -> None:
    """Refuse requests whose answer may hold too much at once.

    Args:
        stream: new tokens are sent as they come, and do not add up.
        echo, prompt_ids, prompt_logprobs: what the answer repeats of the prompt for each choice.

    Raises:
        RequestError: names the parameters and the limit.
    """
    prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    output_tokens = 0 if stream else sum(request.max_tokens * params.num_sequences for request in requests)
    repeated = prompt_tokens * params.n if echo or prompt_ids else 0
    if output_tokens + repeated > limits.max_answer_tokens:
        raise RequestError(
            f"the answer may hold {output_tokens + repeated:,} tokens, and at most {limits.max_answer_tokens:,} are "
            f"allowed: lower max_tokens or n, send fewer prompts, or leave out echo and return_token_ids",
            param="max_tokens" if output_tokens > repeated else "n")
    entries = 0
    if params.logprobs is not None:
        entries += (1 + params.logprobs) * (output_tokens + (prompt_tokens * params.n if echo else 0))
    if prompt_logprobs:
        entries += (1 + (params.prompt_logprobs or 0)) * prompt_tokens * params.n
    if entries > limits.max_answer_logprobs:
        raise RequestError(
            f"the answer may hold {entries:,} log probabilities, which are 1 plus the alternatives for each token of "
            f"each choice, and at most {limits.max_answer_logprobs:,} are allowed: lower logprobs (top_logprobs), "
            "prompt_logprobs, max_tokens or n, or send fewer prompts", param="logprobs")
