"""A Markdown extension: a line ``::: shardpass.load`` becomes the signature and docstring of that name.

A comment ``<!-- files: core/ranks -->`` becomes a table of the files of that folder, with the first sentence of each,
and ``<!-- cell: weather_mesh 2 1f0e3dad -->`` that cell of code of a script of the gallery.
Docstrings are read when the site is built, so pages cannot fall behind the code. `mkdocs.yml` lists it as
``docs.docstrings``, which ``python -m zensical build`` imports from the root of the checkout.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

from docs.make_gallery import cells

DIRECTIVE = re.compile(r"^::: +(?P<name>[\w.]+)(?: +members=(?P<members>[\w,]+))?$", re.M)
FILES = re.compile(r"^<!-- files: (?P<folder>[\w/]+) -->$", re.M)
CELL = re.compile(r"^<!-- cell: (?P<script>\w+) (?P<number>\d+) \w+ -->$", re.M)
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):(.*)$")
SHORT = (
    ("torch.", ""),
    ("shardpass.backends.communicator.", ""),
    ("shardpass.core.graphs.graph.", ""),
    ("pathlib.", ""),
)


class Docstrings(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(Documented(md), "docstrings", 26)  # before fences are read, whose priority is 25


class Documented(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        text = FILES.sub(lambda match: table_of_files(match["folder"]), "\n".join(lines))
        text = CELL.sub(lambda match: code_of(match["script"], int(match["number"])), text)
        return DIRECTIVE.sub(lambda match: document(match["name"], match["members"]), text).split("\n")


def makeExtension(**options: Any) -> Docstrings:
    return Docstrings(**options)


def document(path: str, members: str | None = None) -> str:
    """Markdown for the object at `path`, and for the named methods of a class."""
    found = look_up(path)
    parts = [heading(path, found, 3), folded(path, found)]
    for name in (members or "").split(",") if members else ():
        member = inspect.getattr_static(found, name)
        member = member.fget if isinstance(member, property) else member
        parts += [heading(f"{path}.{name}", member, 4), folded(f"{path}.{name}", member)]
    return "\n\n".join(parts)


def table_of_files(folder: str) -> str:
    """A table with a row for each module and package in a folder of shardpass: what its docstring says first."""
    place = package() / folder
    modules = {path.name: path for path in place.glob("*.py") if path.name != "__init__.py"}
    packages = {f"{path.parent.name}/": path for path in place.glob("*/__init__.py")}
    rows = [f"| `{name}` | {first_sentence(path)} |" for name, path in sorted({**modules, **packages}.items())]
    return "\n".join(["| file | what it holds |", "|---|---|", *rows])


def package() -> Path:
    """The folder of shardpass in the checkout."""
    spec = find_spec("shardpass")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def code_of(script: str, number: int) -> str:
    """A cell of code of a script of the gallery, in a fence."""
    _, code = cells(package().parent / "examples" / "gallery" / f"{script}.py")[number]
    return f"```python\n{code.strip()}\n```"


def first_sentence(path: Path) -> str:
    """The first sentence of the docstring of a module.

    Raises:
        ValueError: it has none; the build fails.
    """
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not doc:
        raise ValueError(f"docs: {path} has no docstring")
    sentence = re.split(r"(?<=\.)\s", " ".join(doc.split("\n\n")[0].split()))[0]
    return re.sub(r"``([^`]+)``", r"`\1`", sentence).replace("|", "\\|")


def look_up(path: str) -> Any:
    """The object at a dotted path.

    Raises:
        ValueError: there is none; the build fails.
    """
    names = path.split(".")
    for cut in range(len(names), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:cut]))
            for name in names[cut:]:
                found = getattr(found, name)
        except (ImportError, AttributeError):
            continue
        if inspect.ismodule(found) and cut < len(names):
            continue
        return found
    raise ValueError(f"docs: there is no {path}")


def heading(path: str, found: Any, level: int) -> str:
    return f"{'#' * level} `{path.rpartition('.')[2]}` {{ #{path} }}"


def folded(path: str, found: Any) -> str:
    """The first paragraph of a docstring, and what unfolds below it: the signature, and the rest."""
    first, _, rest = (inspect.getdoc(found) or "").partition("\n\n")
    call = signature_of(path, found)
    below = "\n\n".join(filter(None, [f"```python\n{call}\n```" if call else "", prose(rest)]))
    title = "Signature and details" if call and rest else "Signature" if call else "Details"
    fold = f'<details markdown="1"><summary>{title}</summary>\n\n{below}\n\n</details>' if below else ""
    return "\n\n".join(filter(None, [prose(first), fold]))


def signature_of(path: str, found: Any) -> str | None:
    if not callable(found) or inspect.ismodule(found) or is_error(found) or getattr(found, "_is_protocol", False):
        return None
    try:
        signature = plain(inspect.signature(found)).replace("self, ", "").replace("(self)", "()")
    except (TypeError, ValueError):
        return None
    for long, short in SHORT:
        signature = signature.replace(long, short)
    return f"{path}{wrapped(signature)}"


class Words:
    """An annotation that prints as its text, without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def plain(signature: inspect.Signature) -> str:
    """A signature whose annotations, strings at run time, print without quotes."""

    def words(annotation: Any) -> Any:
        return Words(annotation) if isinstance(annotation, str) else annotation

    parameters = [p.replace(annotation=words(p.annotation)) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=words(signature.return_annotation)))


def is_error(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, BaseException)


def wrapped(signature: str) -> str:
    """A long signature with one argument per line."""
    if len(signature) < 90:
        return signature
    inner, _, result = signature[1:].rpartition(")")
    arguments, depth, current = [], 0, ""
    for letter in inner:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            arguments.append(current.strip())
            current = ""
        else:
            current += letter
    lines = "".join(f"    {argument},\n" for argument in [*arguments, current.strip()] if argument)
    return f"(\n{lines}){result}"


def prose(doc: str) -> str:
    """A docstring as markdown: its sections become lists."""
    doc = re.sub(r"``([^`]+)``", r"`\1`", doc)
    out: list[str] = []
    section = ""
    for line in doc.splitlines():
        match = SECTION.match(line)
        if match:
            section = match[1]
            out += ["", f"**{section}:**{match[2]}", ""]
        elif section and not line.strip():
            out.append("")
        elif section and not line.startswith(" "):
            section = ""
            out += ["", line]
        elif section:
            out.append(entry(line, section))
        else:
            out.append(line)
    return "\n".join(out)


def entry(line: str, section: str) -> str:
    """One line of a section: an item that names something, or the continuation of one."""
    text = line.strip()
    match = re.match(r"^((?:[\w*]+(?:, )?)+): (.*)$", text)
    if line.startswith("    ") and not line.startswith("     ") and match:
        return f"* `{match[1]}`: {match[2]}"
    return text if section in ("Returns", "Yields") else f"  {text}"
