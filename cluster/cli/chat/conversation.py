"""The messages of a conversation."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant"]


class Message(msgspec.Struct, frozen=True):
    role: Role
    content: str


class Conversation:
    """Questions and answers, behind the system message if there is one."""

    def __init__(self, system: str | None = None) -> None:
        self.messages: list[Message] = []
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None or "": remove it."""
        self.messages = [message for message in self.messages if message.role != "system"]
        if text:
            self.messages.insert(0, Message("system", text))

    def with_question(self, text: str) -> list[Message]:
        return [*self.messages, Message("user", text)]

    def add(self, question: str, answer: str) -> None:
        self.messages += [Message("user", question), Message("assistant", answer)]

    def remove_last(self) -> str | None:
        """Remove the last question and its answer; returns the question, None if there is none."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].role == "user":
                question = self.messages[index].content
                del self.messages[index:]
                return question
        return None

    def reset(self) -> None:
        """Remove everything but the system message."""
        self.messages = [message for message in self.messages if message.role == "system"]
