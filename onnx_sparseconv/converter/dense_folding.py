"""Folding around convolutions that stay dense, where the model becomes float16.

ONNX Runtime folds a BatchNormalization into a Conv itself, but in the type that it finds: in float16 both the
parameters and what is made of them would be rounded, and variances are the first to suffer. Here it is done in
float64, and rounded once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np
import onnx_graphsurgeon as gs
from onnx import ModelProto, TensorProto

from onnx_sparseconv.converter.conv_sites import ConvSite, find_conv_sites
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.converter.pipeline import Pipeline
from onnx_sparseconv.converter.precision.weights import Lost, through_half
from onnx_sparseconv.converter.shapes import ShapeMap
from onnx_sparseconv.passes.base import detach
from onnx_sparseconv.passes.conv_layer import ConvLayer


def fold_dense(proto: ModelProto, keep: Collection[str] = ()) -> tuple[tuple[str, ...], tuple[Lost, ...]]:
    """Fold what stands around the float Conv of a model into them, as far as rounding to float16 allows it.

    Args:
        proto: the model; it is changed.
        keep: names of nodes, or of operators, that stay float: they are not folded, and into them nothing is.

    Returns:
        Notes, and what rounding to float16 took from the weights.
    """
    view, shapes = ModelView(proto), ShapeMap(proto)
    sites = [s for s in find_conv_sites(view, shapes) if _is_dense_float(s) and not s.is_named_in(keep)]
    if not sites:
        return (), ()
    pipeline = Pipeline(view, shapes, sites, to_half=True, keep=keep)
    pipeline.fold()
    lost = []
    for site in sites:
        layer, loss = through_half(pipeline.layers[id(site.node)], np.dtype(np.float32), site.name)
        if _has_changed(site, layer):
            _replace(view, site, layer.rounded())
            lost += [loss] if loss is not None else []
    view.write_back()
    counts = Counter(note.text.split(" '")[0] for report in pipeline.reports() for note in report.done)
    folded = ", ".join(f"{number} {what}" for what, number in counts.items())
    notes = [f"{folded} folded into convolutions that stay dense"] if folded else []
    notes += [note for note in pipeline.notes() if "would not fit into float16" in note]
    return tuple(notes), tuple(lost)


def _is_dense_float(site: ConvSite) -> bool:
    weight = site.weight
    return (
        site.is_conv
        and site.geometry is not None
        and weight is not None
        and weight.element_type == TensorProto.FLOAT
        and not weight.overridable
        and not weight.quantised
    )


def _has_changed(site: ConvSite, layer: ConvLayer) -> bool:
    assert site.weight is not None
    return layer.weight is not site.weight.values or layer.new_bias or layer.geometry != site.geometry


def _replace(view: ModelView, site: ConvSite, layer: ConvLayer) -> None:
    """Put a Conv with the folded parameters in the place of a site's."""
    old, graph = site.node, site.scope.graph
    attributes = dict(old.attrs)
    if layer.geometry != site.geometry:
        if any(pad < 0 for pad in layer.geometry.pads):
            # ONNX Runtime opens no such Conv, or crops its input; folding refuses before it comes to this.
            raise ValueError(f"node {site.name!r} would get negative pads {list(layer.geometry.pads)}")
        attributes.pop("auto_pad", None)
        attributes["pads"] = list(layer.geometry.pads)
    inputs, outputs = list(old.inputs), list(old.outputs)
    assert site.weight is not None
    if layer.weight is not site.weight.values:
        inputs[1] = gs.Constant(view.unique_name(f"{site.weight_name}_folded"), layer.weight)
    if layer.new_bias:
        inputs[2:] = [gs.Constant(view.unique_name(f"{site.name}_bias"), layer.bias)]
    position = next(i for i, node in enumerate(graph.nodes) if node is old)
    detach(old)
    graph.nodes[position] = gs.Node("Conv", old.name, attributes, inputs, outputs)
