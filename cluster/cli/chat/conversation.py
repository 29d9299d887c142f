"""What has been said, and how it is kept in a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from actors.errors import InvalidRequest
from cluster.cli.chat.settings import ChatSettings, checked

Role = Literal["system", "user", "assistant"]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Role
    content: str


class Conversation:
    """Turns of a question and its answer, after the system's message if there is one."""

    def __init__(self, system: str | None = None) -> None:
        self.messages: list[Message] = []
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Replace the system's message; None or nothing: take it away."""
        self.messages = [message for message in self.messages if message.role != "system"]
        if text:
            self.messages.insert(0, Message("system", text))

    def with_question(self, text: str) -> list[Message]:
        return [*self.messages, Message("user", text)]

    def add(self, question: str, answer: str) -> None:
        self.messages += [Message("user", question), Message("assistant", answer)]

    def remove_last(self) -> str | None:
        """Take the last turn away and return its question; None if there is none."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].role == "user":
                question = self.messages[index].content
                del self.messages[index:]
                return question
        return None

    def reset(self) -> None:
        """Forget all turns; the system's message stays."""
        self.messages = [message for message in self.messages if message.role == "system"]

    @property
    def num_turns(self) -> int:
        return sum(message.role == "user" for message in self.messages)


class SavedChat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's content."""

    format: Literal["paceline-chat"] = "paceline-chat"
    version: Literal[1] = 1
    model: str
    settings: ChatSettings
    messages: list[Message]


def save_chat(path: Path, chat: SavedChat) -> None:
    """Write the file whole or not at all, for its owner's eyes alone. Raises InvalidRequest where it cannot be."""
    try:
        data = msgspec.json.format(msgspec.json.encode(_complete(chat)), indent=1) + b"\n"
        final = path.resolve()  # of a link, the file that it points to is replaced
        if final.exists() and not final.is_file():
            raise InvalidRequest("file", str(path), "it cannot be written: it is there and no regular file")
        _replace_file(final, data)
    except (OSError, ValueError, RuntimeError) as error:  # the last two: of what can be no path, or no text
        raise InvalidRequest("file", str(path), f"it cannot be written: {_reason(error)}") from None


def load_chat(path: Path) -> SavedChat:
    """Raises InvalidRequest where the file cannot be read or holds something else."""
    try:
        chat = msgspec.json.decode(path.read_bytes(), type=SavedChat)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("file", str(path), f"it holds no saved conversation: {error}") from None
    except (OSError, ValueError) as error:  # ValueError: of what can be no path
        raise InvalidRequest("file", str(path), f"it cannot be read: {_reason(error)}") from None
    checked(chat.settings)
    return chat


def _replace_file(final: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(prefix=".chat-", dir=final.parent)  # with mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, final)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _complete(chat: SavedChat) -> dict[str, object]:
    return {
        "format": chat.format,
        "version": chat.version,
        "model": chat.model,
        "settings": msgspec.structs.asdict(chat.settings),
        "messages": chat.messages,
    }
