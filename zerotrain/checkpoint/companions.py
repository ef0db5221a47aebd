"""The small files beside a transformers model's weights that `from_pretrained` wants: config, generation, tokenizer."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

from torch import nn

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Files of a tokenizer or processor, which a model does not hold; taken from the folder that it was loaded from."""
_LARGEST = 64 << 20  # bytes


def companion_files(module: nn.Module) -> dict[str, bytes]:
    """Contents by file name; empty for a model that is not of transformers."""
    module = getattr(module, "_orig_mod", module)  # torch.compile
    config: Any = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_json_string") or not hasattr(module, "save_pretrained"):
        return {}
    files = {"config.json": _config(module, config)}
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files["generation_config.json"] = generation.to_json_string().encode()
    folder = Path(str(getattr(config, "_name_or_path", "") or "\0"))
    if "\0" not in str(folder) and folder.is_dir():
        for name in TOKENIZER_FILES:
            if (folder / name).is_file() and (folder / name).stat().st_size <= _LARGEST:
                files[name] = (folder / name).read_bytes()
    return files


def _config(module: nn.Module, config: Any) -> bytes:
    """The model's config as it is saved: with the class that opens the weights, and the dtype that they have."""
    config = copy.deepcopy(config)
    config.architectures = [type(module).__name__]
    elements: Counter[str] = Counter()
    for parameter in module.parameters():
        if parameter.dtype.is_floating_point:
            elements[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    values = json.loads(config.to_json_string())
    if elements:
        values["dtype"] = elements.most_common(1)[0][0]
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
