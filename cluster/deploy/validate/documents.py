"""YAML and JSON files as documents whose values know their lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from cluster.deploy.validate.finding import Finding, Location, Problem, finding

_MAX_DEPTH = 200  # the fast reader crashes on texts that are nested without end
_MAX_NODES = 300_000  # aliases may make a small file a huge one
_TOO_MANY = f"a document has over {_MAX_NODES} values, those that aliases stand for among them"
_TOO_DEEP = f"values are nested deeper than {_MAX_DEPTH}"
_OF_A_TEMPLATE = "It looks like a template: give what it is rendered to, as by `helm template`."


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the fast one, where it is built
    """As Kubernetes reads YAML: a date is a text."""


_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:value", lambda loader, node: str(node.value))  # a plain =


def _number(kind: str) -> Callable[[_Loader, yaml.ScalarNode], Any]:
    def construct(loader: _Loader, node: yaml.ScalarNode) -> Any:
        """As Kubernetes reads it: 10:30 is a text, not 630."""
        if ":" in node.value:
            return node.value
        value = getattr(loader, f"construct_yaml_{kind}")(node)
        if kind == "int" and not -(2**63) <= value < 2**64:
            raise yaml.constructor.ConstructorError(None, None, "a whole number of over 64 bits", node.start_mark)
        return value

    return construct


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number(_kind))


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file, or one item of a list in it. Lines count from 1."""

    file: str
    value: Any
    lines: dict[Location, int] = field(repr=False)
    texts: dict[Location, int] = field(repr=False)  # first line of each block text (| and >)
    base: Location = ()  # where `value` lies in the document

    @property
    def name(self) -> str:
        """Kind/name as far as the document says them."""
        if not isinstance(self.value, dict):
            return ""
        metadata = self.value.get("metadata")
        name = metadata.get("name") or metadata.get("generateName") if isinstance(metadata, dict) else None
        kind = self.value.get("kind")
        return "/".join(str(part) for part in (kind, name) if part)

    def line(self, where: Location) -> int:
        """Line of the value there, or of the nearest one above it that is in the file."""
        where = self.base + where
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)

    def text_line(self, where: Location) -> int:
        """The first line of a text's own first line."""
        return self.texts.get(self.base + where, self.line(where))

    def find(self, problem: Problem) -> Finding:
        line = self.text_line(problem.where) + problem.inner_line if problem.inner else self.line(problem.where)
        return finding(self.file, line, self.name, problem)


def read_documents(file: str, text: str) -> tuple[list[Document], list[Finding]]:
    """All documents of a text that are not empty, those of a `List` one by one, and what is wrong with the text."""
    documents: list[Document] = []
    findings: list[Finding] = []
    loader = None
    try:
        _check_size(text)
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            lines: dict[Location, int] = {(): node.start_mark.line + 1}
            texts: dict[Location, int] = {}
            problems = list(_walk(node, lines, texts))
            value = loader.construct_document(node)
            document = Document(file, value, lines, texts)
            findings += [document.find(problem) for problem in problems]
            if value is not None:
                documents += _items(document)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        findings.append(finding(file, line, "", _syntax(text, _reason(text, line, error))))
    except (ValueError, LookupError, AttributeError) as error:  # the last two: values that are not of the tag given
        what = str(error) if isinstance(error, ValueError) else "a value that its tag does not allow"
        findings.append(finding(file, 1, "", _syntax(text, what)))
    finally:
        if loader is not None:
            loader.dispose()
    return documents, findings


def _reason(text: str, line: int, error: yaml.YAMLError) -> str:
    what = " ".join(str(getattr(error, "problem", None) or error).split())
    lines = text.splitlines()
    if line <= len(lines) and re.match(r" *\t", lines[line - 1]):
        what += "; the line begins with a tab, and YAML takes spaces"
    return what


def _syntax(text: str, what: str) -> Problem:
    is_template = re.search(r"\{\{-?\s*[^{\s]", text) is not None
    return Problem("yaml-syntax", (), what, _OF_A_TEMPLATE if is_template else None)


def _check_size(text: str) -> None:
    """Raises ValueError for a text that is nested too deeply or has too many values; says nothing of other mistakes."""
    depth = num_nodes = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.DocumentStartEvent):
                num_nodes = 0
            elif isinstance(event, yaml.NodeEvent):
                num_nodes += 1
                if num_nodes > _MAX_NODES:
                    raise ValueError(_TOO_MANY)
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > _MAX_DEPTH:
                    raise ValueError(_TOO_DEEP)
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
    except yaml.YAMLError:
        return


def _items(document: Document) -> Iterator[Document]:
    value = document.value
    if isinstance(value, dict) and value.get("kind") == "List" and isinstance(value.get("items"), list):
        for index, item in enumerate(value["items"]):
            yield replace(document, value=item, base=("items", index))
    else:
        yield document


def _walk(root: yaml.Node, lines: dict[Location, int], texts: dict[Location, int]) -> Iterator[Problem]:
    """Enter the lines of everything below a node; yield its double keys."""
    pending: list[tuple[yaml.Node, Location, tuple[int, ...]]] = [(root, (), ())]
    num_nodes = 0
    while pending:
        node, where, above = pending.pop()
        num_nodes += 1
        if id(node) in above:
            raise ValueError("an alias refers to what it is part of")
        if num_nodes > _MAX_NODES:
            raise ValueError(_TOO_MANY)
        if len(where) > _MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, child in node.value:
                name = key.value if isinstance(key, yaml.ScalarNode) else ""
                line = key.start_mark.line + 1
                if name in seen and name != "<<":
                    what = f"key {name!r} was given on line {seen[name]} already"
                    yield Problem("yaml-duplicate-key", (*where, name), what)
                seen.setdefault(name, line)
                lines[(*where, name)] = line
                pending.append((child, (*where, name), (*above, id(node))))
        elif isinstance(node, yaml.SequenceNode):
            for index, child in enumerate(node.value):
                lines[(*where, index)] = child.start_mark.line + 1
                pending.append((child, (*where, index), (*above, id(node))))
        elif isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
            texts[where] = node.start_mark.line + 2
