"""How the fuzz campaign changes a valid input: its bytes, or the values inside it with lengths and digests made right.

Changed bytes rarely come past a checksum or a length. So JSON inside an input (a header, a line, a text in a header) is
also taken apart, changed, and put together again.
"""

import copy
import json
import random
import string
from collections.abc import Callable, Iterator
from typing import Any

#: values that a reader may not expect in a place
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, 1e308, 1e-320),
    *("", "../x", "/", "\x00", "nan", "x" * 300, "\ud800", "1", "é", [], {}, [[]], {"": 0}, [None], [[[[[]]]]]),
)

#: kind, place (a share of the length), a number, bytes to put in
Edit = tuple[int, float, int, bytes]


def edit_bytes(content: bytes, drawn: list[Edit]) -> bytes:
    """The content with a few bytes flipped, cut, repeated, put in or taken out."""
    found = bytearray(content)
    for kind, where, number, put in drawn:
        place = int(where * len(found))
        if kind == 0 and found:
            found[place] = number
        elif kind == 1 and found:
            found[place] ^= 1 << number % 8
        elif kind == 2:
            del found[place:]
        elif kind == 3:
            del found[place : place + number]
        elif kind == 4:
            found[place:place] = put
        elif kind == 5:
            found[place:place] = found[place : place + number]
        else:
            found[place : place + len(put)] = put
    return bytes(found)


def edit_tables(tables: dict[str, Any], drawn: list[tuple[float, Any, bool]]) -> dict[str, Any]:
    """The tables with a few values of other types, taken out, or under other names."""
    found = copy.deepcopy(tables)
    for where, value, renamed in drawn:
        places = list(_places(found))
        if not places:
            break
        holder, name = places[int(where * len(places))]
        if renamed and isinstance(holder, dict):
            holder[str(value)[:20]] = holder[name]
        elif value is None:
            del holder[name]
        else:
            holder[name] = copy.deepcopy(value)
    return found


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Every name of every table and every index of every list."""
    for name, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        yield holder, name
        if isinstance(value, dict | list):
            yield from _places(value)


# --- plain draws: as many inputs a second as a reader can take ------------------------------------


def draw_edits(draw: random.Random) -> list[Edit]:
    """One to four changes of bytes."""
    return [
        (draw.randrange(7), draw.random(), draw.randrange(256), draw.randbytes(draw.randrange(9)))
        for _ in range(draw.randint(1, 4))
    ]


def draw_value(draw: random.Random) -> Any:
    """An odd value, or any number or text."""
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randint(-300, 300)
    if kind == 1:
        return draw.uniform(-1e3, 1e3)
    if kind == 2:
        return "".join(draw.choices(string.printable, k=draw.randrange(9)))
    return draw.choice(ODD)


def draw_table_edits(draw: random.Random) -> list[tuple[float, Any, bool]]:
    """One to four changes of values."""
    return [(draw.random(), draw_value(draw), draw.random() < 0.2) for _ in range(draw.randint(1, 4))]


# --- JSON inside bytes -------------------------------------------------------------------------------

Repair = Callable[[Any], Any]


def edit_inside(content: bytes, draw: random.Random, repair: Repair | None) -> bytes:
    """The content with changed values in its JSON: all of it, a header behind its length, or one of its lines.

    `repair` writes digests anew, so that a reader gets to the changed values. Bytes without JSON are changed as such.
    """
    size = int.from_bytes(content[:8], "little")
    try:
        if 0 < size <= len(content) - 8:
            text = json.dumps(_edited(json.loads(content[8 : 8 + size]), draw)).encode()
            return len(text).to_bytes(8, "little") + text + content[8 + size :]
        lines = [json.loads(line) for line in content.splitlines()] if b"\n{" in content else [json.loads(content)]
    except ValueError:
        return edit_bytes(content, draw_edits(draw))
    place = draw.randrange(len(lines))
    lines[place] = _edited(lines[place], draw)
    if repair and draw.random() < 0.8:
        lines = repair(lines)
    return "\n".join(json.dumps(line) for line in lines).encode() + (b"\n" if content.endswith(b"\n") else b"")


def _edited(value: Any, draw: random.Random) -> Any:
    """A changed JSON value; a text that holds a table itself may be changed inside."""
    if not isinstance(value, dict | list) or not value:
        return draw_value(draw)
    texts = [place for place in _places(value) if _holds_table(place[0][place[1]])]
    if texts and draw.random() < 0.7:
        holder, name = draw.choice(texts)
        holder[name] = json.dumps(_edited(json.loads(holder[name]), draw))
        return value
    return edit_tables(value, draw_table_edits(draw))


def _holds_table(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("{") and value.endswith("}")
