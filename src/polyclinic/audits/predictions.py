"""Whether a table of outputs (probabilities, scores, embeddings) betrays a column beside it, such as the hospital.

A linear classifier on the numbers and their squares, cross-validated, a patient in one fold; its balanced accuracy
beside that of the same classifier on permuted columns. Whole patients are permuted, so that the test is exact.
"""

from pathlib import Path

import numpy as np

from polyclinic.attacks.attack import LEAKS, NOT_TESTED, WITHSTOOD
from polyclinic.data.tables import read_table
from polyclinic.errors import BadInput
from polyclinic.json_types import JsonObject
from polyclinic.randomness import numpy_rng

LEVEL, PERMUTATIONS, FOLDS = 0.01, 999, 5
FEWEST = 10  #: patients of each value
REACH = 0.1  #: a test that would not find an accuracy so far above chance has not tested anything
#: what `polyclinic predict --coarse` may round to
STEPS = (0.05, 0.1, 0.25, 0.5, 1.0)


def audit_predictions(file: Path, column: str, patient: str | None = None) -> JsonObject:
    """Whether the numbers of a CSV file tell a column, and from which step of rounding on they no longer do."""
    if not file.is_file():
        raise BadInput(f"{file}: there is no such file; name a CSV file with a row for each image")
    table = read_table(file, column, *([patient] if patient else []))
    labels = table.column(column)
    numbers = {
        name: values
        for name in table.columns
        if name not in (column, patient) and (values := _numbers(table.column(name), name)) is not None
    }
    if not numbers:
        raise BadInput(f"{file}: has no column of numbers beside '{column}'; name a table of predictions")
    whose = table.column(patient) if patient else np.arange(len(labels)).astype(str)
    names, places = np.unique(whose, return_inverse=True)
    first = np.unique(places, return_index=True)[1]
    if any(len(set(labels[places == place].tolist())) > 1 for place in range(len(names))):
        raise BadInput(
            f"--patient: some patients have several values of '{column}'; leave it out, or name another column"
        )
    values, counts = np.unique(labels[first], return_counts=True)
    facts: JsonObject = {
        "column": column,
        "values": len(values),
        "rows": len(labels),
        "patients": len(names),
        "numbers": list(numbers),
    }
    if len(values) < 2 or counts.min() < FEWEST:
        words = f"each value of '{column}' needs {FEWEST} patients or more, and two values"
        return {"verdict": NOT_TESTED, "words": words, **facts}
    answers = np.searchsorted(values, labels[first])
    matrix = np.stack(list(numbers.values()), 1)
    found = _test(matrix, answers, places)
    report = {**facts, **found, "coarse": None}
    texts = [name for name in table.columns if name not in (column, patient, *numbers)]
    report["words"] += f". Columns of words were not looked at: {', '.join(texts)}" if texts else ""
    report["words"] += "" if patient else ". Every row counts as a patient: name their column with --patient"
    if found["verdict"] == LEAKS:
        for step in STEPS:
            rounded = np.round(matrix / step) * step
            if (again := _test(rounded, answers, places))["verdict"] == WITHSTOOD:
                report["coarse"] = {"step": step, "accuracy": again["accuracy"]}
                break
        at = report["coarse"]
        cure = (
            f"rounded to {at['step']:g} they no longer do (predict --coarse {at['step']:g})"
            if at
            else "no rounding helps"
        )
        report["words"] += f". {cure.capitalize()}"
    return report


def _numbers(column: np.ndarray, name: str) -> np.ndarray | None:
    """The column's numbers; None of a column of words. BadInput where some rows have none: it might betray all."""
    if not any(_finite(text) for text in column):
        return None
    if (row := next((row for row, text in enumerate(column, 2) if not _finite(text)), None)) is not None:
        raise BadInput(f"column '{name}': row {row} has no number; give every row one, or take the column out")
    return column.astype(float)


def _finite(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def _test(matrix: np.ndarray, answers: np.ndarray, places: np.ndarray) -> JsonObject:
    """`answers` [P] of patients; `places` [N]: whose each row is."""
    spread = matrix.std(0)
    rows = (matrix - matrix.mean(0))[:, spread > 0] / spread[spread > 0]
    rows = np.concatenate([np.ones((len(rows), 1)), rows, rows**2], 1)
    rng = numpy_rng("predictions", len(answers))
    fold = rng.permutation(len(answers)) % FOLDS
    folds = []
    for number in range(FOLDS):
        held = fold[places] == number
        known = rows[~held]
        solve = np.linalg.solve(known.T @ known + np.eye(rows.shape[1]), known.T)
        folds.append((held, rows[held] @ solve))
    accuracy = _accuracy(folds, answers, places)
    by_chance = np.sort([_accuracy(folds, rng.permutation(answers), places) for _ in range(PERMUTATIONS)])
    chance = (1 + int((by_chance >= accuracy - 1e-12).sum())) / (1 + PERMUTATIONS)
    usual, needed = 1 / len(np.unique(answers)), float(by_chance[-int(LEVEL * (PERMUTATIONS + 1))])
    told = chance <= LEVEL
    word = LEAKS if told else WITHSTOOD if needed - usual <= REACH else NOT_TESTED
    says = "betray" if told else "do not betray" if word == WITHSTOOD else "may betray"
    return {
        "verdict": word, "accuracy": round(accuracy, 4), "by_chance": round(usual, 4), "chance": chance,
        "needed": round(needed, 4),
        "words": f"the numbers {says} the column: right in {accuracy:.0%} (balanced; chance {usual:.0%}, found from "
        f"{needed:.0%} on)",
    }  # fmt: skip


def _accuracy(folds: list[tuple[np.ndarray, np.ndarray]], answers: np.ndarray, places: np.ndarray) -> float:
    """Mean over values of the share of their rows that is told right."""
    labels = answers[places]
    goals = np.eye(int(answers.max()) + 1)[labels]
    goals = goals / goals.sum(0)  # rare values weigh as much as frequent ones
    told = np.zeros(len(labels), int)
    for held, solve in folds:
        told[held] = (solve @ goals[~held]).argmax(1)
    right = told == labels
    return float(np.mean([right[labels == one].mean() for one in np.unique(labels)]))
