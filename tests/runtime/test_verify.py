from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_sparseconv.errors import ModelError, ProviderError, UsageError, VerificationError
from onnx_sparseconv.runtime.kernels import DENSE_KERNEL
from onnx_sparseconv.runtime.plain import to_json_text
from onnx_sparseconv.runtime.verify import verify
from tests.runtime import networks


@pytest.mark.parametrize("use_library", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_converted_model_passes(tmp_path, dtype, use_library):
    layer_weights = networks.weights(dtype)
    dense = networks.save(networks.dense(layer_weights, flat=True), tmp_path / "d.onnx")
    sparse = networks.save(networks.sparse(layer_weights, flat=True), tmp_path / "s.onnx")
    report = verify(dense, sparse, use_library=use_library, batch=3)
    assert report.passed
    (output,) = report.outputs
    assert (output.shape, output.argmax_agreement) == ((3, 8), 1.0)
    assert output.errors.max_abs <= output.atol
    assert report.input_shapes == {"x": (3, 8, 12, 12)}
    assert report.tolerance.derived_from.storage == np.dtype(dtype).name
    assert len(report.kernels) == 2
    assert all((use.kernel == DENSE_KERNEL) != use_library for use in report.kernels)


def test_a_changed_weight_is_found(tmp_path, pair):
    layer_weights = networks.weights()
    position = tuple(np.argwhere(layer_weights[1])[0])
    layer_weights[1][position] *= 1.01
    changed = networks.save(networks.sparse(layer_weights), tmp_path / "s.onnx")
    report = verify(pair[0], changed)
    assert not report.passed
    assert report.outputs[0].num_outside > 0
    assert verify(pair[0], changed, rtol=0.1, atol=10).passed


def test_the_seed_chooses_the_inputs(pair):
    first, again, other = (verify(*pair, seed=seed).outputs[0].scale for seed in (0, 0, 1))
    assert first == again != other


def test_real_inputs_come_from_arrays_or_a_file(pair, tmp_path):
    x = np.ones((1, 8, 12, 12), np.float32)
    np.savez(tmp_path / "in.npz", x=x)
    from_file, from_array = verify(*pair, inputs=tmp_path / "in.npz"), verify(*pair, inputs={"x": x})
    assert from_file.inputs.endswith("in.npz")
    assert from_file.outputs[0].scale == from_array.outputs[0].scale
    with pytest.raises(ModelError, match="no array for input x"):
        verify(*pair, inputs={"z": x})


def test_shapes_are_checked(pair):
    with pytest.raises(UsageError, match="does not fit"):
        verify(*pair, shapes={"x": (1, 3, 12, 12)})


def test_models_with_other_outputs_or_inputs_cannot_be_compared(pair, tmp_path):
    other = networks.save(networks.sparse(networks.weights(), output="z"), tmp_path / "z.onnx")
    with pytest.raises(
        VerificationError, match=r"only the original has y tensor\(float\), only the converted one has z"
    ):
        verify(pair[0], other)
    half = networks.save(networks.sparse(networks.weights(np.float16)), tmp_path / "h.onnx")
    with pytest.raises(VerificationError, match="float16"):
        verify(half, pair[1], use_library=False)


def test_a_float16_model_is_compared_with_its_float_original(pair, tmp_path):
    half = networks.save(networks.sparse(networks.weights(np.float16)), tmp_path / "h.onnx")
    report = verify(pair[0], half)
    assert report.tolerance.derived_from.storage == "float16"
    (output,) = report.outputs
    assert report.passed
    assert (output.dtype, output.converted_dtype) == ("float32", "float32")
    assert output.errors.max_abs > 1e-5  # it was not computed in float


def test_a_float16_model_that_is_wrong_fails(pair, tmp_path):
    weights = networks.weights(np.float16)
    weights[1][tuple(np.argwhere(weights[1])[0])] *= 2
    half = networks.save(networks.sparse(weights), tmp_path / "h.onnx")
    assert not verify(pair[0], half).passed


def test_another_shape_of_an_output_is_a_difference(pair, tmp_path):
    model = networks.sparse(networks.weights())
    model.graph.node[-1].output[0] = "cropped"
    model.graph.node.append(helper.make_node("GlobalAveragePool", ["cropped"], ["y"]))
    del model.graph.output[0].type.tensor_type.shape.dim[2:]
    model.graph.output[0].type.tensor_type.shape.dim.add(dim_value=1)
    model.graph.output[0].type.tensor_type.shape.dim.add(dim_value=1)
    report = verify(pair[0], networks.save(model, tmp_path / "c.onnx"))
    assert not report.passed
    assert report.outputs[0].reason == "another shape"


def test_outputs_that_say_nothing_are_remarked_on(tmp_path):
    layer_weights = [np.zeros((4, 4, 3, 3), np.float32)]
    dense = networks.save(networks.dense(layer_weights), tmp_path / "d.onnx")
    report = verify(dense, dense)
    assert report.passed
    assert any("no SparseConv" in note for note in report.notes)
    assert report.insensitive_outputs == ("y",)
    assert any("proves little" in note for note in report.notes)


def test_a_saturated_output_is_remarked_on_and_a_live_one_is_not(pair, tmp_path):
    assert verify(*pair).insensitive_outputs == ()
    model = networks.dense([w * 1e4 for w in networks.weights()], flat=True)
    model.graph.node[-1].output[0] = "logits"
    model.graph.node.append(helper.make_node("Sigmoid", ["logits"], ["y"]))
    path = networks.save(model, tmp_path / "saturated.onnx")
    assert verify(path, path).insensitive_outputs == ("y",)
    assert verify(path, path, inputs={"x": np.ones((1, 8, 12, 12), np.float32)}).insensitive_outputs == ()


def test_an_overridable_initializer_keeps_its_default(tmp_path):
    model = networks.dense(networks.weights())
    model.graph.input.append(helper.make_tensor_value_info("w0", 1, [8, 8, 3, 3]))
    path = tmp_path / "d.onnx"
    onnx.save(model, str(path))
    report = verify(path, path)
    assert report.passed
    assert list(report.input_shapes) == ["x"]


def test_the_report_is_json_without_nan_or_infinity(pair):
    plain = json.loads(to_json_text(verify(pair[0], pair[0])))
    assert plain["outputs"][0]["identical"] is True
    assert plain["outputs"][0]["errors"]["snr_db"] is None
    assert plain["tolerance"]["derived_from"]["depth"] == 2


@pytest.mark.usefixtures("sparse_kernels_say_cuda")
def test_on_cuda_the_original_runs_on_the_cpu_and_the_converted_model_without_tf32(pair, cuda_on_cpu):
    config = {"sparseconv.cuda_kernel": "csr"}
    report = verify(*pair, provider="cuda", config=config)
    assert report.passed
    assert (report.provider, report.reference_provider) == ("cuda", "cpu")
    assert cuda_on_cpu == [{}, {"use_tf32": "0"}]
    assert any("original ran on the CPU; TF32 is switched off" in note for note in report.notes)
    assert (report.tf32, report.tolerance.derived_from.storage) == (False, "float32")
    assert [use.provider for use in report.kernels] == ["cuda", "cuda"]
    assert report.nodes_elsewhere == ()


@pytest.mark.usefixtures("sparse_kernels_say_cuda")
def test_with_tf32_the_provider_has_its_defaults_and_the_tolerance_is_that_of_11_bits(pair, cuda_on_cpu, tmp_path):
    report = verify(*pair, provider="cuda", tf32=True)
    assert cuda_on_cpu == [{}, {}]
    assert (report.passed, report.tf32) == (True, True)
    assert any("TF32 is allowed in the converted model" in note for note in report.notes)
    derived = report.tolerance.derived_from
    assert (derived.depth, derived.storage) == (3, "tf32")
    assert json.loads(to_json_text(report))["tf32"] is True
    # Right but for the rounding of its weights to 11 bits; and wrong.
    rounded = [w.astype(np.float16).astype(np.float32) for w in networks.weights()]
    model = networks.save(networks.sparse(rounded), tmp_path / "rounded.onnx")
    assert verify(pair[0], model, provider="cuda", tf32=True).passed
    assert not verify(pair[0], model, provider="cuda").passed
    assert not verify(pair[0], model, provider="cuda", tf32=True, rtol=0, atol=0).passed
    rounded[1][tuple(np.argwhere(rounded[1])[0])] *= 2
    model = networks.save(networks.sparse(rounded), tmp_path / "wrong.onnx")
    assert not verify(pair[0], model, provider="cuda", tf32=True).passed


@pytest.mark.usefixtures("sparse_kernels_say_cuda", "cuda_on_cpu")
def test_tf32_changes_nothing_in_the_tolerance_of_a_float16_model(pair, tmp_path):
    half = networks.save(networks.sparse(networks.weights(np.float16)), tmp_path / "h.onnx")
    with_tf32, without = (verify(pair[0], half, provider="cuda", tf32=tf32) for tf32 in (True, False))
    assert with_tf32.passed
    assert with_tf32.tolerance == without.tolerance


@pytest.mark.parametrize(
    "wrong", [{"rtol": float("nan")}, {"atol": float("nan")}, {"rtol": -1.0}, {"seed": -1}], ids=str
)
def test_numbers_out_of_their_range_are_refused(pair, wrong):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} must be at least 0"):
        verify(*pair, **wrong)


