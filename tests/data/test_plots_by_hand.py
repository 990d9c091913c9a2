"""Where bars, words and colours of a study's picture lie, read from the figure itself; nothing is rendered."""

import numpy as np
import pytest

from polyclinic.data.contact_sheet import draw_rows
from polyclinic.data.plots import FAINT, INK, _name_rows, class_colours, draw, site_colours

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.colors import to_hex  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402


def sites(labels, images=3):
    pixels = np.zeros((images, 1, 8, 8), np.uint8)
    return {name: (np.array(values), pixels) for name, values in labels.items()}


def words(axes):
    """Texts by their place."""
    return {
        (round(float(x), 3), round(float(y), 3)): text.get_text()
        for text in axes.texts
        for x, y in [text.get_position()]
    }


def test_counts_stand_in_the_middle_of_their_bars_and_totals_behind():
    figure = draw(sites({"a": [0] * 60 + [1] * 40, "b": [0] * 5 + [1] * 45}), classes=("no", "yes"), title="T")
    bars, _, _ = figure.axes
    # 5 is less than 6 % of the longest bar, and is not written
    assert words(bars) == {(30, 0): "60", (80, 0): "40", (27.5, 1): "45", (101, 0): "100", (51, 1): "50"}
    assert [(bar.get_x(), round(bar.get_height(), 2)) for bar in bars.patches] == [
        (0, 0.72),
        (0, 0.72),
        (60, 0.72),
        (5, 0.72),
    ]
    assert bars.get_xlim() == pytest.approx((0, 109))
    assert bars.yaxis_inverted()
    assert bars.get_xlabel() == "training images of each class"
    assert bars.get_legend() is not None
    assert not any(bars.spines[side].get_visible() for side in ("top", "right", "left"))
    colours = {text.get_text(): text.get_color() for text in bars.texts}
    assert (colours["60"], colours["100"]) == ("white", FAINT)
    assert [text.get_fontsize() for text in bars.texts] == [9] * 5
    assert figure.get_suptitle() == "T"


def test_the_page_grows_with_its_rows():
    few = draw(sites({"a": [0, 1], "b": [1, 1]}), classes=("no", "yes"))
    assert few.get_size_inches() == pytest.approx((12, 2.6 + 2 * 1.3 + 1.2))
    many = draw(sites({str(n): [0, 1] for n in range(20)}, images=14), classes=("no", "yes"))
    assert many.get_size_inches() == pytest.approx((12, 0.42 * 12 + 1.4 + 12 * 10.8 / 12 + 1.2))
    assert few.get_suptitle() == "2 sites"
    assert few.axes[2].get_title(loc="left") == "Training images"
    assert many.axes[2].get_title(loc="left") == "Training images (the first 12 of 20 sites)"


@pytest.mark.parametrize(("sites_count", "classes", "panels"), [(1, 2, 2), (2, 1, 2), (2, 2, 3)])
def test_a_panel_about_differences_is_where_something_can_differ(sites_count, classes, panels):
    labels = {str(n): [0] * 4 for n in range(sites_count)}
    figure = draw(sites(labels), classes=tuple(map(str, range(classes))))
    assert len(figure.axes) == panels
    assert figure.axes[0].get_xlabel() == ("training images" if classes == 1 else "training images of each class")
    assert (figure.axes[0].get_legend() is None) is (classes == 1)


