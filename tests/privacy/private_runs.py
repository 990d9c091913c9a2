"""Settings and figures of small private studies."""

from pathlib import Path

from polyclinic.data.parts import prepare
from polyclinic.federation.ledger.ledger import verify
from polyclinic.privacy.epsilon import compute_epsilon
from polyclinic.study import Study

NOISE = 1.1


PRIVATE = {"privacy.noise_multiplier": NOISE, "privacy.max_grad_norm": 0.5}


def ledgers(folder: Path) -> dict[str, list[dict]]:
    return {path.stem: verify(path) for path in sorted((folder / "ledger").glob("*.jsonl"))}


def images_of(study: Study) -> dict[str, int]:
    return {site: counts["train"] for site, counts in prepare(study.data, study.sites).info["counts"].items()}


def expected_epsilon(images: int, rounds: int) -> float:
    """Of rounds of floor(n / 8) steps each, at delta = 1 / n."""
    return compute_epsilon(8 / images, NOISE, rounds * (images // 8), 1 / images)
