"""Documents as the command line writes them, made up."""

from __future__ import annotations

PEAKS = {"flops_per_s": 2e11, "bytes_per_s": 4e10, "text": "measured with great care"}
HOSTILE = (
    "<script>alert(1)</script>",
    'conv" onmouseover="alert(1)',
    "'><img src=x onerror=alert(1)>",
    "</style></title><b>",
    "\u65e5\u672c\u8a9e\u306e\u5c64/" * 30,
    "\u0634\u0628\u0643\u0629",
    "\u202etxet\u0000\n\t",
    "&lt;b&gt;",
    "",
)


def layer(name="conv", *, sparse=True, sparsity=0.9, **more):
    """One layer of a model's report."""
    return {
        "name": name,
        "op_type": "Conv",
        "graph": "",
        "weight_shape": [64, 64, 3, 3],
        "dtype": "float32",
        "num_weights": 36864,
        "nonzeros": round(36864 * (1 - sparsity)),
        "sparsity": sparsity,
        "flops": 231211008,
        "dense_bytes": 147456,
        "sparse_bytes": 30000 if sparse else None,
        "input_shape": [None, 64, 56, 56],
        "output_shape": [None, 64, 56, 56],
        "verdict": {"rewrite": sparse, "reason": "decided-sparse" if sparse else "too-dense", "text": f"why {name}"},
        "images": [],
        **more,
    }


def decision(name="conv", *, sparse=True, dense_us=(200.0,), sparse_us=(100.0,), **more):
    """One layer of a decisions file."""
    choice = "sparse" if sparse else "dense"
    candidates = [
        {"name": "dense", "choice": "dense", "times_us": list(dense_us), "problem": ""},
        {"name": "sparse", "choice": "sparse", "times_us": list(sparse_us), "problem": ""},
    ]
    return {
        "node": name,
        "graph": "",
        "number": 0,
        "choice": choice,
        "advice": choice,
        "cause": "measured",
        "text": f"why {name}",
        "sparsity": 0.9,
        "measured_as": "",
        "candidates": candidates,
        **more,
    }


def decisions(layers=None, *, batches=(1,), peaks=PEAKS, whole=True):
    """What a tune found."""
    case = {
        "dense_us": 1000.0,
        "predicted_us": 480.0,
        "measured_us": 500.0,
        "speedup": {"of_medians": 2.0, "low": 1.9, "high": 2.1},
    }
    setting = {"processor": "an abacus", "onnxruntime": "1.0", "provider": "cpu", "threads": None, "preset": "quick"}
    return {
        "model": "net.onnx",
        "setting": {**setting, "peaks": peaks} if peaks else setting,
        "input_shapes": [{"x": [batch, 3, 224, 224]} for batch in batches],
        "layers": [decision()] if layers is None else layers,
        "whole_model": {"gain": True, "cases": [case] * len(batches), "trials": [], "text": "2.00x faster"}
        if whole
        else {},
        "notes": [],
        "source": "",
    }


def conversion(layers=None, tuned=None, **more):
    """What ``convert --report`` writes of one model."""
    layers = [layer()] if layers is None else layers
    return {
        "schema_version": 1,
        "command": "convert",
        "source": "models/net.onnx",
        "output": "fast/net.onnx",
        "model": {"layers": layers},
        "converted": any(one["verdict"]["rewrite"] for one in layers),
        "already_converted": False,
        "bytes_before": 1_000_000,
        "bytes_after": 250_000,
        "conv_bytes_before": 900_000,
        "conv_bytes_after": 150_000,
        "imaged_bytes_after": 0,
        "notes": ["a note"],
        "precision": None,
        "decisions": tuned,
        "versions": {"onnx-sparseconv": "0.1.0", "onnxruntime": None},
        "created": "2026-01-02 03:04 UTC",
        "exit_code": 0,
        **more,
    }


def many(number, *, names=None):
    """A tuned model of many layers, every third of them dense."""
    names = names or [f"/stage{index // 10}/conv{index}/Conv" for index in range(number)]
    kinds = [index % 3 != 2 for index in range(len(names))]
    layers = [
        layer(name, sparse=sparse, sparsity=0.5 + 0.49 * index / len(names), graph="")
        for index, (name, sparse) in enumerate(zip(names, kinds, strict=True))
    ]
    tuned = [
        decision(name, sparse=sparse, dense_us=(100.0 + index,), sparse_us=(50.0 if sparse else 150.0 + index,))
        for index, (name, sparse) in enumerate(zip(names, kinds, strict=True))
    ]
    return conversion(layers, decisions(tuned))


def verification(passed=True):
    """What ``verify --json`` writes."""
    errors = {"max_abs": 1e-6, "mean_abs": 1e-8, "rms": 1e-7, "max_of_range": 2e-7, "snr_db": 120.5}
    output = {"name": "y", "passed": passed, "identical": False, "errors": errors, "argmax_agreement": 1.0}
    return {"schema_version": 1, "command": "verify", "outputs": [output]}


def benchmark():
    """What ``bench --json`` writes."""
    return {
        "schema_version": 1,
        "command": "bench",
        "original": {"time": {"median_us": 3000.0}},
        "converted": {"time": {"median_us": 1000.0}},
        "speedup": {"of_medians": 3.0, "low": 2.8, "high": 3.2},
        "batch": 4,
        "threads": 2,
        "provider": "cpu",
        "input_shapes": {"x": [4, 3, 224, 224]},
        "layers": [{"name": "conv", "original_us": 900.0, "converted_us": 300.0, "converted_op": "SparseConv"}],
        "environment": {"cpu": "an abacus", "versions": {"onnxruntime": "1.0"}},
    }
