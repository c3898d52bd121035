"""Charts of a report, each a pure function to a `Chart`: a picture, or the reason why there is none."""

from onnx_sparseconv.report.charts.chart import Chart
from onnx_sparseconv.report.charts.gain import gain_chart
from onnx_sparseconv.report.charts.layer_times import layer_times_chart
from onnx_sparseconv.report.charts.roofline import roofline_chart
from onnx_sparseconv.report.charts.speedup import speedup_chart

__all__ = ["Chart", "gain_chart", "layer_times_chart", "roofline_chart", "speedup_chart"]
