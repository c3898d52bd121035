"""What is tried on a GPU: plans by rank, compiled before anything is timed. No GPU, and no compiler, takes part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnx_sparseconv.converter import ConvertOptions, convert, gpu_images, read_decisions, write_decisions
from onnx_sparseconv.converter.decisions import Cause, Choice
from onnx_sparseconv.custom_ops.node import attributes_from_proto
from onnx_sparseconv.errors import CompileError, ProviderError, UsageError
from onnx_sparseconv.kernels.compile import CompileOptions, Outcome
from onnx_sparseconv.kernels.cuda_driver import CudaDriver, Gpu
from onnx_sparseconv.kernels.image_container import Image, parse
from onnx_sparseconv.kernels.kernel_choice import CSR, KernelChoice, find_plan, ranked_plans
from onnx_sparseconv.kernels.layer import Refusal
from onnx_sparseconv.kernels.targets import Target
from onnx_sparseconv.runtime.timing import Samples
from onnx_sparseconv.tuner import TuneOptions, gpu_candidates, make_cases, tune, tuning
from onnx_sparseconv.tuner.candidates import SUB_BATCHES
from onnx_sparseconv.tuner.database import LayerTimes
from onnx_sparseconv.tuner.gpu_candidates import GeneratedCandidate, GpuSearch, find_target
from onnx_sparseconv.tuner.network import Layouts
from tests.runtime import networks
from tests.tuner.fakes import SETTING, FakeBench, FakeClock, sparsity_of
from tests.tuner.test_pieces import Cutter


class NoCompiler:
    """Passes for NVRTC."""

    name = "no compiler"
    version = (12, 0)


TARGET = Target(90, NoCompiler())


@pytest.fixture(autouse=True)
def _all_plans_are_near(monkeypatch):
    """Small layers have few plans that are; the test that is about that sets it anew."""
    monkeypatch.setattr(gpu_candidates, "MAX_PLAN_COST", math.inf)


def piece(sparsity=0.9, channels=32, batch=1, size=12):
    weights = networks.weights(channels=channels, layers=1, sparsity=sparsity)
    cutter = Cutter(networks.dense(weights, batch=batch, size=size))
    return cutter.piece(cutter.regions[0]).model


@pytest.fixture
def compiled(monkeypatch):
    """Images without code; the list of layers and choices of every call, and what must fail."""
    calls: list[list[KernelChoice]] = []
    broken: set[int] = set()

    def compile_layers(layers, targets, options, *, progress=None, choices=()):
        assert [t.architecture for t in targets] == [90]
        assert isinstance(options, CompileOptions)
        calls.append([choice.get(90) for choice in choices])
        made = []
        for number, ((name, layer), choice) in enumerate(zip(layers, calls[-1], strict=True)):
            plan = find_plan(layer, 90, choice) if choice else ranked_plans(layer, 90)[0]
            if isinstance(plan, Refusal):
                made.append((Outcome(None, plan.reason, 0.0),))
                continue
            if plan.tile_channels in broken:
                raise CompileError(f"layer {name!r}: it broke")
            made.append((Outcome(Image(90, 12000, "no compiler", plan, b"code"), "", 0.0),))
            if progress:
                progress(number + 1, len(layers), name)
        return made

    monkeypatch.setattr(gpu_images, "compile_layers", compile_layers)
    monkeypatch.setattr("onnx_sparseconv.converter.conversion.resolve_targets", lambda names, _: (TARGET,) * len(names))
    monkeypatch.setattr(gpu_candidates, "resolve_targets", lambda names, _: tuple(map(_target, names)))
    _plug_in(monkeypatch, "9.0")
    return calls, broken


def _target(name):
    return TARGET if name == "native" else Target(int(name.removeprefix("sm_")), NoCompiler())


def _plug_in(monkeypatch, *capabilities):
    gpus = tuple(Gpu("a GPU", capability, 1 << 30) for capability in capabilities)
    driver = CudaDriver("1", "13.0", gpus, "" if gpus else "nobody home")
    monkeypatch.setattr(gpu_candidates, "read_cuda_driver", lambda: driver)


def search(**options):
    return GpuSearch(TARGET, CompileOptions(1), **({"max_plans": None} | options))


def images(model):
    nodes = gpu_images.sparse_nodes(model)
    return {key[1]: parse(attributes_from_proto(n.proto).cuda_images.tobytes()) for key, n in nodes.items()}


def test_dense_the_general_kernel_and_the_best_plans_are_tried():
    found = search(max_plans=3).candidates([piece()])
    assert [c.name for c in found[:3]] == ["dense, default", "dense, nhwc", "sparse, general"]
    assert found[2].kernels == {"sm_90": CSR}
    generated = found[3:]
    assert len(generated) == 3
    layer = generated[0].layer
    assert [c.kernel.tile_channels for c in generated] == [p.tile_channels for p in ranked_plans(layer, 90)[:3]]
    assert all(c.kernels == {"sm_90": c.kernel} for c in generated)
    assert len({c.name for c in found}) == len(found)
    assert len(search(max_plans=1).candidates([piece()])) == 4


def test_plans_that_are_foretold_to_be_far_slower_are_left_out(monkeypatch):
    assert len(search().candidates([piece()])) > 4
    monkeypatch.setattr(gpu_candidates, "MAX_PLAN_COST", 1.0)
    assert len(search().candidates([piece()])) == 4


def test_a_layer_without_a_plan_still_has_the_general_kernel():
    found = search().candidates([piece(sparsity=1.0)])
    assert [c.name for c in found] == ["dense, default", "dense, nhwc", "sparse, general"]


def test_plans_are_made_for_a_size_where_there_is_one():
    def sizes(*pieces):
        return {c.kernel.in_size for c in search().candidates(pieces) if isinstance(c, GeneratedCandidate)}

    assert sizes(piece(batch=1), piece(batch=8)) == {(12, 12)}
    assert sizes(piece(size=12), piece(size=20)) == {None}


def test_sub_batches_are_looked_at_and_not_chosen():
    found = search(sub_batches=True, max_plans=1).candidates([piece()])
    extra = [c for c in found if "sub-batch" in c.name]
    assert [c.config["sparseconv.cuda_sub_batch"] for c in extra] == [str(n) for n in SUB_BATCHES]
    assert not any(c.counts for c in extra)
    assert all(c.counts for c in found if c not in extra)


def test_a_candidate_carries_the_image_of_its_plan(compiled):
    made = piece()
    ((*_, best, other),) = search(max_plans=2).compile([("conv", search(max_plans=2).candidates([made]))], print)
    for candidate in (best, other):
        prepared = candidate.prepare(made)
        ((image,),) = images(prepared.model).values()
        assert image.plan.tile_channels == candidate.kernel.tile_channels
        assert prepared.config == {"sparseconv.cuda_kernel": "generated"}
        assert prepared.use_library
    assert len(compiled[0]) == 1  # all of them at once


def test_a_plan_that_does_not_compile_has_the_reason_and_the_others_run(compiled):
    calls, broken = compiled
    made = piece()
    candidates = search(max_plans=3).candidates([made])
    broken.add(candidates[4].kernel.tile_channels)
    (result,) = search().compile([("conv", candidates)], lambda *_: None)
    assert [bool(c.problem) for c in result] == [False, False, False, False, True, False]
    assert len(calls) == 1 + 3
    with pytest.raises(CompileError, match="it broke"):
        result[4].prepare(made)
    assert result[5].prepare(made)


def test_nothing_is_compiled_where_nothing_is_to_be_timed(compiled):
    assert search().compile([], lambda *_: None) == []
    assert compiled[0] == []


def test_layers_that_are_foretold_to_lose_by_far_are_hopeless(monkeypatch):
    small = [piece(0.9)]
    assert search().why_hopeless(small) == ""
    slow = dataclasses.replace(gpu_candidates.MODEL, sparse_launch_us=1e4, library_launch_us=1e4)
    monkeypatch.setattr(gpu_candidates, "MODEL", slow)
    assert "x the speed of dense is predicted" in search().why_hopeless(small)
    assert search(skip_hopeless=False).why_hopeless(small) == ""
    assert "factor of 2.5" in search().why_hopeless(small)
    elsewhere = GpuSearch(Target(80, NoCompiler()), CompileOptions(1), None)
    assert "factor of 5" in elsewhere.why_hopeless(small)
    gain = search()._foretold(*gpu_candidates._call_of(small[0])).gain
    monkeypatch.setattr(gpu_candidates, "HOPELESS_GAIN_ELSEWHERE", gain / 2)
    assert elsewhere.why_hopeless(small) == ""
    assert search().why_hopeless([piece(1.0)]) == ""  # nothing is foretold of it


def test_no_code_is_made_where_the_librarys_kernel_is_foretold_to_be_far_faster(monkeypatch):
    monkeypatch.setattr(gpu_candidates, "MAX_PLAN_COST", 1.5)
    weights = networks.weights(channels=256, layers=1, sparsity=0.8, dtype=np.float16)

    def names(*batches):
        cutters = [Cutter(networks.dense(weights, batch=batch, size=14)) for batch in batches]
        pieces = [cutter.piece(cutter.regions[0]).model for cutter in cutters]
        return [c.name for c in search().candidates(pieces)]

    assert names(64) == ["dense, default", "dense, nhwc", "sparse, general"]
    assert len(names(64, 1)) > 3


def test_no_layer_is_hopeless_that_the_librarys_kernel_may_make_faster(monkeypatch):
    weights = networks.weights(channels=256, layers=1, sparsity=0.8, dtype=np.float16)
    cutter = Cutter(networks.dense(weights, batch=64, size=14))
    pieces = [cutter.piece(cutter.regions[0]).model]
    slow = dataclasses.replace(gpu_candidates.MODEL, sparse_launch_us=1e4)
    monkeypatch.setattr(gpu_candidates, "MODEL", slow)
    assert search().why_hopeless(pieces) == ""
    monkeypatch.setattr(gpu_candidates, "MODEL", dataclasses.replace(slow, library_mhz=0.1))
    assert "x the speed of dense is predicted" in search().why_hopeless(pieces)


@pytest.mark.parametrize(
    ("names", "capability", "architecture"),
    [
        (("sm_90",), "9.0", 90),
        (("native",), "9.0", 90),
        (("sm_80", "sm_90"), "9.0", 90),
        (("sm_80", "sm_86"), "8.9", 86),
    ],
)
@pytest.mark.usefixtures("compiled")
def test_the_target_is_what_this_machine_runs(monkeypatch, names, capability, architecture):
    _plug_in(monkeypatch, capability)
    assert find_target(names).architecture == architecture


@pytest.mark.usefixtures("compiled")
def test_a_target_that_cannot_be_timed_here_is_an_error(monkeypatch):
    _plug_in(monkeypatch, "8.6")
    with pytest.raises(UsageError, match=r"target sm_90: this machine's GPU is an sm_86 .* name sm_86, or native"):
        find_target(["sm_90"])
    _plug_in(monkeypatch)
    with pytest.raises(ProviderError, match="no GPU to time it on: nobody home"):
        find_target(["sm_90"])
    with pytest.raises(UsageError, match="needs the provider cuda"):
        TuneOptions(targets=("sm_90",))
    with pytest.raises(UsageError, match="needs the provider cuda"):
        TuneOptions(cuda_graph=True)


@dataclasses.dataclass
class GpuBench(FakeBench):
    """Generated kernels take 10 us and one more for each rank of theirs; every other candidate 100 us.

    Attributes:
        slow: names of candidates, or parts of them, that take 1000 us.
    """

    slow: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    asked: list[tuple[str, ...]] = dataclasses.field(default_factory=list)

    def layer(self, piece, candidates, *, is_cold=False):
        self.on_layer()
        self.pieces.append(piece)
        self.cold.append(is_cold)
        self.asked.append(tuple(c.name for c in candidates))
        generated = [c for c in candidates if isinstance(c, GeneratedCandidate)]
        times = {c.name: 90.0 if c.name == "sparse, general" else 100.0 for c in candidates}
        times |= {c.name: 10.0 + rank for rank, c in enumerate(generated)}
        times |= {name: 1000.0 for name in times if any(part in name for part in self.slow)}
        broken = {c.name: c.problem for c in generated if c.problem}
        broken |= {name: "it failed" for name in times if any(part in name for part in self.failing)}
        return LayerTimes(times | dict.fromkeys(broken, math.inf), broken)


def network(*sparsities, channels=32):
    weights = [networks.weights(channels=channels, layers=1, sparsity=s, seed=i)[0] for i, s in enumerate(sparsities)]
    return networks.dense(weights)


@pytest.fixture
def tuned(tmp_path):
    def run(proto, bench, *, setting=None, **options):
        more = {"provider": "cuda", "targets": ("sm_90",), "preset": "default", "database": tmp_path / "db.jsonl"}
        where = setting or SETTING | {"provider": "cuda", "gpu": "a GPU", "driver": "1"}
        return tune(proto, TuneOptions(**(more | options)), bench=bench, setting=where, clock=FakeClock())

    return run


def fast_whole(sparse):
    return 300 - 50 * len(sparse)


def kernels(report):
    return {layer.node: str(layer.kernels.get("sm_90", "")) for layer in report.decisions.layers}


def test_the_fastest_plan_is_chosen_and_built(compiled, tuned, tmp_path):
    proto = network(0.9, 0.95)
    bench = GpuBench(whole_us=fast_whole)
    report = tuned(proto, bench)
    assert [len(names) for names in bench.asked] == [6, 6]
    assert all(k.startswith("generated") for k in kernels(report).values())
    assert report.decisions.targets == ("sm_90",)
    write_decisions(report.decisions, tmp_path / "d.json")
    # Without a target: the decisions name it.
    model, converted = convert(proto, options=ConvertOptions(decisions=read_decisions(tmp_path / "d.json")))
    assert converted.targets == ("sm_90",)
    for layer in report.decisions.layers:
        ((image,),) = [found for name, found in images(model).items() if name == layer.node]
        assert image.plan.tile_channels == layer.kernels["sm_90"].tile_channels
    assert compiled[0][-1] == [layer.kernels["sm_90"] for layer in report.decisions.layers]


@pytest.mark.usefixtures("compiled")
def test_another_plan_than_the_cost_models_can_win(tuned):
    first = tuned(network(0.9), GpuBench(whole_us=fast_whole))
    best = kernels(first)["conv0"]
    bench = GpuBench(whole_us=fast_whole, slow=(best,))
    second = tuned(network(0.9), bench, preset="thorough")
    assert kernels(second)["conv0"] not in ("", best, "csr")
    names = [c.name for c in second.decisions.layers[0].candidates]
    assert "sparse, csr, sub-batch 4" in names


@pytest.mark.usefixtures("compiled")
def test_the_general_kernel_can_win_and_gets_no_image(tuned):
    proto = network(0.9)
    report = tuned(proto, GpuBench(whole_us=fast_whole, slow=("generated",)))
    assert kernels(report) == {"conv0": "csr"}
    model, converted = convert(proto, options=ConvertOptions(decisions=report.decisions))
    assert images(model) == {"conv0": ()}
    assert "the library's own kernels were chosen" in converted.model.layers[0].images[0].refusal


@pytest.mark.usefixtures("compiled")
def test_a_candidate_that_cannot_run_is_written_down_and_not_chosen(tuned):
    bench = GpuBench(whole_us=fast_whole, failing=("sparse, general", "dense, nhwc"))
    report = tuned(network(0.9), bench)
    by_name = {c.name: c for c in report.decisions.layers[0].candidates}
    assert by_name["sparse, general"].problem == "it failed"
    assert by_name["sparse, general"].times_us == (math.inf,)
    assert report.decisions.layers[0].choice is Choice.SPARSE


def test_a_plan_that_does_not_compile_is_one_candidate_less(compiled, tuned):
    _, broken = compiled
    probe = tuned(network(0.9), GpuBench(whole_us=fast_whole))
    broken.add(probe.decisions.layers[0].kernels["sm_90"].tile_channels)
    report = tuned(network(0.9), GpuBench(whole_us=fast_whole), setting=SETTING | {"provider": "cuda", "gpu": "other"})
    failed = [c for c in report.decisions.layers[0].candidates if c.problem]
    assert [c.problem for c in failed] == ["layer 'conv0': it broke"]
    assert kernels(report)["conv0"] not in ("", kernels(probe)["conv0"])


@pytest.mark.usefixtures("compiled")
def test_one_kernel_runs_a_layer_at_all_shapes(tuned):
    """The fastest at one shape alone is not what is foretold."""
    bench = GpuBench(whole_us=fast_whole)
    seen = []

    def layer(piece, candidates, **how):
        found = GpuBench.layer(bench, piece, candidates, **how)
        generated = [c.name for c in candidates if isinstance(c, GeneratedCandidate)]
        batch = piece.graph.input[0].type.tensor_type.shape.dim[0].dim_value
        seen.append(batch)
        # The first is best at batch 1 and worst at batch 8; the second is fair at both.
        times = {generated[0]: 10.0 if batch == 1 else 90.0, generated[1]: 20.0, generated[2]: 80.0}
        return LayerTimes({**found.times_us, **times}, {})

    bench.layer = layer
    report = tuned(network(0.9), bench, cases=make_cases([1, 8]))
    assert sorted(seen) == [1, 8]
    (decision,) = report.decisions.layers
    chosen = next(c for c in decision.candidates if str(decision.kernels["sm_90"]) in c.name)
    assert chosen.times_us == (20.0, 20.0)
    assert "20.0 us sparse" in decision.text


def test_all_is_compiled_before_anything_is_timed(compiled, tuned):
    order = []
    bench = GpuBench(whole_us=fast_whole, on_layer=lambda: order.append(len(compiled[0])))
    tuned(network(0.9, 0.95), bench)
    assert order == [1, 1]


def test_what_was_timed_before_is_not_compiled_again(compiled, tuned):
    proto = network(0.9)
    tuned(proto, GpuBench(whole_us=fast_whole))
    before = len(compiled[0])
    again = GpuBench(whole_us=fast_whole)
    report = tuned(proto, again)
    assert (again.pieces, report.num_found, report.num_measured) == ([], 1, 0)
    # For the model as a whole, and no candidate.
    assert {str(choice) for (choice,) in compiled[0][before:]} == {kernels(report)["conv0"]}
    assert kernels(report)["conv0"].startswith("generated")
    # Another GPU is another matter.
    bench = GpuBench(whole_us=fast_whole)
    report = tuned(proto, bench, setting=SETTING | {"provider": "cuda", "gpu": "another GPU", "driver": "1"})
    assert len(bench.pieces) == 1
    assert any("gpu a GPU, now another GPU: measured again" in note for note in report.decisions.notes)


@pytest.mark.usefixtures("compiled")
def test_layers_alike_share_times_and_kernels(tuned):
    weight = networks.weights(channels=32, layers=1)[0]
    proto = networks.dense([weight, np.ascontiguousarray(weight[:, ::-1])])
    bench = GpuBench(whole_us=fast_whole)
    report = tuned(proto, bench)
    assert (len(bench.pieces), report.num_alike) == (1, 1)
    assert len(set(kernels(report).values())) == 1
    model, _ = convert(proto, options=ConvertOptions(decisions=report.decisions))
    assert all(len(found) == 1 for found in images(model).values())


@pytest.mark.usefixtures("compiled")
def test_hopeless_layers_are_left_out(tuned, monkeypatch):
    monkeypatch.setattr(gpu_candidates.GpuSearch, "why_hopeless", lambda *_: "not timed: no hope")
    bench = GpuBench(whole_us=fast_whole)
    report = tuned(network(0.9), bench)
    (layer,) = report.decisions.layers
    assert (layer.cause, layer.text, bench.pieces) == (Cause.HOPELESS, "not timed: no hope", [])


@pytest.mark.usefixtures("compiled")
def test_decisions_for_float16_are_for_the_float_model(tuned, tmp_path):
    proto = network(0.9, 0.95)
    bench = GpuBench(whole_us=fast_whole)
    report = tuned(proto, bench, precision="fp16")
    assert all(p.graph.input[0].type.tensor_type.elem_type == 10 for p in bench.pieces)
    assert all(numpy_helper.to_array(p.graph.initializer[0]).dtype == np.float16 for p in bench.pieces)
    assert report.decisions.setting["precision"] == "fp16"
    write_decisions(report.decisions, tmp_path / "d.json")
    made = read_decisions(tmp_path / "d.json")
    _, converted = convert(proto, options=ConvertOptions(decisions=made, precision="fp16"))
    assert [layer.verdict.reason for layer in converted.model.layers] == ["decided-sparse"] * 2
    assert not any("measured with precision" in note for note in converted.notes)
    _, converted = convert(proto, options=ConvertOptions(decisions=made))
    assert any("was measured with precision fp16, and is used with keep" in note for note in converted.notes)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("names", [("native",), ("native", "sm_90"), ("sm_90",)])
def test_targets_have_their_names_in_the_decisions(tuned, names):
    report = tuned(network(0.9), GpuBench(whole_us=fast_whole), targets=names)
    assert report.decisions.targets == ("sm_90",)


@pytest.mark.usefixtures("compiled")
def test_without_a_target_only_the_general_kernel_is_tried(tuned):
    bench = GpuBench(whole_us=fast_whole)
    report = tuned(network(0.9), bench, targets=())
    assert bench.asked == [("dense, default", "dense, nhwc", "sparse, general")]
    assert report.decisions.targets == ()
    assert kernels(report) == {"conv0": ""}
    assert any("only the library's kernels were tried" in note for note in report.decisions.notes)


@dataclasses.dataclass
class LayoutBench(GpuBench):
    """Dense layers take 60 us with the channels last, of which they lose 40 where no neighbour is so.

    Attributes:
        last_us: of a whole model with the channels last, from the names of its sparse layers.
    """

    last_us: Callable[[frozenset[str]], float] = lambda _: math.inf

    def layer(self, piece, candidates, **how):
        found = super().layer(piece, candidates, **how)
        times = found.times_us | {"dense, nhwc": 60.0}
        return dataclasses.replace(found, times_us=times, reorder_in_us=20.0, reorder_out_us=20.0)

    def whole(self, models, case):
        first = super().whole(models, case)
        last = [{"nhwc": Samples(((self.last_us(names),) * 3,))} for names in self.wholes[-len(models) :]]
        return tuple(one | other for one, other in zip(first, last, strict=True))


@pytest.mark.usefixtures("compiled")
def test_layers_that_gain_do_not_where_another_layout_suits_the_model_better(tuned):
    """Sparse layers take 90 us; dense ones 100 us, but 20 us with the channels last among such."""
    bench = LayoutBench(whole_us=lambda _: 400, last_us=lambda _: 200)
    report = tuned(network(0.9, 0.95, 0.92), bench, targets=())
    assert {layer.choice for layer in report.decisions.layers} == {Choice.DENSE}
    assert report.whole is None
    assert report.decisions.layers[1].text == "sparse is 1.50x slower (60.0 us dense, 90.0 us sparse)"
    assert bench.wholes == [frozenset()]


@pytest.mark.usefixtures("compiled")
def test_the_layout_that_suits_the_converted_model_is_told(tuned):
    bench = LayoutBench(whole_us=lambda sparse: 400 - 90 * len(sparse), last_us=lambda sparse: 300 - 50 * len(sparse))
    report = tuned(network(0.9), bench)
    (case,) = report.whole.cases
    assert (case.dense_us, case.predicted_us, case.measured_us, case.layout) == (300, 250, 250, "nhwc")
    assert "300 us dense, 250 us converted with prefer_nhwc, 250 us predicted" in report.whole.text


@pytest.mark.usefixtures("compiled")
def test_layers_that_the_model_would_not_have_say_why_they_were_wanted(tuned):
    bench = LayoutBench(whole_us=lambda _: 400, last_us=lambda sparse: 380 + 40 * len(sparse))
    report = tuned(network(0.9, 0.95, 0.92), bench, targets=())
    assert not report.gain
    texts = {layer.text for layer in report.decisions.layers}
    told = "left dense for the model as a whole, though sparse is 1.11x faster (100.0 us dense, 90.0 us sparse)"
    assert texts == {told}


@pytest.mark.usefixtures("compiled")
def test_another_layouts_choice_is_no_step_back(tuned):
    """With the channels last only the first gains, which is foretold to be best; in fact all sparse is faster."""

    class Bench(LayoutBench):
        def layer(self, piece, candidates, **how):
            found = super().layer(piece, candidates, **how)
            times = {"sparse, general": 20.0 if sparsity_of(piece) > 0.94 else 90.0, "dense, nhwc": 90.0}
            return dataclasses.replace(found, times_us=found.times_us | times, reorder_in_us=10.0, reorder_out_us=10.0)

    bench = Bench(whole_us=lambda sparse: 400 - 100 * (len(sparse) == 3), last_us=lambda sparse: 330 - 5 * len(sparse))
    report = tuned(network(0.95, 0.9, 0.85), bench, targets=())
    assert [trial.num_sparse for trial in report.whole.trials] == [1, 3]
    assert report.decisions.num_sparse == 3
    assert "misled" not in report.whole.text
    assert {layer.cause for layer in report.decisions.layers} == {Cause.MEASURED}
    assert report.decisions.layers[1].text == "sparse is 1.11x faster (100.0 us dense, 90.0 us sparse)"


@pytest.mark.usefixtures("compiled")
def test_foretold_layers_pay_for_layouts_too(tuned, monkeypatch):
    models = []
    choose = Layouts.choose
    monkeypatch.setattr(Layouts, "choose", lambda self, fixed: models.append(self) or choose(self, fixed))
    weights = [networks.weights(channels=64, layers=1, sparsity=0.9)[0] for _ in range(2)]
    options = {"targets": (), "cases": make_cases([64]), "budget_s": 0, "precision": "fp16"}
    tuned(networks.dense(weights, size=56), GpuBench(whole_us=fast_whole), **options)
    (layouts,) = models
    for default, last in zip(*(model.costs.values() for model in layouts.models.values()), strict=True):
        ((first,), (second,)) = default, last
        assert first.reorder_in_us == first.reorder_out_us == 0
        assert second.reorder_in_us == second.reorder_out_us > 5
        assert second.alone_us == pytest.approx(first.alone_us)


@pytest.mark.usefixtures("compiled")
def test_what_is_not_timed_is_foretold_for_the_gpu_at_hand(tuned, monkeypatch):
    """Without a target only the library's own kernels count: that on warpgroups wants weights enough."""

    def network_of(sparsity):
        return networks.dense(networks.weights(channels=64, layers=1, sparsity=sparsity) * 2, size=56)

    proto = network_of(0.9)
    bench = GpuBench(whole_us=fast_whole)
    budget = {"targets": (), "cases": make_cases([64]), "budget_s": 0}
    report = tuned(proto, bench, precision="fp16", **budget)
    assert bench.pieces == []
    assert {layer.choice for layer in report.decisions.layers} == {Choice.SPARSE}
    assert "by its predicted times: " in report.decisions.layers[0].text
    assert "on warpgroups" in report.decisions.layers[0].text
    (case,) = report.whole.cases
    assert 0 < case.predicted_us < case.dense_us
    few_weights = tuned(network_of(0.995), bench, **budget)
    assert {layer.choice for layer in few_weights.decisions.layers} == {Choice.DENSE}
    assert "by its predicted times: no code is generated, and no kernel" in few_weights.decisions.layers[0].text
    _plug_in(monkeypatch)
    assert "by its sparsity: " in tuned(proto, bench, **budget).decisions.layers[0].text


