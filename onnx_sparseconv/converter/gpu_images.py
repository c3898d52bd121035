"""GPU kernel images in the nodes of a converted model.

They are made last, of the nodes as they are then: an image holds the weights, the geometry and the activation of its
node as code, so a pass that changed one of these afterwards would leave an image that computes something else.
`drop_stale` guards against that where a model that carries images is converted again.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from onnx_sparseconv.converter.conv_sites import ConvSite, find_conv_sites
from onnx_sparseconv.converter.gpu_predictions import GpuRule, choose_kernels
from onnx_sparseconv.converter.model_io import MAX_INLINE_BYTES
from onnx_sparseconv.converter.model_view import ModelView
from onnx_sparseconv.converter.report import ConversionReport, ImageReport
from onnx_sparseconv.converter.shapes import ShapeMap
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.custom_ops.schema import CONCAT_OPS, DOMAIN, OP_TYPES, SparseConvAttributes
from onnx_sparseconv.errors import FormatError
from onnx_sparseconv.kernels import fatbin, nvjitlink
from onnx_sparseconv.kernels.compile import CompileOptions, Outcome, Progress, compile_layers, is_linked
from onnx_sparseconv.kernels.image_container import Image, pack, parse
from onnx_sparseconv.kernels.kernel_choice import CSR, KernelChoice, from_batch
from onnx_sparseconv.kernels.layer import Refusal, SparseLayer, make_layer
from onnx_sparseconv.kernels.targets import Target
from onnx_sparseconv.kernels.unified_csr import Array, decode
from onnx_sparseconv.nodes import iterate_nodes

ATTRIBUTE = "cuda_images"
# Attributes that images do not depend on: sizes of activations come at run time, -0.0 multiplies like +0.0, and several
# inputs are copied together first, but for images that say which they read.
_FREE = frozenset({ATTRIBUTE, "alpha", "beta", "weight_negative_zeros", "input_channels"})

# Graph and name of a node, and how many of that name came before it in that graph.
NodeKey = tuple[str, str, int]
# By node and architecture, 90 for sm_90, the kernel that is to run it.
Choices = Mapping[NodeKey, Mapping[int, KernelChoice]]


@dataclass(frozen=True)
class AddedImages:
    """What `add_images` did.

    Attributes:
        layers: what became of each sparse node and target.
        stored_bytes: of the container in each sparse node.
        notes: what else is worth knowing.
    """

    layers: Mapping[NodeKey, tuple[ImageReport, ...]]
    stored_bytes: Mapping[NodeKey, int]
    notes: tuple[str, ...]


def add_images(
    proto: ModelProto,
    targets: Sequence[Target],
    options: CompileOptions,
    progress: Progress | None = None,
    choices: Choices | None = None,
    *,
    rule: GpuRule | None = None,
) -> AddedImages:
    """Compile images for every sparse node of a model and put them into the nodes, instead of those that are there.

    Args:
        proto: the model, whole: nothing that images depend on may change afterwards.
        targets: what to compile for.
        options: processes and cache.
        progress: called before the first image, and after each.
        choices: by node and architecture, the kernel that was chosen; for all others the plan is.
        rule: what to choose kernels for where ``choices`` have none; None: all others get images.

    Raises:
        CompileError: a compiler failed.
    """
    nodes = sparse_nodes(proto)
    possible = {key: node.layer for key, node in nodes.items() if isinstance(node.layer, SparseLayer)}
    choices = {key: _choices(nodes[key], rule, (choices or {}).get(key, {})) for key in possible}
    chosen = list(choices.values())
    named = [(nodes[key].name, layer) for key, layer in possible.items()]
    made = dict(zip(possible, compile_layers(named, targets, options, progress=progress, choices=chosen), strict=True))
    found: dict[NodeKey, tuple[ImageReport, ...]] = {}
    stored: dict[NodeKey, int] = {}
    problems: dict[str, None] = {}
    for key, node in nodes.items():
        layer = node.layer
        outcomes = (Outcome(None, layer.reason, 0.0),) * len(targets) if isinstance(layer, Refusal) else made[key]
        stored[key] = _set_images(node.proto, [o.image for o in outcomes if o.image is not None])
        found[key] = tuple(_report(target, o) for target, o in zip(targets, outcomes, strict=True))
        problems.update(dict.fromkeys(o.cache_problem for o in outcomes if o.cache_problem))
        problems.update(dict.fromkeys(_not_as_chosen(node.name, outcomes, choices.get(key, {}))))
    problems.update(dict.fromkeys(missing_tools(targets, [o for outcomes in made.values() for o in outcomes])))
    return AddedImages(found, stored, tuple(problems))


def _choices(node: SparseNode, rule: GpuRule | None, chosen: Mapping[int, KernelChoice]) -> dict[int, KernelChoice]:
    """What was chosen, and what is foretold elsewhere; of inputs that are joined, nothing was measured."""
    foretold = _foretold(node, rule)
    return {**chosen, **foretold} if node.proto.op_type in CONCAT_OPS else {**foretold, **chosen}


def _foretold(node: SparseNode, rule: GpuRule | None) -> dict[int, KernelChoice]:
    if rule is None or isinstance(node.layer, Refusal):
        return {}
    if node.layer.scales_channels:
        # The library's kernel takes what memory takes.
        return dict.fromkeys(rule.architectures, CSR)
    if node.input_shape is None:
        return {}
    return choose_kernels(node.layer, node.input_shape, rule, is_joined=node.proto.op_type in CONCAT_OPS)


@dataclass(frozen=True, eq=False)
class SparseNode:
    """A sparse convolution of a converted model, as code is generated for it.

    Attributes:
        name: for messages.
        proto: the node itself.
        layer: what it computes, or why no code can be generated for it.
        input_shape: of X, with None for sizes that are open; None where nothing is known of it.
    """

    name: str
    proto: NodeProto
    layer: SparseLayer | Refusal
    input_shape: tuple[int | None, ...] | None = None


def sparse_nodes(proto: ModelProto) -> dict[NodeKey, SparseNode]:
    """Every sparse convolution of a model."""
    sites = find_conv_sites(ModelView(proto), ShapeMap(proto))
    return {
        key: SparseNode(site.name, site.proto, _make_layer(site), site.input_shape)
        for key, site in zip(node_keys(sites), sites, strict=True)
        if site.is_sparse
    }


def compile_choices(
    layers: Sequence[tuple[str, SparseLayer]],
    choices: Sequence[KernelChoice],
    target: Target,
    options: CompileOptions,
    progress: Progress | None = None,
) -> list[Outcome]:
    """One image for each layer, with the plan that was chosen for it; a layer may occur several times.

    Raises:
        CompileError: a compiler failed.
    """
    by_architecture = [{target.architecture: choice} for choice in choices]
    made = compile_layers(layers, (target,), options, progress=progress, choices=by_architecture)
    return [outcome for (outcome,) in made]


def put_image(node: SparseNode, image: Image) -> None:
    """Give a node one image, instead of those that it has."""
    _set_images(node.proto, [image])


def with_images(report: ConversionReport, keys: Sequence[NodeKey], added: AddedImages) -> ConversionReport:
    """A report with what became of each layer's images; ``keys`` are those of its layers."""
    layers = tuple(
        replace(layer, images=added.layers[key]) if key in added.layers else layer
        for key, layer in zip(keys, report.model.layers, strict=True)
    )
    carrying = [(layer, added.stored_bytes.get(key, 0)) for key, layer in zip(keys, layers, strict=True)]
    carrying = [(layer, stored) for layer, stored in carrying if stored]
    return replace(
        report,
        model=replace(report.model, layers=layers),
        notes=(*report.notes, *added.notes),
        imaged_bytes_before=sum(layer.dense_bytes for layer, _ in carrying),
        imaged_bytes_after=sum((layer.sparse_bytes or 0) + stored for layer, stored in carrying),
    )


