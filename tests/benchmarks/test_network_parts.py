"""To which layers the kernels of a network belong, in the order in which a profiler saw them."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture
def parts():
    return importlib.import_module("network_parts")


def kernels(*names):
    return [(name, float(index)) for index, name in enumerate(names, 1)]


def names(groups):
    return [[name for name, _ in group] for group in groups]


PRODUCT = "sm90_xmma_fprop_implicit_gemm_tf32"
BIAS = "void op_generic_tensor_kernel<4, float>"
RELU = "void onnxruntime::cuda::_UnaryElementWise<float, OP_Relu>"
ADD = "void onnxruntime::cuda::_BinaryElementWiseSimple<float>"


def test_a_dense_layer_has_products_a_bias_and_maybe_an_activation(parts):
    found = parts.dense_groups(
        kernels(
            "Transpose3DKernel", PRODUCT, BIAS, RELU, "pooling_fw", "Memset", PRODUCT, "splitKreduce", BIAS, ADD, RELU,
            "conv2d_c1_k1_nhwc", BIAS, "_Clip<float>", "cutlass_gemm", "splitKreduce",
        )
    )  # fmt: skip
    assert names(found) == [
        [PRODUCT, BIAS, RELU],
        [PRODUCT, "splitKreduce", BIAS, RELU],
        ["conv2d_c1_k1_nhwc", BIAS, "_Clip<float>"],
    ]


def test_what_is_launched_before_and_behind_belongs_to_a_sparse_layer(parts):
    found = parts.sparse_groups(
        kernels(
            "sparseconv_generated", "sparseconv_max_pool_2x2_f32", "sparseconv_generated", "sparseconv_reduce_f32",
            "sparseconv_gather", "sparseconv_gather", "sparseconv_pointwise_s24", RELU,
            "sparseconv_interleave", "sparseconv_wgmma_p28", "sparseconv_reduce_vectors",
        )
    )  # fmt: skip
    assert names(found) == [
        ["sparseconv_generated"],
        ["sparseconv_generated", "sparseconv_reduce_f32"],
        ["sparseconv_gather", "sparseconv_gather", "sparseconv_pointwise_s24"],
        ["sparseconv_interleave", "sparseconv_wgmma_p28", "sparseconv_reduce_vectors"],
    ]


def test_a_layers_time_is_divided_by_what_its_kernels_do(parts):
    layer = {
        "dense": {
            "us": 10.0,
            "kernels": [{"name": PRODUCT, "us": 5.0}, {"name": BIAS, "us": 3.0}, {"name": RELU, "us": 2.0}],
        },
        "sparse_us": 4.0,
    }
    assert parts.parts_of(layer) == (5.0, 3.0, 2.0, 4.0)
