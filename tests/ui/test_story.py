"""The story's pictures show the numbers that they are made of."""

import pytest

from shadowkv_lab.deployment import published_deployment
from shadowkv_lab.load import Load
from shadowkv_lab.ui import plots, story


def squares(trace):
    """Area of each square of a trace, in the picture's own units."""
    corners = [trace.x[i : i + 5] for i in range(0, len(trace.x), 6)]
    return [(max(x) - min(x)) ** 2 for x in corners]


@pytest.mark.parametrize(
    "load, written", [(Load(1, 1024), ": 135 kB"), (Load(16, 4096), ": 2.2 MB")]
)
def test_squares_are_to_the_scale_of_the_bytes(load, written):
    """By hand: 1,728 B a slot cast, 1,152 a live row read, 1,728 a new row written, 78 layers."""
    fig = story.bytes_per_step(published_deployment(), load, 495_616)
    whole, live, new = (squares(trace) for trace in fig.data)
    pools = [495_616 // part for part in (16, 4, 1) if 495_616 // part >= load.live_tokens]
    unit = 78 * 495_616 * 1728 / whole[-1]
    assert [area * unit for area in whole] == pytest.approx([78 * 1728 * P for P in pools])
    assert [a * unit for a in live] == pytest.approx([78 * 1152 * load.live_tokens] * len(pools))
    assert set(new) == {story.LEAST**2} and story.LEAST**2 * unit > 78 * 1728 * load.concurrency
    assert "66.8 GB" in fig.layout.title.text and "at least" in fig.layout.title.text
    assert fig.data[2].name.endswith(written)


def test_a_load_that_fills_the_pool_has_no_smaller_pool_beside_it():
    fig = story.bytes_per_step(published_deployment(), Load(128, 8192), 495_616)
    assert len(squares(fig.data[0])) == 1 and "60 x 8,192" in fig.layout.title.text


def test_on_a_phone_nothing_is_wider_than_the_figure():
    spec = plots.fitted(story.bytes_per_step(published_deployment(), Load(), 495_616), 350)
    assert spec["layout"]["width"] == 350
    lines = spec["layout"]["title"]["text"].split("<br>")
    assert max(len(x) for x in lines if "sup" not in x) * plots.TITLE_PX <= 350
