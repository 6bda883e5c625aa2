"""Prints the texts of the source that users read, such as errors, log messages and help texts: `make messages`.

One line for each text: place, kind, text. The kinds:

- ``error``: an argument of an exception
- ``log``: an argument of a function that logs or prints
- ``help``: help text of a verb, an option or a setting, and descriptions in JSON schemas
- ``page``: text of a template, or a text in a script of the web page
- ``text``: every other literal with at least two words

`tests/test_language.py` checks the same list.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "scheduler"
HELP_MODULES = ("cli/app.py", "cli/verbs.py")  # docstrings of functions are help texts there
ERRORS = re.compile(
    r"(Error|Trouble|Refused|NotFound|NoDaemon|NoGpuData|NotAsked|Damaged|Mistake|Taken|Full|Exposure|Refusal)$"
)
LOGS = re.compile(r"^_?(say|said|log|warn|note|print|echo|write|LogMessage|Reason|Finding|tell|secho)$")
HELP = frozenset({"help", "meaning", "about", "description", "short_help", "epilog"})
HELP_CALLS = frozenset({"Field", "setting", "option", "_setting", "JobOption"})
NOT_PROSE = re.compile(
    r"^\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|DROP|PRAGMA|BEGIN|ALTER|WITH|FROM|WHERE|AND|OR|ORDER|LIMIT|VALUES|COMMIT|ATTACH|DETACH"
    r"|GROUP|JOIN|ON|SET|SAVEPOINT|ROLLBACK|RELEASE|VACUUM|REINDEX|UNION|CASE|COUNT|max\(|import |from |def |if |for )"
)
PROSE = re.compile(r"[A-Za-z'’]{2,}[,;:]? [A-Za-z0-9{(`'’]")


class Message(NamedTuple):
    """A text that users read: its file (relative to the repository), line, kind, and the text with {expressions}."""

    file: str
    line: int
    kind: str
    text: str


def text_of(node: ast.expr) -> str | None:
    """Return the text of a string literal or f-string, its expressions in braces; None for other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in node.values
            if isinstance(part, (ast.Constant, ast.FormattedValue))
        )
    return None


def name_of(call: ast.Call) -> str:
    """Return the last part of the called name; empty if the call has no name."""
    called = call.func
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


class _Reader(ast.NodeVisitor):
    """Collects the messages of one module."""

    def __init__(self, file: str, docstrings_are_help: bool) -> None:
        self.file, self.docstrings_are_help = file, docstrings_are_help
        self.found: list[Message] = []
        self._kinds = ["text"]
        self._docstrings: set[int] = set()

    def _add(self, node: ast.expr, text: str) -> None:
        if (PROSE.search(text) and not NOT_PROSE.match(text)) or (
            self._kinds[-1] in ("error", "help") and len(text) > 2
        ):
            self.found.append(Message(self.file, node.lineno, self._kinds[-1], text))

    def _inside(self, kind: str, node: ast.AST) -> None:
        self._kinds.append(kind)
        self.visit(node)
        self._kinds.pop()

    def generic_visit(self, node: ast.AST) -> None:
        """Visit the parts of a node, and remember its docstring, which is no message unless it is a help text."""
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                self._docstrings.add(id(first.value))
                if self.docstrings_are_help and isinstance(node, ast.FunctionDef) and node.decorator_list:
                    self.found.append(Message(self.file, first.lineno, "help", ast.get_docstring(node) or ""))
        super().generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Add a literal that is no docstring."""
        if isinstance(node.value, str) and id(node) not in self._docstrings:
            self._add(node, node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Add an f-string; literals inside its expressions are separate messages."""
        self._add(node, text_of(node) or "")
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Visit a raised exception: its texts are errors."""
        if node.exc is not None:
            self._inside("error" if isinstance(node.exc, ast.Call) else self._kinds[-1], node.exc)

    def visit_Call(self, node: ast.Call) -> None:
        """Visit the arguments of a call: their kind follows from the name of the called function."""
        name = name_of(node)
        kind = "error" if ERRORS.search(name) else "log" if LOGS.match(name) else self._kinds[-1]
        kind = "help" if name in HELP_CALLS else kind
        self.visit(node.func)
        for argument in node.args:
            self._inside(kind, argument)
        for keyword in node.keywords:
            if keyword.arg not in ("code", "kind", "name", "encoding"):
                self._inside("help" if keyword.arg in HELP else kind, keyword.value)


class _Texts(HTMLParser):
    """Collects the texts of a template: between tags, and in attributes that people read."""

    def __init__(self, file: str) -> None:
        super().__init__(convert_charrefs=True)
        self.file = file
        self.found: list[Message] = []
        self._skip = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Add the attributes that people read, and skip the contents of scripts and styles."""
        self._skip += tag in ("script", "style")
        for name, value in attrs:
            if name in ("title", "placeholder", "aria-label", "alt") and value:
                self._add(value)

    def handle_endtag(self, tag: str) -> None:
        """End the skipping at the end of a script or style."""
        self._skip -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        """Add a text between tags."""
        if not self._skip:
            self._add(data)

    def _add(self, text: str) -> None:
        words = " ".join(text.split())
        if re.search(r"[A-Za-z]{2,}", re.sub(r"\{\{.*?\}\}|\x00", "", words)):
            self.found.append(Message(self.file, self.getpos()[0], "page", words))


def of_module(path: Path) -> list[Message]:
    """Return the messages of a Python module, by line."""
    file = str(path.relative_to(ROOT))
    reader = _Reader(file, file.removeprefix("scheduler/") in HELP_MODULES)
    reader.visit(ast.parse(path.read_text()))
    return sorted(reader.found, key=lambda message: message.line)


def of_template(path: Path) -> list[Message]:
    """Return the messages of a Jinja template: statements are left out, expressions stay in double braces."""
    texts = _Texts(str(path.relative_to(ROOT)))
    source = re.sub(r"\{#.*?#\}", "", path.read_text(), flags=re.S)
    texts.feed(re.sub(r"\{%.*?%\}", lambda found: "\n" * found[0].count("\n"), source, flags=re.S))
    return texts.found


def of_script(path: Path) -> list[Message]:
    """Return the string literals with at least two words in a script of the web page."""
    file = str(path.relative_to(ROOT))
    literal = re.compile(r""""((?:[^"\\\n]|\\.)*)"|'((?:[^'\\\n]|\\.)*)'|`((?:[^`\\]|\\.)*)`""")
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for match in literal.finditer(line.split(" // ")[0]):
            text = next(group for group in match.groups() if group is not None) if any(match.groups()) else ""
            if PROSE.search(text):
                found.append(Message(file, number, "page", text))
    return found


def messages() -> Iterator[Message]:
    """Yield every text that users read, file by file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield from of_module(path)
    for path in sorted(PACKAGE.rglob("*.html")):
        yield from of_template(path)
    for path in sorted(PACKAGE.rglob("*.js")):
        yield from of_script(path)


if __name__ == "__main__":
    wanted = set(sys.argv[1:])
    for message in messages():
        if not wanted or message.kind in wanted:
            print(f"{message.file}:{message.line}\t{message.kind}\t{' '.join(message.text.split())}")
