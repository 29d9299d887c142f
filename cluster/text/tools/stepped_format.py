"""What formats share: a parser that reads in steps, and a grammar written for the tools of a choice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from cluster.text.tools.format import SpecialTokenId, ToolParser
from cluster.text.tools.history import HistoryNeeds
from cluster.text.tools.lark import Lark, tools_of
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Reader, Steps
from cluster.text.tools.stepped_parser import SteppedParser
from cluster.text.tools.tool import Tool, ToolChoice


class SteppedFormat(ABC):
    """A ToolFormat but for its name and `detects`."""

    history_needs = HistoryNeeds()
    marks_every_answer = False

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        return SteppedParser(lambda reader, output: self._read(reader, output, tools))

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, special_token_id: SpecialTokenId
    ) -> str:
        return self._write(Lark(special_token_id), tools_of(tools, choice), choice, parallel)

    @abstractmethod
    def _read(self, reader: Reader, output: Output, tools: Sequence[Tool]) -> Steps[None]:
        """Read a whole answer."""

    @abstractmethod
    def _write(self, lark: Lark, tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> str:
        """The grammar. tools: those that may be called."""