def test_a_function_that_calls_itself_is_refused(tmp_path, pair):
    call = [helper.make_node("F", [a], [b], domain="f") for a, b in (("a", "t"), ("t", "b"))]
    model = onnx.load(pair[0])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    model.functions.append(helper.make_function("f", "F", ["a"], ["b"], call, opsets))
    model.opset_import.append(helper.make_opsetid("f", 1))
    (output,) = model.graph.output
    model.graph.node.append(helper.make_node("F", [output.name], ["of_function"], domain="f"))
    output.name = "of_function"
    onnx.save(model, tmp_path / "recursive.onnx")
    with pytest.raises(ModelError, match=r"recursive\.onnx: its function F calls itself"):
        verify(tmp_path / "recursive.onnx", tmp_path / "recursive.onnx")


def test_tf32_needs_cuda(pair):
    with pytest.raises(UsageError, match=r"TF32 \(--tf32\) needs --provider cuda"):
        verify(*pair, tf32=True)


@pytest.mark.usefixtures("sparse_kernels_say_cuda", "cuda_on_cpu")
def test_on_cuda_nodes_that_ran_on_the_cpu_are_told(pair, monkeypatch):
    from onnx_sparseconv.runtime import profiling

    monkeypatch.setattr(profiling, "PROVIDER_NAMES", {"cuda": "CUDAExecutionProvider"})
    report = verify(*pair, provider="cuda")
    assert {(place.node, place.provider) for place in report.nodes_elsewhere} >= {("conv0", "CPUExecutionProvider")}


@pytest.mark.usefixtures("cuda_on_cpu")
def test_sparse_nodes_that_fell_back_to_the_cpu_are_an_error(pair):
    with pytest.raises(ProviderError, match="2 of 2 SparseConv nodes on cpu"):
        verify(*pair, provider="cuda")
    assert verify(*pair, provider="cuda", use_library=False).passed
