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
CAST = "void onnxruntime::cuda::_UnaryElementWise<__half, float, OP_Cast<__half, float>>"
ADD = "void onnxruntime::cuda::_BinaryElementWiseSimple<float>"


def test_a_dense_layer_has_products_a_bias_and_maybe_an_activation(parts):
    found = parts.dense_groups(
        kernels(
            "Transpose3DKernel", PRODUCT, BIAS, RELU, "pooling_fw", "Memset", PRODUCT, "splitKreduce", BIAS, ADD, RELU,
            "conv2d_c1_k1_nhwc", BIAS, "_Clip<float>", CAST, "cutlass_gemm", "splitKreduce",
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
            "sparseconv_flatten_f32", "sparseconv_flat_f32_n28",
            "sparseconv_pack", "sparseconv_gemm_ready_planes_s16",
        )
    )  # fmt: skip
    assert names(found) == [
        ["sparseconv_generated"],
        ["sparseconv_generated", "sparseconv_reduce_f32"],
        ["sparseconv_gather", "sparseconv_gather", "sparseconv_pointwise_s24"],
        ["sparseconv_interleave", "sparseconv_wgmma_p28", "sparseconv_reduce_vectors"],
        ["sparseconv_flatten_f32", "sparseconv_flat_f32_n28"],
        ["sparseconv_pack", "sparseconv_gemm_ready_planes_s16"],
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


def event(name, ts, x, y, op="Conv"):
    shapes = {"input_type_shape": [{"float": x}, {"float": [8, 4, 1, 1]}], "output_type_shape": [{"float16": y}]}
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "args": {"op_name": op, **shapes}}


def test_a_profile_says_in_which_order_layers_ran(parts):
    last, first = event("b", 20, [1, 9, 9, 3], [1, 9, 9, 8]), event("a", 10, [1, 3, 9, 9], [1, 8, 5, 5])
    others = [event("add", 5, [1], [1], op="Add"), {"cat": "Session", "name": "b_kernel_time"}]
    found = parts.executed_convolutions([last, *others, first])
    assert [name for name, _ in found] == ["a", "b"]
    assert [parts.sizes_of(event) for _, event in found] == [((1, 3, 9, 9), (1, 5, 5, 8)), ((1, 3, 9, 9), (1, 8, 9, 9))]


def test_layers_of_a_branch_may_run_before_others(parts):
    groups = [kernels("b1"), kernels("a"), kernels("b2")]
    assert parts.by_layer(["a", "b", "b"], ["b", "a", "b"], groups) == [groups[1], groups[0], groups[2]]
    with pytest.raises(ValueError, match="layer c did not run"):
        parts.by_layer(["a", "b", "c"], ["b", "a", "b"], groups)
    with pytest.raises(ValueError, match="3 layers ran, not 2"):
        parts.by_layer(["a", "b"], ["b", "a", "b"], groups)
