"""Features that are kept in a file: one run computes them for all, and a damaged file is made again."""

import threading
import time

import numpy as np
import pytest

from polyclinic.models.encoders import Encoder, features_file, kept_features

IMAGES = np.arange(5 * 16, dtype=np.uint8).reshape(5, 1, 4, 4)


class Counted(Encoder):
    width = 3
    identity = "counted"
    batches = 0

    def encode(self, images):
        self.batches += 1
        time.sleep(0.05)  # so that others ask meanwhile
        return images.mean((2, 3))


def test_of_runs_that_want_the_same_features_at_once_one_computes_them(tmp_path):
    encoder, found = Counted(), []
    asked = [threading.Thread(target=lambda: found.append(kept_features(encoder, IMAGES, tmp_path))) for _ in range(4)]
    for one in asked:
        one.start()
    for one in asked:
        one.join(60)
    assert len(found) == 4
    assert all(np.array_equal(one, found[0]) for one in found)
    assert encoder.batches == 1


@pytest.mark.parametrize("damage", ["empty", "half", "text", "zip", "rows", "kind", "header"])
def test_a_damaged_file_is_made_again(tmp_path, damage):
    encoder = Counted()
    right, file = np.array(kept_features(encoder, IMAGES, tmp_path)), features_file(encoder, IMAGES, tmp_path)
    content = file.read_bytes()
    if damage in ("rows", "kind"):
        np.save(file, right[:2] if damage == "rows" else right.astype(np.float64))
    elif damage == "zip":
        np.savez(file.open("wb"), right)
    else:
        file.write_bytes(
            {
                "empty": b"",
                "half": content[: len(content) // 2],
                "text": b"features",
                "header": content.replace(b"'descr'", b"'descr(", 1),
            }[damage]
        )
    assert np.array_equal(kept_features(encoder, IMAGES, tmp_path), right)
    assert file.read_bytes() == content
    assert encoder.batches == 2
