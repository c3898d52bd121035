"""Figures of `gpu_times.TimeModel`. Made by ``benchmarks/fit_gpu_rule.py``; do not edit."""

from onnx_sparseconv.kernels.gpu_times import TimeModel

# What the layers were measured on, and its architecture.
MEASURED_ON = "NVIDIA H200"
MEASURED_ARCHITECTURE = 90
MODEL = TimeModel(
    clock_mhz=1755.0,
    multiprocessors=132.0,
    float_tflops=505.8,
    half_tflops=749.6,
    half_depth=2601.0,
    half_moutputs=0.4032,
    least_depth=256.0,
    least_moutputs=0.02509,
    bandwidth_tb=2.702,
    layout_us=5.025,
    dense_launch_us=2.395,
    sparse_launch_us=1.901,
    sparse_slowdown=0.9829,
    warpgroup_mhz=1717.0,
    pointwise_launch_us=3.145,
    pointwise_tile_us=1.637,
    pointwise_chunk_us=0.144,
    pointwise_segment_us=0.0125,
    gather_tb=3.513,
)
# A layer is rewritten where it is foretold to gain by this factor, at least. The least one from 1.2 on with
# which no measured layer would be rewritten that loses more than a tenth, else of those with the fewest.
MIN_GAIN = 1.2
