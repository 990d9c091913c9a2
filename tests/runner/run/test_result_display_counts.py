"""Tables of sites say how many images their figures rest on."""

from polyclinic.runner.run.result_display import few_images, image_counts


def test_sites_with_few_images_are_named():
    known = {"north": {"train": 50, "test": 30}, "west": {"train": 9, "test": 2}, "east": {"train": 5}}
    counts = image_counts({"data": {"counts": known}}, "test")
    assert counts == {"north": 30, "west": 2}
    assert few_images(counts, ["north", "west", "east"]).startswith(
        "fewer than 10 images at west (2): one image decides"
    )
    assert few_images(counts, ["north", "east"]) == ""
    many = {f"site-{number}": 3 for number in range(8)}
    assert "site-4 (3) and 3 more sites:" in few_images(many, many)


def test_sites_that_keep_their_numbers_are_not_counted():
    assert image_counts({"data": {}}, "test") == {}
