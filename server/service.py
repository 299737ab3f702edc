"""What answers requests: the engine in a process of its own, and in this one everything before and behind it."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxpaged.core.config import EngineConfig
from jaxpaged.core.limits import LIMITS
from jaxpaged.core.messages import EngineInfo
from jaxpaged.core.tool_formats import PLAIN_CALLS, TOOL_CALL_FORMATS
from jaxpaged.frontend.front import Front, TextFiles, load_text_files
from jaxpaged.frontend.metrics import Metrics
from jaxpaged.loading.hub import resolve_model
from jaxpaged.server.args import ServerConfig
from jaxpaged.server.engine.client import EngineClient
from jaxpaged.server.sandbox.grammar_process import GrammarProcesses
from jaxpaged.server.sandbox.template_process import TemplateProcesses

if TYPE_CHECKING:
    from jaxpaged.server.routes.api import Api

logger = logging.getLogger(__name__)


class Service:
    """Call `start`, then use `api`.

    Args:
        on_engine_death: called once if the engine ends unexpectedly.
        on_engine_stall: called each time that it begins to count as hung.
    """

    api: "Api"
    client: EngineClient
    metrics: Metrics
    info: EngineInfo

    def __init__(self, config: ServerConfig, engine_config: EngineConfig, *, on_engine_death: Callable[[], None],
                 on_engine_stall: Callable[[], None]) -> None:
        self._config, self._engine_config = config, engine_config
        self._on_engine_death, self._on_engine_stall = on_engine_death, on_engine_stall
        self._client: EngineClient | None = None
        self._templates: TemplateProcesses | None = None
        self._grammars: GrammarProcesses | None = None

    async def start(self) -> None:
        """Load everything; the engine process loads and compiles while this one reads the tokenizer."""
        config = self._engine_config
        logger.info("loading %s", config.model)
        # Resolved here, once: two processes must not download the same files.
        path = await asyncio.to_thread(resolve_model, config.model, config.revision, config.download_dir)
        local = dataclasses.replace(config, model=str(path))
        self.client = self._client = EngineClient(
            local, timeout=self._config.engine_timeout, on_death=self._on_engine_death, on_stall=self._on_engine_stall)
        # The web framework is slow to import, so the engine process starts first.
        from jaxpaged.server.routes.api import Api

        files, info = await asyncio.gather(asyncio.to_thread(self._load_text_files, local), self.client.ready())
        self.info = info = dataclasses.replace(info, model=config.model)
        logger.info("%s", info.summary())

        names = self._config.served_model_name or (config.model,)
        self._grammars = GrammarProcesses(timeout=self._config.structured_outputs_timeout)
        front = Front(config, info, files, name=names[0], make_grammar=self._grammars.grammar,
                      tool_calls=TOOL_CALL_FORMATS.get(self._config.tool_call_parser or "", PLAIN_CALLS),
                      lazy_logprobs=True)
        self.metrics = front.metrics
        self.client.serve(info, front)
        helpers = [processes.fault for processes in (self._templates, self._grammars) if processes is not None]
        self.api = Api(self._config, self.client, front, names=names, info=info, embeddings=config.enable_embeddings,
                       helper_faults=helpers)

    def _load_text_files(self, config: EngineConfig) -> TextFiles:
        """Read the tokenizer and see what its chat template takes, while the engine loads."""
        from jaxpaged.server.routes.api import TOKENIZE_THREADS

        files = load_text_files(config)
        tokenizer = files.tokenizer
        if tokenizer is not None and tokenizer.hf.chat_template:
            self._templates = TemplateProcesses(tokenizer.own_chat_template(), count=TOKENIZE_THREADS,
                                                timeout=self._config.chat_template_timeout,
                                                memory=LIMITS.max_template_bytes)
            tokenizer.render_chat_template = self._templates.render
            tokenizer.template_traits = self._templates.find_traits()
            for name, traits in (tokenizer.template_traits or {}).items():
                if lacks := traits.describe():
                    logger.info("chat template%s: %s", "" if name == "default" else f" {name}", lacks)
            if tokenizer.template_traits is None:
                logger.warning("the chat template cannot be tried out: chats may fail")
        return files

    def close(self) -> None:
        """End the threads and the helper processes; not the engine."""
        self.api.close()
        for processes in (self._templates, self._grammars):
            if processes is not None:
                processes.close()

    async def shutdown(self, timeout: float) -> None:
        """End the engine, which has so many seconds for it."""
        await asyncio.to_thread(self.client.shutdown, timeout)

    def kill(self) -> None:
        """End the engine's process at once, if it has been started."""
        if self._client is not None:
            self._client.kill()
