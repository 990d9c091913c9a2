"""Sentences under the table of a run."""

from rich.console import Console

from polyclinic.cli.compare import guessed_cells
from polyclinic.cli.tables import print_warnings, replay_sentence
from polyclinic.runner.run.result_display import few_images


def test_a_warning_that_was_shown_is_not_repeated(capsys):
    print_warnings(Console(), ["few images", "few steps"], shown=["few images"])
    assert capsys.readouterr().out.splitlines() == [
        "warning: few steps",
        "1 warning stands above the table, and in result.json",
    ]
    print_warnings(Console(), [], shown=[])
    assert capsys.readouterr().out == ""


def test_sites_with_few_images_and_with_none_are_named():
    said = few_images({"north": 30, "south": 4, "west": 0}, ["north", "south"])
    assert said.startswith("fewer than 10 images at south (4): one image decides")
    assert said.endswith("; no row for west: none of these images is theirs")
    assert few_images({"north": 30}, ["north"]) == ""


def test_a_replay_is_put_into_words():
    found = {"psnr": 31.44, "code_usage_top": 0.93, "code_usage_bottom": 1.0, "real_or_replayed_auc": 0.9991}
    assert replay_sentence(found) == (
        "replayed images came back at 31.4 dB; codes in use: 93% (top), 100% (bottom); "
        "a probe tells real from replayed with an AUC of 0.999"
    )
    probed = found | {"which_site_accuracy": 0.264, "which_site_chance": 0.25}
    assert replay_sentence(probed).endswith("and which site made one in 26% of cases (25% by chance)")


def test_what_was_not_measured_is_not_mentioned():
    assert replay_sentence({}) == ""


def test_a_guess_fills_the_columns_that_it_has():
    names = ["test_accuracy", "test_auc", "test_balanced_accuracy"]
    guessed = {"accuracy": 0.7, "balanced_accuracy": 0.5}
    assert list(guessed_cells(guessed, names, "")) == ["0.700", "", "0.500"]
    assert list(guessed_cells(guessed, names, "test_accuracy")) == ["0.700", "", "", "", "0.500"]
