"""Damage to files: bits, lengths, lines and names of the files of interrupted and of finished runs."""

import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from faults_children import Outcome, Trial, command, problem_of, resume, tail
from PIL import Image

Damage = Callable[[Path, random.Random], None]


def flip_bit(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def change_digit(path: Path, draw: random.Random) -> None:
    """A digit of a text becomes another: the file stays readable."""
    content = bytearray(path.read_bytes())
    digits = [place for place, byte in enumerate(content) if byte in b"0123456789"]
    if digits:
        place = draw.choice(digits)
        content[place] = draw.choice([byte for byte in b"0123456789" if byte != content[place]])
    path.write_bytes(content)


def cut_off(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(max(1, len(content)))])


def drop_line(path: Path, draw: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[draw.randrange(max(1, len(lines))) :][:1]
    place = draw.randrange(max(1, len(lines)))
    path.write_bytes(b"".join(lines[:place] + lines[place + 1 :]))


def add_bytes(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 40)))


def zero_block(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = draw.randrange(max(1, len(content)))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)


def replace_with_junk(path: Path, draw: random.Random) -> None:
    junk = [b"", b"{}", b"[]", b"null", b'{"round": 1}', draw.randbytes(100), b"\0" * 100, b"[" * 100_000]
    path.write_bytes(draw.choice(junk))


def become_folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def swap_with_other(path: Path, draw: random.Random) -> None:
    others = [other for other in sorted(path.parent.iterdir()) if other.is_file() and other != path]
    if others:
        path.write_bytes(draw.choice(others).read_bytes())


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


DAMAGES: tuple[Damage, ...] = (
    *(flip_bit, change_digit, cut_off, drop_line, add_bytes, zero_block),
    *(replace_with_junk, become_folder, swap_with_other, delete),
)


def damage_a_file(folder: Path, draw: random.Random) -> str:
    """Damage one file of a run, each as likely as another; what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    path, damage = draw.choice(files), draw.choice(DAMAGES)
    damage(path, draw)
    return f"{damage.__name__.replace('_', ' ')}: {path.relative_to(folder)}"


def damaged_interrupted(image: Path, expected: str, draw: random.Random) -> Trial:
    """Resume an interrupted run of which one file is damaged."""
    what = damage_a_file(image, draw)
    outcome = resume(image)
    problem = problem_of(outcome, image, expected)
    return Trial("damaged, interrupted", what, problem, tail(outcome) if problem else "", outcome.seconds)


def write_pictures(folder: Path) -> None:
    """Two pictures to predict."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        values = np.random.default_rng(number).integers(0, 255, (28, 28, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / f"{number}.png")


def commands(folder: Path, pictures: Path, out: Path) -> dict[str, tuple[object, ...]]:
    """Commands that read a finished run."""
    return {
        "run --resume": ("run", "--resume", "--json", "--out", folder),
        "predict": ("predict", folder, pictures, "--out", out / "predictions.csv"),
        "ledger verify": ("ledger", "verify", folder),
        "report": ("report", folder, "--out", out / "report.html"),
        "export": ("export", folder, "--to", "torchscript", "--out", out / "exported"),
        "forgetting": ("forgetting", folder),
    }


def read_finished(name: str, folder: Path, pictures: Path, out: Path) -> tuple[Outcome, str]:
    """Run one of the commands; how it ended, and a digest of what it printed and wrote."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    outcome = command(*commands(folder, pictures, out)[name])
    # what predict prints beside its file says why there are no sets of classes, for example
    digest = hashlib.sha256(b"" if name == "predict" else outcome.printed.encode())
    if name in ("predict", "report"):
        for path in sorted(path for path in out.rglob("*") if path.is_file()):
            digest.update(path.read_bytes())
    return outcome, digest.hexdigest()


def damaged_finished(name: str, folder: Path, pictures: Path, out: Path, expected: str, draw: random.Random) -> Trial:
    """A command on a finished run of which one file is damaged: says so, or does what it would have done."""
    what = f"{damage_a_file(folder, draw)}, then {name}"
    outcome, found = read_finished(name, folder, pictures, out)
    problem = ""
    if outcome.hung:
        problem = "hang"
    elif outcome.crashed:
        problem = "traceback"
    elif outcome.code == 0 and found != expected and not _page_says_so(out):
        problem = "other result"
    elif outcome.code and not outcome.printed.strip():
        problem = "no sentence"
    return Trial("damaged, finished", what, problem, tail(outcome) if problem else "", outcome.seconds)


def _page_says_so(out: Path) -> bool:
    """True where a report was written that names what does not hold."""
    page = out / "report.html"
    return page.exists() and any(word in page.read_text() for word in ("does not hold", "damaged", "is missing"))
