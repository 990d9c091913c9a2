"""Presets: studies with the settings of the papers, in `presets/`, and their smaller versions.

Each line of a preset says in its comment where the paper has the setting, or that the paper does not say. A word in
brackets at the end of a comment says how the number shrinks with `--scale`; `without these images: VALUE` (or weights)
is what stands in for data that are not at hand.
"""

import re
from pathlib import Path

from polyclinic.errors import BadInput
from polyclinic.settings import no_such_choice

FOLDER = Path(__file__).with_name("presets")
SMALLEST = 0.0001

#: what a scaled number is rounded to, and the least that it becomes (unless the paper has less)
RULES = {"side": (16, 32), "width": (8, 8), "images": (1, 20), "samples": (1, 400), "length": (1, 1)}
RULE_WORDS = """
# Scale {scale:g}: the numbers with a word in brackets were multiplied by it. [length] (rounds, epochs, steps): at least
# 1. [side] of images: a multiple of 16, at least 32. [width] (channels): a multiple of 8, at least 8. [images]: at
# least 20. [samples]: at least 400. No number becomes larger than the paper's."""
#: `name = number  # comment [rule]`, or a list of numbers
SCALED = re.compile(r"^(\w+ = )([\d, \[\]]+)(  # )(.*\[(" + "|".join(RULES) + r")\])$", re.MULTILINE)
#: `name = value  # comment; without these images: other value`
STAND_IN = re.compile(r"^(\w+ = ).*?  # (?:.*; )?without these (?:images|weights): (.+?)(?: \[\w+\])?$", re.MULTILINE)


def preset_names() -> list[str]:
    """The names that `study new --preset` takes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def summary_of(name: str) -> str:
    """The first line of a preset, one sentence."""
    return _read(name).partition("\n")[0].lstrip("# ")


def preset(name: str, *, scale: float = 1.0, phantom: bool = False) -> str:
    """The TOML text of a preset, smaller by `scale`; with `phantom` on drawn images, and without weights to fetch."""
    if not SMALLEST <= scale <= 1:
        raise BadInput(f"--scale {scale:g}: must be between {SMALLEST:g} and 1, the paper's size")
    text = _read(name)
    if phantom:
        text = STAND_IN.sub(lambda line: f"{line[1]}{line[2]}", text)
    if scale < 1:

        def scaled(line: re.Match[str]) -> str:
            value = re.sub(r"\d+", lambda number: str(scaled_number(int(number[0]), line[5], scale)), line[2])
            return line[0] if value == line[2] else f"{line[1]}{value}{line[3]}at scale 1: {line[2]}; {line[4]}"

        text = SCALED.sub(scaled, text)
        head, blank, rest = text.partition("\n\n")
        text = head + RULE_WORDS.format(scale=scale) + blank + rest
    return text


def scaled_number(value: int, rule: str, scale: float) -> int:
    """A number of the paper at a smaller scale; never larger than it was."""
    step, least = RULES[rule]
    return min(value, max(least, step * round(value * scale / step)))


def _read(name: str) -> str:
    names = preset_names()
    if name not in names:
        raise BadInput(f"--preset: {no_such_choice(name, names)}")
    return (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