def images_of(attributes: SparseConvAttributes) -> tuple[ImageReport, ...]:
    """What a node's container holds; one that cannot be read is reported, not raised."""
    try:
        images = parse(attributes.cuda_images.tobytes())
    except FormatError as error:
        return (ImageReport("", attributes.cuda_images.nbytes, "", "", "", f"cannot be read: {error}"),)
    return tuple(_report_image(image) for image in images)


def node_keys(sites: Sequence[ConvSite]) -> list[NodeKey]:
    """A key for each site that stays the same while a model is rewritten."""
    seen: dict[tuple[str, str], int] = {}
    keys = []
    for site in sites:
        place = (site.scope.path, site.name)
        keys.append((*place, seen.setdefault(place, 0)))
        seen[place] += 1
    return keys


def makers(proto: ModelProto) -> frozenset[tuple[bytes, bytes]]:
    """For every node that carries images: hashes of the images, and of everything that they were made of."""
    return frozenset(_maker(node) for node in _nodes_with_images(proto))


def drop_stale(proto: ModelProto, before: frozenset[tuple[bytes, bytes]]) -> tuple[str, ...]:
    """Take the images out of nodes that are no longer what their images were made of.

    Args:
        proto: the model, after passes ran.
        before: what `makers` gave of it before.

    Returns:
        A note for each node.
    """
    stale = [n for n in _nodes_with_images(proto) if _maker(n) not in before or _reads_other_inputs(n)]
    for node in stale:
        _set_images(node, [])
    return tuple(f"the GPU images of node {n.name!r} were dropped, because the node has changed" for n in stale)


def _nodes_with_images(proto: ModelProto) -> list[NodeProto]:
    nodes = [n for owner in (proto.graph, *proto.functions) for n in iterate_nodes(owner.node)]
    ours = [n for n in nodes if n.domain == DOMAIN and n.op_type in OP_TYPES]
    return [n for n in ours if any(a.name == ATTRIBUTE and math.prod(a.t.dims) for a in n.attribute)]


