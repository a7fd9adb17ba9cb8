"""Values as an error message shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

MAX_SHOWN_CHARACTERS = 80
"""The longest value in a detail: enough to recognise it, and short enough to keep the sentence readable."""


def cut(text: str, longest: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return `text`, shortened to `longest` characters if it is longer.

    >>> cut("abcdefgh", longest=6)
    'abc...'
    """
    return text if len(text) <= longest else text[: longest - 3] + "..."


def shown(value: object) -> str:
    """Return `value` as an error message shows it, in JSON's words.

    >>> shown(["a", None, {"b": True}])
    "['a', null, {'b': true}]"
    """
    match value:
        case str():
            text = repr(cut(value))
        case None | bool():
            text = json.dumps(value)
        case list() | tuple():
            text = f"[{_joined(map(shown, value))}]"
        case dict():
            text = f"{{{_joined(f'{shown(key)}: {shown(member)}' for key, member in value.items())}}}"
        case _:
            text = repr(value)
    return cut(text)


def _joined(texts: Iterable[str]) -> str:
    """Join the texts with commas, and stop once `cut` would remove the rest: a list may have millions of items."""
    joined = ""
    for text in texts:
        joined += f", {text}" if joined else text
        if len(joined) > MAX_SHOWN_CHARACTERS:
            break
    return joined


def must(name: str, message: str, value: object) -> str:
    """Return pydantic's message about a value in our words: axis is 'last', but must be an integer."""
    _, should, rest = message.partition(" should ")
    rest = re.sub(", (unable to|got a) .*| valid(?= )", "", rest).replace("a integer", "an integer")
    return f"{name} is {shown(value)}" + (f", but must {rest}" if should else f": {message}")