@pytest.mark.usefixtures("compiled")
def test_a_node_may_run_the_general_kernel_with_few_images_and_its_own_code_with_more(tuned):
    bench = GpuBench(whole_us=fast_whole)

    def layer(piece, candidates, **how):
        found = GpuBench.layer(bench, piece, candidates, **how)
        general_us = 5.0 if gpu_candidates.batch_of(piece) == 1 else 60.0
        return LayerTimes({**found.times_us, "sparse, general": general_us}, {})

    bench.layer = layer
    (decision,) = tuned(network(0.9), bench, cases=make_cases([1, 16])).decisions.layers
    kernel = decision.kernels["sm_90"]
    assert (kernel.kernel, kernel.min_batch) == ("generated", 2)
    (chosen,) = (c for c in decision.candidates if c.times_us == (5.0, 10.0))
    assert chosen.name.endswith(" (sm_90), from 2 images on")


def test_what_is_added_for_several_batch_sizes_is_not_timed():
    candidates = search(max_plans=2).candidates([piece(batch=1), piece(batch=8)])
    *_, general, _, second = candidates
    at_1 = LayerTimes({c.name: 30.0 for c in candidates} | {general.name: 3.0}, {})
    at_8 = LayerTimes({c.name: 40.0 for c in candidates} | {second.name: math.inf}, {second.name: "it failed"})
    times, more = gpu_candidates.with_fewer_images((at_1, at_8), candidates, [1, 8])
    assert more[: len(candidates)] == candidates
    assert [c.kernel.min_batch for c in more[len(candidates) :]] == [2, 2]
    by_name = [[at_case.times_us[c.name] for at_case in times] for c in more[len(candidates) :]]
    assert by_name == [[3.0, 40.0], [3.0, math.inf]]
    assert len({c.name for c in more}) == len(more)
    # With one batch size there is nothing to choose between.
    assert gpu_candidates.with_fewer_images((at_8,), candidates, [8]) == ((at_8,), candidates)
    assert gpu_candidates.with_fewer_images((at_8, at_8), candidates, [8, 8])[1] == candidates


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("batch", "is_cold"), [(1, False), (4096, True)])
def test_layers_of_models_beyond_the_gpus_cache_are_timed_with_the_cache_empty(tuned, batch, is_cold):
    """The input of a layer of 32 channels of 12x12 takes 75 MB with 4096 images."""
    bench = GpuBench(whole_us=fast_whole)
    report = tuned(network(0.9, 0.95), bench, cases=make_cases([batch]))
    assert bench.cold == [is_cold, is_cold]
    assert any("cache emptied" in note for note in report.decisions.notes) == is_cold


