"""Values as they stand in a Markdown page: seen as they are, whatever they hold."""

import re

_ENTITIES = {ord(character): f"&#{ord(character)};" for character in "<>&|\\"}  # tags, entities, cells, escapes
_MARKS = re.compile(r"[`*_~\[\]$]|:(?=//)|(?<=www)\.", re.IGNORECASE)  # code, emphasis, links, formulas, addresses
_START = re.compile(r"^(\d{0,9})([-+=#:.)])(?!\d)")  # lists, headings and rules begin so
_HIDDEN = "\ufffd"


def escape_text(value: object) -> str:
    """One line of plain text. What cannot be seen, or turns the direction of text, is shown as a replacement."""
    line = " ".join(str(value).split())
    line = "".join(character if character.isprintable() else _HIDDEN for character in line)
    return _MARKS.sub(r"\\\g<0>", line.translate(_ENTITIES))


def escape_paragraph(value: object) -> str:
    """Text at the start of a line, where more marks have a meaning."""
    return _START.sub(r"\1\\\2", escape_text(value))


def fence_for(text: str) -> str:
    """A fence that is longer than any run of backticks in a block of code."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
