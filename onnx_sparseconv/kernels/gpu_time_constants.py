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
    library_launch_us=1.139,
    library_mhz=1592.0,
)
NETWORK = NetworkModel(
    tflops=535.5,
    half_depth=324.9,
    half_moutputs=0.912,
    bandwidth_tb=4.579,
    depthwise_tb=3.347,
    product_launch_us=2.424,
    window_us=0.8934,
    pass_launch_us=0.8964,
    bias_us=3.574,
    activation_us=1.596,
    slow_activation_us=2.862,
    code_launch_us=1.558,
    code_slowdown=0.9466,
    code_size_us=15.33,
    code_in_us=0.1432,
    code_out_us=-0.09478,
)
# Of float16.
HALF_NETWORK = NetworkModel(
    tflops=899.9,
    half_depth=233.1,
    half_moutputs=0.461,
    bandwidth_tb=3.781,
    depthwise_tb=1.92,
    product_launch_us=2.047,
    window_us=2.608,
    pass_launch_us=1.354,
    bias_us=3.506,
    activation_us=0.8764,
    slow_activation_us=2.482,
    code_launch_us=0.5271,
    code_slowdown=0.7668,
    code_size_us=15.56,
    code_in_us=0.2111,
    code_out_us=0.07497,
)
# A layer is rewritten where it is foretold to gain by this factor, at least. The least one from 1.2 on with
# which no measured layer would be rewritten that loses more than a tenth, else of those with the fewest.
MIN_GAIN = 1.2
