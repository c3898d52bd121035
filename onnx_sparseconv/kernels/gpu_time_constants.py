"""Figures of `gpu_times.TimeModel`. Made by ``benchmarks/fit_gpu_rule.py``; do not edit."""

from onnx_sparseconv.kernels.gpu_times import TimeModel

# What the layers were measured on, and its architecture.
MEASURED_ON = "NVIDIA H200"
MEASURED_ARCHITECTURE = 90
MODEL = TimeModel(
    clock_mhz=1755.0,
    float_tflops=464.7,
    half_tflops=710.8,
    half_depth=2219.0,
    half_moutputs=0.2797,
    least_depth=256.0,
    least_moutputs=0.02509,
    bandwidth_tb=1.871,
    layout_us=5.267,
    dense_launch_us=0.7898,
    sparse_launch_us=0.2664,
    sparse_slowdown=0.8687,
)
# A layer is rewritten where it is foretold to gain by this factor, at least. The least one with which no
# measured layer would be rewritten that loses more than a tenth.
MIN_GAIN = 1.15
