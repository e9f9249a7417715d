import re

import numpy as np
import pandas as pd

from qkpipe.report.sparkline import HEIGHT, PAD, WIDTH, Scale, sparkline


def _points(svg):
    path = re.search(r'd="([^"]*)"', svg)[1]
    return [(kind, float(x), float(y)) for kind, x, y in re.findall(r"([ML])([\d.]+) ([\d.]+)", path)]


def test_extremes_reach_the_padding():
    scale = Scale(last_step=10, low=0, high=2, log=False)
    points = _points(sparkline([0, 10], [0.0, 2.0], scale))
    assert points == [("M", PAD, HEIGHT - PAD), ("L", WIDTH - PAD, PAD)]


def test_log_scale_puts_the_geometric_mean_in_the_middle():
    curves = pd.DataFrame({"step": [0, 10], "sigma": [1.0, 100.0]})
    scale = Scale.over(curves, "sigma", log=True)
    assert _points(sparkline([5], [10.0], scale)) == [("M", WIDTH / 2, HEIGHT / 2)]


def test_gaps_stay_gaps_and_marks_are_drawn():
    scale = Scale(last_step=4, low=0, high=1, log=True)
    svg = sparkline([0, 1, 2, 3, 4], [1.0, np.nan, 2.0, -1.0, 3.0], scale, [("collapse", 2), ("fire", None)])
    assert [kind for kind, *_ in _points(svg)] == ["M", "M", "M"]
    assert svg.count("<line") == 1 and 'class="collapse"' in svg


def test_empty_and_constant_curves():
    empty = pd.DataFrame({"step": np.array([], int), "loss": np.array([], float)})
    assert _points(sparkline([], [], Scale.over(empty, "loss", log=False))) == []
    flat = pd.DataFrame({"step": [0, 1], "loss": [2.0, 2.0]})
    assert len(_points(sparkline(flat["step"], flat["loss"], Scale.over(flat, "loss", log=False)))) == 2
