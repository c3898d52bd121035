"""From the JSON that ``convert --report``, ``tune``, ``verify`` and ``bench`` write to a `Report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onnx_sparseconv.errors import ReportError
from onnx_sparseconv.report.data import (
    Case,
    FolderEntry,
    FolderReport,
    Layer,
    LayerTime,
    Outcome,
    OutputError,
    Report,
)
from onnx_sparseconv.report.fields import Fields
from onnx_sparseconv.report.read_decisions import ReadDecisions, read_decisions

# Of reports, decisions files and all other documents; another one has another form.
SCHEMA_VERSION = 1
_MAKES_SCALES = "FuseScale"


def read_report(document: Any, *, verify: Any = None, bench: Any = None, where: str = "the report") -> Report:  # noqa: ANN401
    """Make a report of one model's documents.

    Args:
        document: of ``convert --report`` or ``tune --json``, a decisions file, or what `model_document` makes of a
            converted model.
        verify: of ``verify --json``, for the errors of the outputs; None without.
        bench: of ``bench --json``, for times of the whole model; None without.
        where: what to call the document in messages.

    Raises:
        ReportError: it is none of these, or a value in it has the wrong type.
    """
    fields = _checked(document, where)
    if fields.has("kind"):
        report = _of_decisions(read_decisions(fields))
    elif fields.text("command") == "tune" and fields.has("decisions"):
        report = _of_decisions(read_decisions(fields.child("decisions")))
    elif fields.text("command") == "convert" and (fields.has("model") or fields.has("error")):
        report = _of_conversion(fields)
    else:
        raise ReportError(
            f"{where}: is neither what 'sparseconv convert --report FILE.json' writes nor what 'sparseconv tune' does"
        )
    report = replace(report, versions=_versions(fields) or report.versions, created=fields.text("created"))
    if bench is not None:
        report = _with_bench(report, _of_model(report, _checked(bench, "the bench report", "bench")))
    if verify is not None:
        report = replace(report, errors=_errors(_of_model(report, _checked(verify, "the verify report", "verify"))))
    return report


def read_folder(
    documents: Sequence[Any],
    *,
    title: str,
    pages: Sequence[str] = (),
    names: Sequence[str] = (),
    interrupted: bool = False,
    where: str = "the report",
) -> FolderReport:
    """Make a summary of the documents of several models.

    Args:
        documents: as for `read_report`.
        title: what they have in common.
        pages: of the models, as `FolderEntry` has them; none: they have none.
        names: what to call the models; none: by their files.
        interrupted: whether the run was stopped before all were done.
        where: what to call the documents in messages.

    Raises:
        ReportError: as `read_report`.
    """
    entries = []
    versions: tuple[tuple[str, str], ...] = ()
    created = ""
    for index, document in enumerate(documents):
        name = f"{where}: model {index + 1}"
        report = read_report(document, where=name)
        report = replace(report, source=names[index]) if names else report
        fresh = not Fields(document, name).flag("up_to_date")
        entries.append(FolderEntry(report, pages[index] if pages else "", fresh))
        versions, created = versions or report.versions, max(created, report.created)
    return FolderReport(title, tuple(entries), interrupted, versions, created)


def _checked(document: Any, where: str, command: str = "") -> Fields:  # noqa: ANN401
    fields = Fields(document, where)
    if command and fields.text("command") != command:
        raise ReportError(f"{where}: is not what 'sparseconv {command} --json' writes")
    if not fields.has("schema_version"):
        raise ReportError(f"{where}: is no document of this program: it has no 'schema_version'")
    if fields.integer("schema_version") != SCHEMA_VERSION:
        raise ReportError(f"{where}: has another schema_version than {SCHEMA_VERSION}: make it again with this version")
    return fields


def _of_conversion(fields: Fields) -> Report:
    source = fields.text("source")
    if not fields.has("model"):
        return Report(source, outcome=Outcome.ERROR, error=fields.text("error", "it failed"))
    decisions = read_decisions(fields.child("decisions")) if fields.has("decisions") else None
    layers = _layers(fields.child("model").children("layers"), decisions)
    report = Report(
        source=source,
        output=fields.text("output"),
        outcome=_outcome(fields),
        layers=layers,
        bytes_before=fields.integer("bytes_before"),
        bytes_after=fields.integer("bytes_after"),
        weights_before=fields.integer("conv_bytes_before"),
        weights_after=fields.integer("conv_bytes_after"),
        precision=_precision(fields),
        notes=tuple(dict.fromkeys(fields.texts("notes"))),
        scales=_scales(fields),
    )
    return _with_decisions(report, decisions)


def _scales(fields: Fields) -> frozenset[str]:
    """Convolutions that a pass made; nobody decided about them."""
    makers = (each for each in fields.children("passes") if each.text("name") == _MAKES_SCALES)
    return frozenset(done.text("node") for maker in makers for done in maker.children("done"))


def _of_decisions(decisions: ReadDecisions) -> Report:
    layers = tuple(decided.layer for decided in decisions.layers.values())
    report = Report(decisions.model, outcome=Outcome.TUNED, layers=layers, notes=decisions.notes)
    return _with_decisions(report, decisions)


def _with_decisions(report: Report, decisions: ReadDecisions | None) -> Report:
    if decisions is None:
        return report
    return replace(
        report,
        cases=decisions.cases,
        gain=decisions.gain,
        whole_text=decisions.whole_text,
        num_by_hand=sum(decided.by_hand for decided in decisions.layers.values()),
        peaks=decisions.peaks,
        setting=decisions.setting,
    )


def _outcome(fields: Fields) -> Outcome:
    is_half = fields.has("precision") and fields.child("precision").flag("changed")
    if fields.flag("converted"):
        return Outcome.CONVERTED if fields.has("output") else Outcome.WOULD_CONVERT
    if is_half:
        return Outcome.HALF
    if (fields.integer("imaged_bytes_after") or 0) > 0:
        return Outcome.IMAGES
    return Outcome.ALREADY if fields.flag("already_converted") else Outcome.NOTHING


def _precision(fields: Fields) -> str:
    if not fields.has("precision"):
        return ""
    precision = fields.child("precision")
    if not precision.flag("changed"):
        return "nothing became float16"
    kept = len(precision.children("kept"))
    return (
        f"{precision.integer('half_nodes') or 0} nodes compute in float16, {kept} stay float, "
        f"{precision.integer('casts') or 0} casts were added"
    )


def _layers(items: Sequence[Fields], decisions: ReadDecisions | None) -> tuple[Layer, ...]:
    seen: dict[tuple[str, str], int] = {}
    layers = []
    for item in items:
        place = item.text("graph"), item.text("name")
        number = seen.setdefault(place, 0)
        seen[place] += 1
        layer = _layer(item)
        decided = decisions.layers.get((*place, number)) if decisions is not None else None
        if decided is not None:
            plan = "; ".join(filter(None, (decided.layer.plan, layer.plan)))
            dtype = "float16" if decisions is not None and decisions.in_half else layer.dtype
            alike, times = decided.layer.measured_as, decided.layer.times
            layer = replace(layer, plan=plan, dtype=dtype, measured_as=alike, times=times)
        layers.append(layer)
    return tuple(layers)


def _layer(item: Fields) -> Layer:
    verdict = item.child("verdict")
    reason = verdict.text("reason")
    shape = item.shape("weight_shape")
    images = [
        f"{image.text('architecture')}: {image.text('refusal') or image.text('plan')}"
        for image in item.children("images")
    ]
    return Layer(
        name=item.text("name"),
        graph=item.text("graph"),
        is_sparse=verdict.flag("rewrite") or reason == "already-sparse",
        reason=reason,
        text=verdict.text("text"),
        plan="; ".join(images),
        weight_shape=None if shape is None else tuple(size or 0 for size in shape),
        dtype=item.text("dtype") or None,
        sparsity=item.share("sparsity"),
        nonzeros=item.integer("nonzeros"),
        num_weights=item.integer("num_weights") or None,
        flops=item.integer("flops"),
        input_shape=item.shape("input_shape"),
        output_shape=item.shape("output_shape"),
        dense_bytes=item.integer("dense_bytes"),
        sparse_bytes=item.integer("sparse_bytes"),
    )


def _versions(fields: Fields) -> tuple[tuple[str, str], ...]:
    return tuple(fields.child("versions").pairs()) if fields.has("versions") else ()


def _of_model(report: Report, fields: Fields) -> Fields:
    """What another command found, if it is of the same model: its layers are layers of the report."""
    nodes = [kernel.text("node") for kernel in fields.children("kernels")]
    names = {layer.name for layer in report.layers} | report.scales
    nodes += [layer.text("name") for layer in fields.children("layers")]
    if unknown := [node for node in nodes if node and node not in names]:
        command = fields.text("command")
        raise ReportError(f"the {command} report is for another model: this one has no convolution {unknown[0]!r}")
    return fields


def _errors(fields: Fields) -> tuple[OutputError, ...]:
    found = []
    for output in fields.children("outputs"):
        errors = output.child("errors")
        found.append(
            OutputError(
                name=output.text("name"),
                passed=output.flag("passed"),
                identical=output.flag("identical"),
                max_abs=errors.number("max_abs"),
                rms=errors.number("rms"),
                max_of_range=errors.number("max_of_range"),
                snr_db=errors.signed("snr_db"),
                argmax_agreement=output.share("argmax_agreement"),
            )
        )
    return tuple(found)


def _with_bench(report: Report, fields: Fields) -> Report:
    """The whole model as ``bench`` timed it; its single layers where none were tuned.

    The tuned times of layers belong to the tuned shapes, so a bench does not stand beside several of them.
    """
    ratio = fields.child("speedup")
    shapes = fields.child("input_shapes")
    case = Case(
        label=", ".join(f"{name} {'x'.join(map(str, shapes.shape(name) or ()))}" for name in shapes.names()),
        batch=fields.integer("batch"),
        dense_us=fields.child("original").child("time").positive("median_us"),
        converted_us=fields.child("converted").child("time").positive("median_us"),
        low=ratio.number("low"),
        high=ratio.number("high"),
    )
    if len(report.cases) > 1:
        raise ReportError("the bench report is for one shape, the model was tuned for several: leave it out")
    if report.cases:
        case = replace(case, predicted_us=report.cases[0].predicted_us, batch=report.cases[0].batch)
    timed_alone = report.has_layer_times
    layers = report.layers if timed_alone else _with_bench_times(report.layers, fields)
    gain = None if case.speedup is None else (case.low or 0) > 1
    setting = report.setting or _bench_setting(fields)
    return replace(
        report, cases=(case,), gain=gain, whole_text="", layers=layers, timed_alone=timed_alone, setting=setting
    )


def _with_bench_times(layers: Sequence[Layer], fields: Fields) -> tuple[Layer, ...]:
    """Times by name; a name that several layers share says nothing of any of them."""
    found: dict[str, list[LayerTime]] = {}
    for item in fields.children("layers"):
        time = LayerTime(item.positive("original_us"), item.positive("converted_us"))
        is_sparse = item.text("converted_op").startswith("SparseConv")
        found.setdefault(item.text("name"), []).append(time if is_sparse else LayerTime(time.dense_us))
    return tuple(
        replace(layer, times=tuple(found[layer.name])) if len(found.get(layer.name, ())) == 1 else layer
        for layer in layers
    )


def _bench_setting(fields: Fields) -> tuple[tuple[str, str], ...]:
    environment = fields.child("environment")
    versions: Mapping[str, str] = dict(environment.child("versions").pairs())
    setting = {
        "processor": environment.text("cpu"),
        "onnxruntime": versions.get("onnxruntime") or versions.get("onnxruntime-gpu", ""),
        "provider": fields.text("provider"),
        "threads": str(fields.integer("threads") or ""),
    }
    return tuple((name, value) for name, value in setting.items() if value)
