"""The code blocks of the README and the pages in ``docs/``, and the shell commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
ASSIGNED_OUTPUT = re.compile(r"^[A-Z_]+=\$\((.*)\)$")
COMMENT = re.compile(r"\s+# .*$")
ASSIGNMENT = re.compile(r"^[A-Z_]+=")


@dataclass(frozen=True)
class Step:
    """A command of a `console` block without its comment, and the output that the block shows below it."""

    command: str
    output: str

    @property
    def words(self) -> list[str]:
        """The words of the command, as bash reads them but without expansions."""
        return shlex.split(_joined(self.command))


@dataclass(frozen=True)
class DocBlock:
    """A fenced block: the page, relative to the root, the line of its fence, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The commands as words, without comments, assignments and the output of the commands.

        The lines of a `console` block that begin with `$` are commands; in a `bash` block all lines are.
        """
        if self.language == "console":
            lines = [_joined(step.command) for step in self.steps]
        else:
            lines = _joined(self.text).splitlines()
        return [command for line in lines for command in _commands(line)]

    @property
    def steps(self) -> list[Step]:
        """The commands of a `console` block with their outputs."""
        parts = re.split(r"^\$ ", self.text, flags=re.M)[1:]
        ends = [len(re.match(r"(?:.*\\\n)*.*", part)[0]) for part in parts]  # type: ignore[index]
        return [Step(COMMENT.sub("", part[:end]), part[end + 1 :]) for part, end in zip(parts, ends, strict=True)]

    @property
    def begin(self) -> str:
        """The first line of its first command, without a comment, and without the backslash at its end."""
        return self.steps[0].command.partition("\n")[0].removesuffix("\\").rstrip()


def _joined(command: str) -> str:
    """Without backslashes at the ends of lines."""
    return command.replace("\\\n", " ")


def _commands(line: str) -> list[list[str]]:
    """The commands of a line; several if it is a pipe."""
    words = shlex.split(line, comments=True)
    if inner := ASSIGNED_OUTPUT.match(" ".join(words)):
        return _commands(inner[1])
    words = [word for word in words if word != "&"]
    while words and ASSIGNMENT.match(words[0]):
        del words[0]
    parts = groupby(words, key=lambda word: word == "|")
    return [list(part) for is_pipe, part in parts if not is_pipe]


def doc_blocks(*languages: str) -> list[DocBlock]:
    """All blocks in these languages, or in any."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(DocBlock(str(page.relative_to(ROOT)), line, match[1], match[2]))
    return [block for block in found if not languages or block.language in languages]


def output_after(block: DocBlock) -> str | None:
    """The text of the `text` block that follows in the page directly, the output of this block; None without one."""
    text = (ROOT / block.page).read_text()
    following = re.match(r"\n\n```text\n(.*?)^```$", text.partition(f"{block.text}```")[2], re.M | re.S)
    return None if following is None else following[1]