@pytest.mark.usefixtures("compiled")
def test_times_with_the_cache_empty_are_kept_apart(tuned, monkeypatch):
    """The same layer, in a model that fits the cache and in one that does not."""
    tuned(network(0.9), GpuBench(whole_us=fast_whole))
    monkeypatch.setattr(tuning, "CACHE_BYTES", 1000)
    first, second = GpuBench(whole_us=fast_whole), GpuBench(whole_us=fast_whole)
    tuned(network(0.9), first)
    tuned(network(0.9), second)
    assert (first.cold, second.cold) == ([True], [])


@pytest.mark.usefixtures("compiled")
def test_sparse_layers_beside_a_pool_pay_for_its_layout(tuned):
    """By itself dense changes its layout on both sides, 40 us; before a pool it does not behind, and sparse does."""

    class Bench(LayoutBench):
        def layer(self, piece, candidates, **how):
            found = super().layer(piece, candidates, **how)
            times = {"sparse, general": 40.0, "dense, default": 200.0, "dense, nhwc": 100.0}
            return dataclasses.replace(found, times_us=found.times_us | times, reorder_in_us=10.0, reorder_out_us=30.0)

    bench = Bench(whole_us=lambda _: 400, last_us=lambda sparse: 200 - len(sparse))
    proto = network(0.9)
    proto.graph.node.append(helper.make_node("AveragePool", ["y"], ["pooled"], kernel_shape=[1, 1]))
    proto.graph.output[0].name = "pooled"
    predicted = [tuned(model, bench, targets=()).whole.trials[0].predicted_us for model in (network(0.9), proto)]
    assert predicted == [(200 - 60.0,), (200.0,)]
