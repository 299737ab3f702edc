"""Offline use: `LLM` and `generate`, with the engine in the caller's process."""

import dataclasses
import itertools
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import jax
from tqdm import tqdm

from jaxpaged.core.config import DEFAULT_MODEL, EngineConfig
from jaxpaged.core.errors import (
    EngineDeadError,
    GenerationInterrupted,
    NotSupportedError,
    RequestError,
    first_line,
)
from jaxpaged.core.messages import EngineInfo
from jaxpaged.core.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput, WeightsUpdate
from jaxpaged.core.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.engine.batches import Prompt, in_prompt, params_of, prompts_of
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.in_memory import in_memory_model
from jaxpaged.engine.interrupts import DeferredInterrupts
from jaxpaged.execution.devices import without_caller_contexts
from jaxpaged.frontend.embeddings import EMBEDDING_PARAMS, for_embedding, normalized
from jaxpaged.frontend.front import Front, load_text_files
from jaxpaged.frontend.input_processor import ProcessedRequest

Conversation = Sequence[Mapping[str, Any]]


def print_line(line: str) -> None:
    """Show a start-up line to the user on stderr, which leaves the program's stdout alone."""
    print(line, file=sys.stderr, flush=True)


class LLM:
    """A loaded model and its engine, for batches of prompts. Calls from several threads run one after the other.

    Ctrl-C ends the running call and its requests, and leaves the LLM usable.

    Args:
        model: a directory, a .gguf file, a hub id, nothing for the default model, or a (module, params) pair of a
            `jaxpaged.models` module and the pure dict of its parameters, which are used in place.
        devices: to run on, as `jax.devices()` gives them; several share the model by tensor parallelism.
        mesh: whose devices to run on, in place of `devices`. With neither, a model in memory runs where its weights
            are, and others on JAX's default device, or on its first ones.
        configure_jax: change JAX's settings for the whole process as the server does: only the platform that is used
            is started, of a GPU's memory JAX takes the share gpu_memory_utilization, and its cache of compiled programs
            stays on. By default they are left alone; the cache is on while the engine starts.
        engine_args: fields of `EngineConfig`: the server's flags, with underscores.

    Raises:
        ConfigError, CheckpointError: with what to change.
    """

    def __init__(
        self, model: Any = DEFAULT_MODEL, *, devices: Sequence[jax.Device] | None = None,
        mesh: jax.sharding.Mesh | None = None, configure_jax: bool = False, **engine_args: Any,
    ) -> None:
        in_memory = in_memory_model(model)
        name = "in-memory" if in_memory else model
        config = EngineConfig.from_kwargs(model=name, **engine_args)
        self._config = config
        with without_caller_contexts():
            self._engine: Engine | None = Engine(
                config, print_line, model=in_memory, devices=devices, mesh=mesh, own_process=configure_jax)
        self.info: EngineInfo = self._engine.info
        self._front = Front(config, self.info, load_text_files(config, in_memory=in_memory is not None))
        self._lock = threading.Lock()  # around every use of the engine and of `_front`, except its `inputs`
        self._gone = "this LLM has been shut down; make a new one"
        self._ordinals = itertools.count()
        print_line(self.info.summary())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once.

        Args:
            prompts: a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these;
                ids may come as arrays of numpy or JAX.
            sampling_params: one for all, one for each, or None for the model's defaults.
            use_tqdm: show a progress bar.
            priority: one for each, the smaller is served first, with scheduling_policy="priority".
            sampling: fields of `SamplingParams` for all, instead of `sampling_params`.

        Returns:
            One output per prompt, in their order.

        Raises:
            RequestError: a prompt or a parameter cannot be used; no request has run. The text says which prompt.
            GenerationInterrupted: Ctrl-C; holds the outputs that were complete.
        """
        return self._run([(prompt, True) for prompt in prompts_of(prompts)], sampling_params, sampling, use_tqdm,
                         priority)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, through the model's chat template.

        Args:
            tools: that the template describes to the model, in OpenAI's form; tool calls are part of the text.
            sampling: fields of `SamplingParams` for all, instead of `sampling_params`.
        """
        one = isinstance(messages, (str, Mapping)) or not messages or isinstance(messages[0], Mapping)
        prompts: list[tuple[Prompt, bool]] = []
        for index, conversation in enumerate([messages] if one else messages):
            with in_prompt(index, 1 if one else len(messages)):
                prompts.append((self._front.inputs.render_chat(
                    conversation, tools=[dict(tool) for tool in tools] if tools else None,
                    add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
                    chat_template_kwargs=dict(chat_template_kwargs) if chat_template_kwargs else None), False))
        return self._run(prompts, sampling_params, sampling, use_tqdm)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self._front.tokenizer.hf

    def get_metrics(self) -> dict[str, float]:
        """Metrics by name, as the server's /metrics spells them; histograms as name_sum and name_count.

        It adds `jaxpaged:kv_internal_fragmentation_ratio_mean`, the mean over all steps so far, and sums over all steps
        of the blocks in use and of the blocks saved by sharing.
        """
        with self._lock:
            stats = self._live_engine().stats()
            self._front.metrics.record_stats(dataclasses.replace(stats, step_seconds=(), step_tokens=()))
            values = self._front.metrics.values()
        held = stats.kv_slots_held_sum
        values["jaxpaged:kv_internal_fragmentation_ratio_mean"] = stats.kv_slots_empty_sum / held if held else 0.0
        values["jaxpaged:kv_blocks_used_sum"] = stats.blocks_used_sum
        values["jaxpaged:kv_blocks_shared_sum"] = stats.blocks_shared_sum
        return values

    def get_params(self) -> dict[Any, Any]:
        """The weights on the device, as the nested dict that `update_weights` takes. They must not be donated."""
        return self._live_engine().get_params()

    def update_weights(
        self, params: Mapping[Any, Any], *, partial: bool = False, donate: bool = False
    ) -> WeightsUpdate:
        """Replace the weights by others of the same shapes and dtypes, from the next request on.

        Arrays that lie where the engine has its weights are used in place; others, such as those sharded over another
        mesh, are moved. Nothing is compiled.

        Args:
            params: nested dicts, or an `nnx.State`.
            partial: weights that are missing stay as they are.
            donate: the caller needs the arrays no more: those that have to be moved are freed.

        Raises:
            ConfigError: the tree, a shape or a dtype differs; the text names what.
        """
        with self._lock, DeferredInterrupts(), without_caller_contexts():
            return self._live_engine().update_weights(params, partial=partial, donate=donate)

    def sleep(self) -> None:
        """Give the memory of the KV pool back to the process until `wake_up`; cached prefixes are dropped.

        On a GPU it goes back to JAX's allocator, which this process shares; weights and programs stay.
        """
        with self._lock, DeferredInterrupts(), without_caller_contexts():
            self._live_engine().sleep()

    def wake_up(self) -> None:
        """Make the KV pool again; nothing is compiled."""
        with self._lock, DeferredInterrupts(), without_caller_contexts():
            self._live_engine().wake_up()

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """`sleep` inside, `wake_up` at the end."""
        self.sleep()
        try:
            yield
        finally:
            self.wake_up()

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes, so that later requests share nothing computed so far; always succeeds."""
        with self._lock, DeferredInterrupts():
            self._live_engine().reset_prefix_cache()
        return True

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int = 4,
        max_tokens: int = 16,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        ignore_eos: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The most probable continuations of prompts that a beam search finds.

        Args:
            beam_width: number of beams, and of choices returned.
            length_penalty, early_stopping: see `SamplingParams`.

        Returns:
            One output per prompt, its choices the best first, each with `cumulative_logprob`.
        """
        params = SamplingParams(
            n=beam_width, use_beam_search=True, max_tokens=max_tokens, length_penalty=length_penalty,
            early_stopping=early_stopping, ignore_eos=ignore_eos, logprobs=0, temperature=0)
        return self.generate(prompts, params, use_tqdm)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True, *, pooling: str = "last",
        normalize: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Embeddings of prompts, from the hidden states after the model's last norm; needs `enable_embeddings=True`.

        Args:
            prompts: see `generate`.
            pooling: "last" for the last token's state, "mean" for the mean of all.
            normalize: make vectors of length 1.

        Returns:
            One output per prompt, in their order; the vector is `output.outputs.embedding`.

        Raises:
            RequestError: a prompt cannot be used; no request has run.
        """
        if not self._config.enable_embeddings:
            raise NotSupportedError("embeddings need an LLM made with enable_embeddings=True")
        requests, batch = [], prompts_of(prompts)
        for index, prompt in enumerate(batch):
            with in_prompt(index, len(batch)):
                requests.append(for_embedding(self._front.inputs.process(
                    f"request-{next(self._ordinals)}", prompt, EMBEDDING_PARAMS), pooling))
        outputs = []
        for output in self._run_all(requests, use_tqdm):
            assert output.embedding is not None, f"{output.request_id} ended without an embedding"
            vector = tuple(normalized(output.embedding)) if normalize else output.embedding
            outputs.append(EmbeddingRequestOutput(output.request_id, output.prompt_token_ids, EmbeddingOutput(vector)))
        return outputs

    def shutdown(self) -> None:
        """Free the model and the KV pool; the LLM cannot be used afterwards."""
        with self._lock:
            if self._engine is not None:
                self._engine.shutdown()
                self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise EngineDeadError(self._gone)
        return self._engine

    def _run(
        self,
        prompts: list[tuple[Prompt, bool]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        sampling: Mapping[str, Any],
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        self._live_engine()
        if priority is not None and len(priority) != len(prompts):
            raise RequestError(f"{len(priority)} priorities for {len(prompts)} prompts; give one for each",
                               param="priority")
        all_params, requests = params_of(sampling_params, sampling, len(prompts)), []
        for index, (prompt, add_special_tokens) in enumerate(prompts):
            with in_prompt(index, len(prompts)):
                requests.append(self._front.inputs.process(
                    f"request-{next(self._ordinals)}", prompt, _final_only(all_params[index]),
                    add_special_tokens=add_special_tokens, priority=priority[index] if priority else 0))
        return self._run_all(requests, use_tqdm)

    def _run_all(self, requests: Sequence[ProcessedRequest], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with self._lock, DeferredInterrupts() as interrupts, without_caller_contexts():
            engine = self._live_engine()
            engine.check_weights()
            try:
                for index, request in enumerate(requests):
                    with in_prompt(index, len(requests)):
                        self._front.add_request(request)
                        for sequence in request.sequences:
                            engine.add_request(sequence)
                self._finish_all(engine, requests, finished, use_tqdm, interrupts)
            except BaseException as error:  # a refusal, an interrupt or a failure: leave nothing running
                self._abort_all(engine, requests, error)
                if isinstance(error, KeyboardInterrupt):
                    raise GenerationInterrupted([finished.get(request.request_id) for request in requests]) from error
                raise
        return [finished[request.request_id] for request in requests]

    def _finish_all(
        self, engine: Engine, requests: Sequence[ProcessedRequest], finished: dict[str, RequestOutput], use_tqdm: bool,
        interrupts: DeferredInterrupts,
    ) -> None:
        """Run until all requests have ended; each output is in `finished`, by its request's id, once it is complete."""
        with tqdm(total=len(requests), desc="Processed prompts", unit="prompt", disable=not use_tqdm) as bar:
            tokens = 0
            while engine.has_work():
                interrupts.check()
                done = self._front.process_outputs(engine.step(), time.monotonic())
                engine.abort(done.to_abort)
                for output in done.outputs:
                    if output.finished:
                        finished[output.request_id] = output
                        tokens += sum(len(choice.token_ids) for choice in output.outputs)
                        bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                        bar.update()

    def _abort_all(self, engine: Engine, requests: Sequence[ProcessedRequest], error: BaseException) -> None:
        """Abort requests; an engine that has failed inside a step is dropped, and its memory freed."""
        for request in requests:
            sequences = self._front.abort(request.request_id, time.monotonic())
            if not engine.broken:
                engine.abort(sequences)
        if engine.broken:
            self._engine = None
            self._gone = f"this LLM's engine has failed ({type(error).__name__}: {first_line(error)}); make a new one"


def generate(
    model: Any,
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    engine_args: Mapping[str, Any] | None = None,
    use_tqdm: bool = True,
    **sampling: Any,
) -> list[RequestOutput]:
    """Complete prompts with a model in one call.

    Args:
        model: whatever `LLM` takes, or an `LLM`, which is used and left open.
        prompts: see `LLM.generate`.
        sampling_params: one for all or one for each; or give fields of `SamplingParams` as keywords.
        engine_args: keyword arguments for `LLM`.

    Returns:
        One output per prompt, in their order.
    """
    if sampling:  # what is wrong with them is said before a model is loaded
        params_of(sampling_params, sampling, 1)
    if isinstance(model, LLM):
        return model.generate(prompts, sampling_params, use_tqdm, **sampling)
    with LLM(model, **(engine_args or {})) as llm:
        return llm.generate(prompts, sampling_params, use_tqdm, **sampling)


def _final_only(params: SamplingParams | None) -> SamplingParams | None:
    # A batch's outputs are returned only when they are complete.
    return params and dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
