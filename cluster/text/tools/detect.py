"""Chooses the format of tool calls of a chat template."""

from __future__ import annotations

import re

from cluster.text.tools.deepseek import DeepSeekV3, DeepSeekV31
from cluster.text.tools.format import ToolFormat
from cluster.text.tools.glm import Glm
from cluster.text.tools.harmony import Harmony
from cluster.text.tools.hermes import Hermes
from cluster.text.tools.llama3_json import Llama3Json
from cluster.text.tools.mistral import MistralArgs, MistralArray
from cluster.text.tools.qwen3_coder import Qwen3Coder

# Hermes' mark is in the templates of others, too.
FORMATS: tuple[ToolFormat, ...] = (
    Harmony(),
    DeepSeekV31(),
    DeepSeekV3(),
    MistralArgs(),
    MistralArray(),
    Glm(),
    Qwen3Coder(),
    Hermes(),
    Llama3Json(),
)
_USE_OF_TOOLS = re.compile(r"\{[{%][^{}]*\btools\b")  # in an expression or a statement of Jinja
NAMES = tuple(sorted(each.name for each in FORMATS))


def format_of(chat_template: str, wanted: str = "auto") -> ToolFormat | None:
    """wanted: a name, or "auto": what the template shows, None if it shows none that is known here.

    Raises ValueError for a name that is not known.
    """
    if wanted == "auto":
        return next((each for each in FORMATS if each.detects(chat_template)), None)
    for each in FORMATS:
        if each.name == wanted:
            return each
    raise ValueError(f"target.tool_parser is {wanted!r}; it must be auto or one of {', '.join(NAMES)}")


def takes_tools(chat_template: str) -> bool:
    """Whether a template writes tools into the prompt by itself. If not, see `hermes_prompt`."""
    return _USE_OF_TOOLS.search(chat_template) is not None
