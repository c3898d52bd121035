"""Figures of the models of times. Made by ``benchmarks/fit_gpu_rule.py``; do not edit."""

from onnx_sparseconv.kernels.gpu_network_times import NetworkModel
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
    row_us=10.8,
    dense_launch_us=4.068,
    sparse_launch_us=3.932,
    sparse_slowdown=0.9868,
    library_launch_us=1.473,
    library_mhz=1738.0,
)
NETWORK = NetworkModel(
    tflops=535.5,
    half_depth=324.5,
    half_moutputs=0.9312,
    bandwidth_tb=4.573,
    depthwise_tb=3.34,
    product_launch_us=2.383,
    window_us=0.8948,
    pass_launch_us=0.8851,
    bias_us=3.577,
    activation_us=1.597,
    clip_us=2.864,
    code_launch_us=1.565,
    code_slowdown=0.941,
    code_size_us=15.26,
    code_in_us=0.1444,
    code_out_us=-0.0925,
)
# Of float16.
HALF_NETWORK = NetworkModel(
    tflops=906.5,
    half_depth=235.5,
    half_moutputs=0.4746,
    bandwidth_tb=3.771,
    depthwise_tb=1.917,
    product_launch_us=2.035,
    window_us=2.559,
    pass_launch_us=1.34,
    bias_us=3.507,
    activation_us=0.8808,
    clip_us=2.487,
    code_launch_us=0.5271,
    code_slowdown=0.7668,
    code_size_us=15.56,
    code_in_us=0.2111,
    code_out_us=0.07497,
)
# A layer is rewritten where it is foretold to gain by this factor, at least. The least one from 1.2 on with
# which no measured layer would be rewritten that loses more than a tenth, else of those with the fewest.
MIN_GAIN = 1.2
