"""Findings for people, programs and the annotations of GitHub."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

from actors.printable import printable
from cluster.deploy.validate.finding import Finding

Format = Literal["text", "json", "github"]


@dataclass(slots=True)
class Report:
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was not looked at, and why
    num_documents: int = 0

    @property
    def num_errors(self) -> int:
        return sum(finding.level == "error" for finding in self.findings)

    def show(self, form: Format) -> str:
        if form == "json":
            return self._json()
        return self._github() if form == "github" else self._text()

    def _json(self) -> str:
        data = {
            "findings": [asdict(finding) for finding in self.findings],
            "notes": self.notes,
            "documents": self.num_documents,
            "errors": self.num_errors,
            "warnings": len(self.findings) - self.num_errors,
        }
        return json.dumps(data, indent=2)

    def _text(self) -> str:
        lines = []
        for finding in self.findings:
            place = ": ".join(part for part in (finding.object, finding.where) if part)
            lines.append(f"{finding.file}:{finding.line}: {finding.level} {finding.rule}: {place}")
            lines += [f"  {finding.what}", f"  why: {finding.why}", f"  fix: {finding.fix}"]
        lines += [f"note: {note}" for note in self.notes]
        warnings = len(self.findings) - self.num_errors
        lines.append(f"{self.num_documents} documents, {self.num_errors} errors, {warnings} warnings")
        return "\n".join(printable(line) for line in lines)

    def _github(self) -> str:
        """Workflow commands: GitHub shows them beside the lines of a pull request."""
        lines = []
        for finding in self.findings:
            place = f"{finding.object} {finding.where}".strip()
            text = _message(f"{place}: {finding.what}. {finding.why} {finding.fix}".removeprefix(": "))
            position = f"file={_property(finding.file)},line={finding.line},title={_property(finding.rule)}"
            lines.append(f"::{finding.level} {position}::{text}")
        lines += [f"::notice::{_message(note)}" for note in self.notes]
        return "\n".join(lines)


def _message(text: str) -> str:
    return printable(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
