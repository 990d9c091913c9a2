"""Tables on pages of paper, and legends of long names: no word is broken that could stay whole."""

import io

import pytest
from matplotlib.figure import Figure

from polyclinic.report import pdf
from polyclinic.report.blocks import Table
from polyclinic.report.pdf import HEIGHT, MOST_LETTERS, Pages, parts_of, widths_of
from polyclinic.report.theme import NAME, PRINT, legend


class Written(Pages):
    """Pages that note what is written, and on which of them."""

    def __init__(self):
        super().__init__(io.BytesIO())
        self.rows = []

    def _row(self, row, widths, weight):
        super()._row(row, widths, weight)
        self.rows.append((self.number, weight, row[0]))


def test_a_table_that_fits_stays_as_it_is():
    cells = [["site", "AUC"], ["Turku", "0.91"]]
    assert parts_of(cells) == [cells]
    assert widths_of(cells) == [7, 6]


def test_sentences_give_way_and_words_stay_whole():
    cells = [["site", "words"], ["Rechts der Isar", " ".join(["withstood"] * 40)]]
    widths = widths_of(cells)
    assert sum(widths) == MOST_LETTERS
    assert widths[0] == len("Rechts der Isar") + 2
    wide = [["site", *(f"sensitivity{number}" for number in range(5))], ["x"] * 6]
    assert min(widths_of(wide)) >= 3
    assert sum(widths_of(wide)) <= MOST_LETTERS


def test_a_table_that_is_too_wide_is_written_in_parts_with_its_first_column():
    head = ["site", *(f"balanced_accuracy_{number}" for number in range(12))]
    cells = [head, [str(number) for number in range(13)]]
    parts = parts_of(cells)
    assert len(parts) == 3
    assert [part[0][0] for part in parts] == ["site"] * 3
    assert [name for part in parts for name in part[0][1:]] == head[1:]
    assert [cell for part in parts for cell in part[1][1:]] == cells[1][1:]
    for part in parts:
        widths = widths_of(part)
        assert sum(widths) <= MOST_LETTERS
        assert all(wide - 2 >= len(name) for wide, name in zip(widths, part[0], strict=True))


@pytest.mark.parametrize(("used", "first"), [(1.0, 1), (HEIGHT - 1.9, 1), (HEIGHT - 1.3, 2)])
def test_a_head_does_not_stand_alone_and_comes_again_on_the_next_page(used, first):
    pages = Written()
    pages.room(0.1)
    pages.used = used
    pages.table(Table(("site", "images"), [[f"site-{number}", number] for number in range(30)], "Images"))
    assert pages.rows[0] == (first, "bold", "site")
    assert pages.rows[2][0] == first, "two rows follow the head"
    assert [name for _, weight, name in pages.rows if weight == "normal"] == [f"site-{number}" for number in range(30)]
    for page in range(first, pages.number + 1):
        assert next(weight for number, weight, _ in pages.rows if number == page) == "bold"
    assert pages.number == (1 if used == 1.0 else 2)


def test_names_of_a_legend_take_several_lines():
    axes = Figure().subplots()
    name = "University Hospital of Southern Finland against all others"
    axes.plot([0, 1], [0, 1], label=f"{name}\nAUC 0.910")
    legend(axes, PRINT)
    [text] = axes.get_legend().get_texts()
    lines = text.get_text().split("\n")
    assert " ".join(lines[:-1]) == name
    assert (max(map(len, lines)) <= NAME, lines[-1]) == (True, "AUC 0.910")
    assert pdf.LETTERS > NAME
