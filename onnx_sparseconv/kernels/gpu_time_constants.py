"""Figures of `gpu_times.TimeModel`. Made by ``benchmarks/fit_gpu_rule.py``; do not edit."""

from onnx_sparseconv.kernels.gpu_times import Gpu, TimeModel

# What the layers were measured on, and its architecture.
MEASURED_ON = "NVIDIA H200"
MEASURED_ARCHITECTURE = 90
MODEL = TimeModel(
    gpu=Gpu(multiprocessors=132, clock_mhz=1755.0),
    float_tflops=465.8,
    half_tflops=703.8,
    half_depth=2206.0,
    half_moutputs=0.2723,
    least_depth=256.0,
    least_moutputs=0.02509,
    bandwidth_tb=1.853,
    layout_us=5.346,
    dense_launch_us=0.7832,
    sparse_launch_us=2.944,
    sparse_slowdown=1.093,
    full_waves=0.5304,
    max_idle=2.554,
)
# A layer is rewritten where it is foretold to gain by this factor, at least. The least one with which no
# measured layer would be rewritten that loses.
MIN_GAIN = 1.2
