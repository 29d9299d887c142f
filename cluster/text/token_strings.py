"""Single tokens as text and bytes, as log-probabilities show them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from actors.errors import ModelError
from actors.models.token_text import TokenText
from cluster.text.text_codec import TextCodec


class TokenStrings:
    """Bytes of tokens. A tokenizer whose tokens have no bytes of their own gives the text that each decodes to."""

    def __init__(self, tokenizer: Any, codec: TextCodec, name: str) -> None:
        """tokenizer: from `transformers`. name: of the model."""
        self._tokenizer = tokenizer
        self._codec = codec
        self._name = name

    @cached_property
    def _pieces(self) -> TokenText | None:
        try:
            return TokenText(self._tokenizer, self._name)
        except ModelError:
            return None

    def bytes_of(self, token_id: int) -> bytes:
        if self._pieces is None:
            return self._codec.decode([token_id]).encode()
        return self._pieces.bytes_of(token_id)

    def text_of(self, token_id: int) -> str:
        """Bytes that are no character are written as `bytes:\\xe2\\x82`."""
        spelled = self.bytes_of(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
