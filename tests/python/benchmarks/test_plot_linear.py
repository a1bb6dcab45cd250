import importlib.util
import pathlib
import xml.etree.ElementTree

import pytest

PATH = pathlib.Path(__file__).parents[3] / "benchmarks" / "harness" / "plot_linear.py"
spec = importlib.util.spec_from_file_location("plot_linear", PATH)
plot_linear = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plot_linear)


def row(m, ratio, direction="forward", auto=True, n=4096):
    spreads = dict(spread=0.02, dense_spread=0.02)
    return dict(n=n, k=4096, m=m, direction=direction, auto=auto, ratio_dense=ratio, **spreads)


def test_the_picture_is_xml_with_a_point_for_every_row_of_auto_and_none_for_others():
    rows = [row(m, 0.5 + m / 100, direction) for m in (1, 16, 64) for direction in ("forward", "grad_x")]
    record = dict(device="A <card>", rows=[*rows, row(16, 3.0, auto=False)])
    root = xml.etree.ElementTree.fromstring(plot_linear.svg(record))
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == 6
    assert any("A <card>" in (element.text or "") for element in root.iter())


def test_a_larger_ratio_lies_higher_and_ratios_beyond_the_axis_stay_inside():
    panel = plot_linear.Panel(0, [1, 16])
    assert (
        panel.y(1.2) < panel.y(0.8) and panel.y(9.0) == panel.y(plot_linear.HIGH) and panel.x(16) == plot_linear.WIDTH
    )


def test_a_record_without_auto_is_refused():
    with pytest.raises(ValueError, match="no rows of auto"):
        plot_linear.svg(dict(device="x", rows=[row(1, 1.0, auto=False)]))
