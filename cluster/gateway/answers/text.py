"""The text of one answer out of the router's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from actors.messages import TARGET, TokenChunk
from cluster.gateway.answers.piece import FinishReason, TokenSource
from cluster.gateway.answers.token_sources import TextSources
from cluster.gateway.requests.call import GenerationCall
from cluster.text.detokenizer import Detokenizer
from cluster.text.stop_strings import StopStrings
from cluster.text.text_codec import TextCodec


class AnswerText:
    """Text of one answer, detokenised and cut at stop strings. Routers emit no stop tokens."""

    def __init__(
        self,
        codec: TextCodec,
        call: GenerationCall,
        context: Sequence[int],
        sources: TextSources | None = None,
    ) -> None:
        """context: the last tokens before the answer's text. sources: where to note who proposed each token; then at
        most one token is pushed at a time."""
        self._detokenizer = Detokenizer(partial(codec.decode, skip_special_tokens=call.skip_special_tokens), context)
        self._stops = StopStrings(call.stop, shows_match=call.shows_stop)
        self._has_stops = bool(call.stop)
        self._sources = sources
        self.num_tokens = 0  # up to the last token of a stop string

    @property
    def stop_string(self) -> str | None:
        """That ended the answer."""
        return self._stops.matched

    def push(self, chunk: TokenChunk) -> tuple[str, FinishReason | None]:
        """New text to show, and the finish reason if the answer ends."""
        token_ids = chunk.token_ids
        if self._has_stops:
            before = self._detokenizer.copy(), self._stops.copy()
        num_before = self.num_tokens
        self.num_tokens += len(token_ids)
        text = self._detokenizer.push(token_ids) if token_ids else ""
        if chunk.finish_reason is not None:
            text += self._detokenizer.flush()
        if self._sources is not None:
            self._sources.add(len(text), chunk.sources[0] if chunk.sources else TARGET)
        shown, matched = self._stops.push(text)
        if matched:
            self.num_tokens = num_before + _tokens_to_match(*before, token_ids)
            return shown, "stop"
        if chunk.finish_reason is None:
            return shown, None
        return shown + self._stops.flush(), "length" if chunk.finish_reason == "length" else "stop"

    def sources_of(self, shown: str) -> tuple[TokenSource, ...]:
        """Who proposed the tokens of text that `push` has just returned; empty if nobody wants to know."""
        return () if self._sources is None else self._sources.take(shown)


def _tokens_to_match(detokenizer: Detokenizer, stops: StopStrings, token_ids: tuple[int, ...]) -> int:
    """Number of tokens up to the end of the stop string, independent of the size of chunks."""
    for count, token in enumerate(token_ids, 1):
        if stops.push(detokenizer.push((token,)))[1]:
            return count
    return len(token_ids)