def _reads_other_inputs(node: NodeProto) -> bool:
    """Whether an image was made for inputs of other numbers of channels than the node's."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    try:
        images = parse(numpy_helper.to_array(attributes[ATTRIBUTE].t).tobytes())
    except Exception:  # a broken container, or tensor: the library refuses it
        return False
    channels = attributes["input_channels"].ints if "input_channels" in attributes else ()
    begins = tuple(itertools.accumulate(channels, initial=0))
    return any(image.plan.source_begins not in ((), begins) for image in images)


def _maker(node: NodeProto) -> tuple[bytes, bytes]:
    images, rest = hashlib.sha256(), hashlib.sha256()
    for attribute in sorted(node.attribute, key=lambda a: a.name):
        if attribute.name == ATTRIBUTE:
            images.update(_tensor_bytes(attribute.t))
        elif attribute.name not in _FREE:
            rest.update(repr((attribute.name, attribute.i, attribute.s, list(attribute.ints))).encode())
            rest.update(_tensor_bytes(attribute.t))
    return images.digest(), rest.digest()


def _tensor_bytes(tensor: TensorProto) -> bytes:
    """Type, shape and data: a node that was written anew may spell them differently."""
    try:
        data = numpy_helper.to_array(tensor).tobytes()
    except Exception:  # onnx raises whatever its decoding of a broken tensor runs into
        data = tensor.SerializeToString()
    return repr((tensor.data_type, list(tensor.dims))).encode() + data


def _make_layer(site: ConvSite) -> SparseLayer | Refusal:
    try:
        attributes = attributes_from_proto(site.proto)
        weight = _dense_weight(attributes)
    except FormatError as error:
        return Refusal(f"the node is broken: {error}")
    geometry, shape = attributes.geometry, site.input_shape
    sizes = [size for size in shape[2:] if size is not None] if shape is not None else []
    return make_layer(
        weight,
        strides=geometry.strides,
        dilations=geometry.dilations,
        pads=geometry.pads,
        group=geometry.group,
        element_type=attributes.element_type,
        activation=int(attributes.activation),
        in_size=tuple(sizes) if len(sizes) == len(geometry.kernel_shape) else None,
        source_channels=attributes.input_channels,
    )


def _dense_weight(attributes: SparseConvAttributes) -> Array:
    """The dense weight; a small file may say that it is huge.

    Raises:
        FormatError: it is larger than an ONNX Conv could have, or its arrays contradict each other.
    """
    shape = attributes.weight.weight_shape
    if 4 * math.prod(shape) > MAX_INLINE_BYTES:
        raise FormatError(f"a dense weight of shape {shape} is larger than ONNX can hold")
    return decode(attributes.weight)


def _set_images(node: NodeProto, images: Sequence[Image]) -> int:
    """Put images into a node, instead of those that are there; give the bytes of their container."""
    container = pack(images)
    tensor = numpy_helper.from_array(np.frombuffer(container, np.uint8), ATTRIBUTE)
    for attribute in node.attribute:  # a broken node may have none
        if attribute.name == ATTRIBUTE:
            attribute.t.CopyFrom(tensor)
    return len(container)


def missing_tools(targets: Sequence[Target], outcomes: Sequence[Outcome]) -> list[str]:
    """A note for each tool that images would have been the better for; once for each compiler."""
    notes: dict[str, None] = {}
    for target in targets:
        compiler = target.nvrtc
        images = (outcome.image for outcome in outcomes)
        plans = [i.plan for i in images if i is not None and i.architecture == target.architecture]
        if target.nvfatbin is None and plans:
            notes[
                f"the GPU images of {compiler.name} are not compressed, which would more than halve them: "
                + fatbin.how_to_install(compiler.version[0])
            ] = None
        if target.nvjitlink is None and any(map(is_linked, plans)):
            notes[
                f"without an nvJitLink as new as {compiler.name}, wide layers take it much longer, and their kernels "
                "are optimised less: " + nvjitlink.how_to_install(compiler.version)
            ] = None
    return list(notes)


def _not_as_chosen(name: str, outcomes: Sequence[Outcome], choices: Mapping[int, KernelChoice]) -> list[str]:
    """A note for each image whose plan has other tiles than the chosen one."""
    notes = []
    for image in (o.image for o in outcomes if o.image is not None):
        choice = choices.get(image.architecture)
        if choice is not None and image.plan.tile_channels != choice.tile_channels:
            notes.append(
                f"layer {name!r} was to run on sm_{image.architecture} with {choice.tile_channels} channels in a tile, "
                f"which no plan of this version has; it got {image.plan.tile_channels}: tune again"
            )
    return notes


def _report(target: Target, outcome: Outcome) -> ImageReport:
    if outcome.image is None:
        return ImageReport(target.name, 0, "", "", "", outcome.refusal)
    return _report_image(outcome.image, outcome.time_s, outcome.cached)


def _report_image(image: Image, time_s: float | None = None, cached: bool = False) -> ImageReport:
    return ImageReport(
        architecture=f"sm_{image.architecture}",
        size_bytes=len(image.code),
        compiler=image.compiler,
        min_driver=f"CUDA {image.min_driver // 1000}.{image.min_driver % 1000 // 10}",
        plan=f"{image.plan}{from_batch(image.min_batch)}",
        refusal="",
        time_us=None if time_s is None else 1e6 * time_s,
        cached=cached,
    )
