"""What ``show`` made of an example, as a page can hold it: text, tokens, or a picture."""

from collections.abc import Mapping
from typing import Any

from metasketch.errors import ArgumentError
from metasketch.pictures import data_uri

Look = Mapping[str, Any]

MOST_CHARACTERS = 2000
"""Of one text; what follows is counted instead."""


def look(shown: Any) -> Look | None:
    """Text, tokens or a picture, by what it is.

    Args:
        shown: None (nothing to see); a text; a list of texts, which are tokens; a picture (see
            `metasketch.pictures.data_uri`); or a tuple (picture, text).

    Returns:
        A table with some of ``text``, ``tokens``, ``picture``, and ``more``: how many characters
        were cut off.
    """
    if shown is None:
        return None
    if isinstance(shown, str):
        return _cut({"text": shown})
    if isinstance(shown, list | tuple) and all(isinstance(token, str) for token in shown):
        return _cut({"tokens": list(shown)})
    if isinstance(shown, tuple) and len(shown) == 2 and isinstance(shown[1], str):
        return _cut({"picture": data_uri(shown[0]), "text": shown[1]})
    if isinstance(shown, Mapping | bytes | set):
        raise ArgumentError(
            f"show returned a {type(shown).__name__}; it must return a text, a list of tokens, a "
            "picture (an array, a tensor, a PIL image), or a tuple (picture, text)"
        )
    return {"picture": data_uri(shown)}


def _cut(whole: dict[str, Any]) -> Look:
    """Cut after so many characters."""
    if "tokens" in whole:
        length, kept = 0, 0
        for token in whole["tokens"]:
            length += len(token)
            kept += length <= MOST_CHARACTERS
        cut = sum(len(token) for token in whole["tokens"][kept:])
        return {"tokens": whole["tokens"][:kept]} | ({"more": cut} if cut else {})
    cut = len(whole["text"]) - MOST_CHARACTERS
    return whole if cut <= 0 else whole | {"text": whole["text"][:MOST_CHARACTERS], "more": cut}
