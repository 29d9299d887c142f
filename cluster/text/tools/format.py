"""How a family of models writes tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.text.tools.events import Event
from cluster.text.tools.history import HistoryNeeds
from cluster.text.tools.tool import Tool, ToolChoice

SpecialTokenId = Callable[[str], int | None]  # id of the special token with this text; None: it is ordinary text


class ToolParser(Protocol):
    """Reads one answer as it comes. Joined contents, names and arguments do not depend on how the text is split.

    Special tokens are spelled out in the text, without the end-of-sequence token. Text that turns out not to be a call
    is content. White space around calls belongs to neither: it is left out, up to 256 characters at a place.
    """

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """What was held back. Call once, at the end."""
        ...


class ToolFormat(Protocol):
    """Reads and writes a model's tool calls. A call with a marker counts even if its name is unknown: the agent answers
    an unknown name with an error that the model can act on, while a marker in the content would end the agent's loop. A
    call without a marker (bare JSON) must name a tool."""

    @property
    def name(self) -> str: ...

    @property
    def history_needs(self) -> HistoryNeeds: ...

    @property
    def marks_every_answer(self) -> bool:
        """Whether answers are to be parsed even without tools."""
        ...

    def detects(self, chat_template: str) -> bool: ...

    def parser(self, tools: Sequence[Tool]) -> ToolParser: ...

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, special_token_id: SpecialTokenId
    ) -> str:
        """Lark text for llguidance. auto: free text, then any number of calls. required: calls alone. A function: one
        call of it. none: free text. parallel: whether more than one call may be made.

        Raises ValueError if the choice needs a tool that is not there.
        """
        ...
