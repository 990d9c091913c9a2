"""Tables in the terminal fit into 80 columns and break no word; sentences below them."""

import re

from rich.console import Console

from polyclinic.cli.tables import (
    attacks_of,
    coordinator_table,
    print_table,
    print_warnings,
    replay_sentence,
    threat_table,
    verdict_table,
)

WHY = (
    "this budget does not find a planted leak either (an update of one step on held-out images, without noise: half of "
    "each step is by one, half by 7); try a larger one"
)
QUESTIONS = ("images", "membership", "site", "origin")


def question(verdict: str) -> dict:
    return {"verdict": verdict, "attacks": ["loss-threshold", "rmia"], "seconds": 3.0, "why": WHY}


REPORT = {
    "method": "fedavg-replay",
    "budget": "quick",
    "verdicts": {
        "synthetic-images": {
            "left": 4, "attacked": 1, "questions": {name: question("not tested") for name in ("copies", "membership")},
        },
        "weights": {"left": 40, "attacked": 2, "questions": {name: question("withstood") for name in QUESTIONS}},
        "labels": {"left": 2, "verdict": "leaks", "words": "labels of single images left the site as they are"},
    },
    "threat_table": [["follows the rules", "yes, and is curious"], ["holds", "gradients, weights, latents " * 6]],
}  # fmt: skip
COORDINATOR = {
    "verdict": "withstood",
    "why": "crafted-sum, imprint get images back without the incoming check, and are stopped with it",
    "rows": [
        {"attack": "honest weights", "checked": True, "stopped": False, "identified": 0, "of": 64, "by_chance": 0,
         "psnr": None},
    ],
}  # fmt: skip


def printed(table, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text().splitlines()


def test_the_table_fits_a_screen_of_80_columns_without_broken_words():
    lines = printed(verdict_table(REPORT))
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 36
    words = " ".join(lines).split()
    for name in ("synthetic-images", "membership", "origin", "withstood", "tested", "planted"):
        assert name in words
    known = set(re.findall(r"[\w-]+", f"{REPORT} kind attacked question why what the parcels give away"))
    assert set(re.findall(r"[\w-]{3,}", " ".join(lines))) <= known
    assert any("try a larger one" in line for line in printed(verdict_table(REPORT, 240), 240))
    for table in (threat_table(REPORT), coordinator_table(COORDINATOR)):
        assert max(map(len, printed(table))) <= 80


def test_a_wide_table_is_printed_in_parts_and_breaks_no_word():
    columns = [
        "method",
        "balanced accuracy",
        "95 % interval",
        "p against fedavg",
        "average surface distance",
        "carried",
    ]
    rows = [
        ["cwt-replay", "0.912 ± 0.034", "0.878 to 0.946", "< 0.001", "12.345 ± 1.234", "123.4 MB"],
        None,
        ["a guess"],
    ]
    shown = {}
    for width in (200, 80, 60):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        print_table(columns, rows, console=console, whole=1, title="everything that was measured")
        shown[width] = console.export_text()
        assert max(map(len, shown[width].splitlines())) <= width
        words = set(re.findall(r"[\w.<%±-]+", shown[width]))
        assert words == set(re.findall(r"[\w.<%±-]+", f"{columns} {rows[0]} a guess everything that was measured"))
        assert "0.912 ± 0.034" in shown[width]
    assert shown[200].count("cwt-replay") == 1 < shown[60].count("cwt-replay")


def test_the_released_model_is_named_and_not_counted_among_the_parcels():
    of_kind = {"left": 1, "attacked": 1, "released": 1, "questions": {"membership": question("not tested")}}
    assert list(attacks_of("weights", of_kind))[-1] == "weights: the released model was attacked, too"
    assert len(list(attacks_of("weights", {**of_kind, "released": 0}))) == 1


def test_a_warning_that_was_shown_is_not_repeated(capsys):
    print_warnings(Console(), ["few images", "few steps"], shown=["few images"])
    assert capsys.readouterr().out.splitlines() == [
        "warning: few steps",
        "1 warning stands above the table, and in result.json",
    ]
    print_warnings(Console(), [], shown=[])
    assert capsys.readouterr().out == ""


def test_a_replay_is_put_into_words():
    assert replay_sentence({}) == ""
    found = {"psnr": 31.44, "code_usage_top": 0.93, "code_usage_bottom": 1.0, "real_or_replayed_auc": 0.9991}
    assert replay_sentence(found) == (
        "replayed images came back at 31.4 dB; codes in use: 93% (top), 100% (bottom); "
        "a probe tells real from replayed with an AUC of 0.999"
    )
    probed = found | {"which_site_accuracy": 0.264, "which_site_chance": 0.25}
    assert replay_sentence(probed).endswith("and which site made one in 26% of cases (25% by chance)")
