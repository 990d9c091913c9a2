"""Names of types for what is read from JSON and TOML files, or is about to be written to one."""

import json
from collections.abc import Mapping
from typing import Any

#: an object of JSON, or a table of TOML: its values are None, bools, numbers, texts, lists and such objects
JsonObject = dict[str, Any]
#: the same where it is only read
JsonMapping = Mapping[str, Any]


def parse_json(text: str | bytes) -> Any:
    """What a text of JSON says; ValueError for anything else, brackets within brackets without end included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets within brackets without end") from None
