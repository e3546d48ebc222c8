from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.ir.actions import Kind
from penstock.view.palette import IDLE, LOOKS, PAPER, contrast, shade, text_colour

COMPUTE = [kind for kind in Kind if kind.is_compute]
COMPUTE_SHADES = [shade(kind, at, 2) for kind in COMPUTE for at in range(2)]

# Colour vision deficiencies in linear light, after Machado, Oliveira and Fernandes (2009).
EYES = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def lightness_and_hue(colour: str, eye: str) -> NDArray[np.float64]:
    """Convert a colour to CIELAB, where distances are perceived differences."""
    channels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(EYES[eye]) @ linear, 0, 1)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = to_xyz @ seen / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_kind_has_its_own_colour_letter_and_label() -> None:
    assert list(LOOKS) == list(Kind)
    for column in ("colour", "letter", "label"):
        assert len({getattr(look, column) for look in LOOKS.values()}) == len(Kind)


def test_compute_kinds_have_the_letters_of_action_text() -> None:
    assert [LOOKS[kind].letter for kind in COMPUTE] == [kind.text for kind in COMPUTE]


@pytest.mark.parametrize("eye", EYES)
def test_compute_kinds_stay_distinct_with_colour_blindness(eye: str) -> None:
    seen = [lightness_and_hue(colour, eye) for colour in [*COMPUTE_SHADES, IDLE]]
    # A difference of about 2 is barely visible; 10 is visible at a glance.
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 10


def test_text_is_readable_on_every_shade_of_every_kind() -> None:
    shades = [shade(kind, at, 4) for kind in Kind for at in range(4)]
    # WCAG requires 4.5 for small text.
    assert min(contrast(text_colour(colour), colour) for colour in shades) >= 4.5


def test_contrast_runs_from_one_to_twenty_one() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#808080", "#808080") == 1
    assert contrast("#ffffff", "#777777") == pytest.approx(4.48, abs=0.01)


def test_communication_is_quieter_than_compute() -> None:
    loudest = max(contrast(LOOKS[kind].colour, PAPER) for kind in Kind if kind.is_communication)
    assert loudest < contrast(LOOKS[Kind.FORWARD].colour, PAPER) / 2


def test_later_stages_of_a_rank_are_lighter() -> None:
    shades = [shade(Kind.FORWARD, at, 4) for at in range(4)]
    contrasts = [contrast(colour, PAPER) for colour in shades]
    assert shades[0] == LOOKS[Kind.FORWARD].colour
    assert contrasts == sorted(set(contrasts), reverse=True)
