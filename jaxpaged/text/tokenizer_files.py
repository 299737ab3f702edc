"""Reading the tokenizer of a Hugging Face directory or a GGUF file, without PyTorch."""

import logging
from pathlib import Path
from typing import Any

from jaxpaged.core.errors import CheckpointError, ConfigError, first_line
from jaxpaged.loading.json_files import read_json
from jaxpaged.text.tokenizer import Tokenizer


def load_tokenizer(path: Path, *, chat_template: str | None = None, content_format: str = "auto") -> Tokenizer:
    """Read a tokenizer.

    Args:
        path: a directory in Hugging Face layout, or a .gguf file.
        chat_template: a file with a template, or a template itself, in place of the model's.
        content_format: auto, string or openai: the form in which the template reads content.

    Raises:
        CheckpointError: no readable tokenizer there.
        ConfigError: `chat_template` is neither a file nor a template.
    """
    template = None if chat_template is None else _read_template(chat_template)
    if path.suffix == ".gguf":
        tokenizer = _load_gguf(path, content_format)
    elif path.is_dir():
        tokenizer = _load_directory(path, content_format)
    else:
        raise CheckpointError(f"no tokenizer at {path}: neither a directory nor a .gguf file")
    if template is not None:
        tokenizer.hf.chat_template = template
    return tokenizer


def _load_gguf(path: Path, content_format: Any) -> Tokenizer:
    from jaxpaged.loading.gguf_split import read_metadata
    from jaxpaged.text.gguf_tokenizer import read_gguf_tokenizer

    found = read_gguf_tokenizer(read_metadata(path), path)
    with _QuietImport():
        from transformers import PreTrainedTokenizerFast
    hf = PreTrainedTokenizerFast(tokenizer_object=found.backend, chat_template=found.chat_template,
                                 clean_up_tokenization_spaces=False, **found.special_tokens)
    return Tokenizer(hf, found.end_ids, content_format=content_format)


def _load_directory(path: Path, content_format: Any) -> Tokenizer:
    found = _load_sentencepiece(path, content_format)
    if found is not None:
        return found
    try:
        kind = _tokenizer_class(path)
        hf = kind.from_pretrained(path, trust_remote_code=False, local_files_only=True,
                                  **_own_config(path) if kind.__name__ == "AutoTokenizer" else {})
    except Exception as error:  # of many kinds, the libraries' own among them
        raise CheckpointError(f"cannot read a tokenizer from {path}: {first_line(error)}") from error
    if not getattr(hf, "is_fast", False):
        raise CheckpointError(f"the tokenizer in {path} has no tokenizer.json; save one with transformers")
    return Tokenizer(hf, content_format=content_format)


def _load_sentencepiece(path: Path, content_format: Any) -> Tokenizer | None:
    """The tokenizer of a directory with a SentencePiece file alone; None for any other."""
    from jaxpaged.text.sentencepiece import FILE, build_tokenizer, read_model

    if (path / "tokenizer.json").exists() or not (path / FILE).exists():
        return None
    model = read_model(path / FILE)
    if model is None:
        return None
    built = build_tokenizer(path, model)
    with _QuietImport():
        from transformers import PreTrainedTokenizerFast
    hf = PreTrainedTokenizerFast(tokenizer_object=built.backend, chat_template=built.chat_template,
                                 clean_up_tokenization_spaces=False, **built.special_tokens)
    return Tokenizer(hf, content_format=content_format)


def _own_config(path: Path) -> dict[str, Any]:
    """`config` for AutoTokenizer, with what it looks for in config.json: the type of the model.

    Its own reader refuses the whole file for values that the tokenizer has nothing to do with.
    """
    try:
        given = read_json(path / "config.json")
    except CheckpointError:
        return {}
    with _QuietImport():
        from transformers import AutoConfig
    try:
        config = AutoConfig.for_model(given.get("model_type"))
    except ValueError:
        return {}  # a type that it does not know
    if isinstance(given.get("tokenizer_class"), str):
        config.tokenizer_class = given["tokenizer_class"]
    config.name_or_path = str(path)
    return {"config": config}


def _tokenizer_class(path: Path) -> Any:
    """The class of transformers that reads a directory.

    `AutoTokenizer` imports PyTorch where it is installed, which takes seconds. Where a Llama's files name the class
    without rules of its own, as those of Llama 3 do, that is what it finds.
    """
    try:
        config, tokenizer = (read_json(path / name) for name in ("config.json", "tokenizer_config.json"))
        plain = (config.get("model_type") == "llama" and "auto_map" not in tokenizer
                 and tokenizer.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend"))
    except CheckpointError:
        plain = False  # AutoTokenizer says what is wrong
    with _QuietImport():
        if plain:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
        from transformers import AutoTokenizer

        return AutoTokenizer


def _read_template(given: str) -> str:
    if "{%" in given or "{{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError("chat_template is neither a readable file nor a template") from error


class _QuietImport:
    """Silences the advice of transformers, when imported, to install PyTorch."""

    def __enter__(self) -> None:
        logging.getLogger("transformers").addFilter(_drop_advice)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("transformers").removeFilter(_drop_advice)


def _drop_advice(record: logging.LogRecord) -> bool:
    return "PyTorch" not in record.getMessage()