def test_pairs_are_written_into_the_heat_map():
    labels = {"a": [0] * 4, "b": [0] * 2 + [1] * 2, "c": [1] * 4}
    heat = draw(sites(labels), classes=("no", "yes")).axes[1]
    assert words(heat) == {
        **{(n, n): "" for n in range(3)},
        **{(1, 0): "0.50", (0, 1): "0.50", (2, 0): "1.00", (0, 2): "1.00", (2, 1): "0.50", (1, 2): "0.50"},
    }
    assert {text.get_text(): text.get_color() for text in heat.texts}["1.00"] == "white"
    assert {text.get_text(): text.get_color() for text in heat.texts}["0.50"] == INK
    assert heat.get_title(loc="left") == "Labels differ: mean pairwise KS 0.67"
    assert {text.get_fontsize() for text in heat.texts} == {10}
    nine = draw(sites({str(n): [0, 1] for n in range(9)}), classes=("no", "yes")).axes[1]
    assert {text.get_fontsize() for text in nine.texts} == {7}
    eight = draw(sites({str(n): [0, 1] for n in range(8)}), classes=("no", "yes")).axes[1]
    assert {text.get_fontsize() for text in eight.texts} == {10}
    many = draw(sites({str(n): [0, 1] for n in range(13)}), classes=("no", "yes"))
    assert (len(many.axes[1].texts), len(many.axes[0].texts)) == (0, 0)
    assert heat.images[0].get_clim() == (0, 1)


def test_histograms_lie_one_above_the_other_with_their_medians():
    labels = {"young": np.linspace(0, 10, 100), "old": np.linspace(90, 100, 50)}
    ridges = draw(sites(labels), unit="months").axes[0]
    assert words(ridges) == {(1.0, 1.12): "100 images\nmedian 5 months", (1.0, 0.12): "50 images\nmedian 95 months"}
    lines = [collection.get_segments()[0].tolist() for collection in ridges.collections]
    assert [[0.0, 1.0], [100.0, 1.0]] in lines
    assert any(np.allclose(line, [[5, 1], [5, 1.5]]) for line in lines)
    assert any(np.allclose(line, [[95, 0], [95, 0.5]]) for line in lines)
    tops = [patch.get_data() for patch in ridges.patches]
    assert max(top.values.max() for top in tops) == pytest.approx(1.92)
    assert len(tops[0].edges) == 13  # the root of 150, and one more
    assert [tick.get_text() for tick in ridges.get_yticklabels()] == ["old", "young"]
    assert ridges.get_yticks().tolist() == [0.2, 1.2]
    assert draw(sites({"a": [1.0, 2.0]})).axes[0].get_xlabel() == "label"


@pytest.mark.parametrize(("count", "bins"), [(9, 10), (144, 12), (2500, 40)])
def test_many_values_have_more_bins(count, bins):
    ridges = draw(sites({"a": np.linspace(0, 1, count)})).axes[0]
    assert len(ridges.patches[0].get_data().values) == bins


def test_of_many_sites_some_are_named():
    axes = Figure().add_subplot()
    _name_rows(axes, [str(n) for n in range(12)])
    assert len(axes.get_yticks()) == 12
    _name_rows(axes, [str(n) for n in range(25)], shift=0.5)
    assert axes.get_yticks().tolist() == [0.5 + n for n in range(0, 25, 3)]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [str(n) for n in range(0, 25, 3)]


def test_colours_are_named_for_few_classes_and_run_through_a_map_for_many():
    assert len(set(class_colours(2))) == 2
    assert len(class_colours(8)) == 8
    many = class_colours(9)
    assert to_hex(many[0]) == to_hex(matplotlib.colormaps["turbo"](0.0))
    assert to_hex(many[-1]) == to_hex(matplotlib.colormaps["turbo"](1.0))
    of_sites = site_colours(3)
    wanted = matplotlib.colormaps["viridis"](np.array([0.15, 0.5, 0.85]))
    np.testing.assert_allclose(of_sites, wanted)


def test_rows_of_images_are_named_in_their_middle():
    axes = Figure().add_subplot()
    rows = {"real": np.zeros((2, 1, 8, 6), np.uint8), "a name that is long": np.zeros((2, 1, 8, 6), np.uint8)}
    draw_rows(axes, rows, ["first", "second"], size=10)
    assert axes.get_yticks().tolist() == [5, 15]
    assert axes.get_xticks().tolist() == [4, 12]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["real", "a name that is\nlong"]
    assert {tick.get_fontsize() for tick in axes.get_yticklabels()} == {10}
    assert {tick.get_fontsize() for tick in axes.get_xticklabels()} == {9}
