"""Figures of `gpu_times.TimeModel`. Made by ``benchmarks/fit_gpu_rule.py``; do not edit."""

from onnx_sparseconv.kernels.gpu_times import TimeModel

# What the layers were measured on, and its architecture.
MEASURED_ON = "NVIDIA H200"
MEASURED_ARCHITECTURE = 90
MODEL = TimeModel(
    clock_mhz=1755.0,
    multiprocessors=132.0,
    float_tflops=512.4,
    half_tflops=756.4,
    half_depth=2667.0,
    half_moutputs=0.4304,
    least_depth=256.0,
    least_moutputs=0.02509,
    bandwidth_tb=2.895,
    layout_us=5.047,
    dense_launch_us=4.068,
    sparse_launch_us=3.932,
    sparse_slowdown=0.9868,
    library_launch_us=1.572,
    library_mhz=1690.0,
)
# A layer is rewritten where it is foretold to gain by this factor, at least. The least one from 1.2 on with
# which no measured layer would be rewritten that loses more than a tenth, else of those with the fewest.
MIN_GAIN = 1.2
