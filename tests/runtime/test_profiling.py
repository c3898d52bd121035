from __future__ import annotations

import numpy as np
import pytest

from onnx_sparseconv.errors import ModelError
from onnx_sparseconv.runtime import profiling
from onnx_sparseconv.runtime.depth import load_structure
from onnx_sparseconv.runtime.layer_times import NodeTime
from onnx_sparseconv.runtime.profiling import NodePlace, ProfileJob, nodes_elsewhere, profile, profile_in_turn
from onnx_sparseconv.runtime.timing import TimingPlan
from tests.runtime import networks

X = np.zeros((1, 8, 12, 12), np.float32)


def _job(path, **changes):
    return ProfileJob(**{"model": str(path), "provider": "cpu", "threads": 1, "use_library": True} | EXTRA | changes)


EXTRA = {"provider_options": {}, "config": {}, "runs": 3}


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("in_child", [False, True])
def test_every_node_has_a_time_and_a_place(tmp_path, in_child, names):
    path = networks.save(networks.sparse(networks.weights(), names=names), tmp_path / "m.onnx")
    nodes = profile(_job(path), load_structure(path), {"x": X}, in_child=in_child)
    times = {node.name: node for node in nodes if node.op_type == "SparseConv"}
    assert sorted(times) == (["conv0", "conv1"] if names else ["c0", "c1"])
    assert all(node.time_us > 0 and node.provider == "CPUExecutionProvider" for node in times.values())
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


def test_models_are_profiled_in_turn(pair, monkeypatch):
    order = []
    run_session = profiling.run_session
    monkeypatch.setattr(
        profiling, "run_session", lambda session, arrays, name: order.append(name) or run_session(session, arrays, name)
    )
    jobs = [_job(path, use_library=bool(number)) for number, path in enumerate(pair)]
    plan = TimingPlan(warmup=1, min_rounds=2, max_rounds=2, runs_per_round=1)
    dense, sparse = profile_in_turn(jobs, [load_structure(path) for path in pair], {"x": X}, plan, lambda: 0)
    first, second = map(str, pair)
    assert order == [first, second, *[first] * 2, *[second] * 2, *[second] * 2, *[first] * 2]
    assert sum(node.op_type == "Conv" for node in dense) == sum(node.op_type == "SparseConv" for node in sparse) == 2
    assert all(node.time_us > 0 for node in (*dense, *sparse))


def test_the_child_lets_the_driver_wait_and_reads_the_options(pair, monkeypatch):
    script = (
        "import json, os; from onnx_sparseconv.runtime import profiling, session; make = session.make_session\n"
        "def note(*args, **kw):\n"
        " assert os.environ['CUDA_LAUNCH_BLOCKING'] == '1'\n"
        " assert kw['provider_options'] == {'prefer_nhwc': '1'}, kw\n"
        " assert kw['session_options'].get_session_config_entry('sparseconv.cuda_kernel') == 'csr'\n"
        " return make(*args, **kw)\n"
        "profiling.make_session = note\n"
        "profiling.main(sys.argv[2])"
    )
    monkeypatch.setattr(profiling, "_CHILD", "import json, sys; sys.path[:] = json.loads(sys.argv[1]); " + script)
    job = _job(pair[1], provider_options={"prefer_nhwc": "1"}, config={"sparseconv.cuda_kernel": "csr"})
    assert profile(job, load_structure(pair[1]), {"x": X}, in_child=True)


def test_what_fails_in_the_child_is_an_error_with_its_words(pair, monkeypatch):
    structure = load_structure(pair[1])
    with pytest.raises(ModelError, match="cannot be run"):
        profile(_job(pair[1]), structure, {"x": X[:, :3]}, in_child=True)
    monkeypatch.setattr(profiling, "_CHILD", "import sys; sys.exit('no such luck')")
    with pytest.raises(ModelError, match=r"profiling it failed \(no such luck\)"):
        profile(_job(pair[1]), structure, {"x": X}, in_child=True)


def test_nodes_that_ran_on_the_cpu_are_told():
    nodes = [
        NodeTime("conv", "Conv", "CUDAExecutionProvider", 1),
        NodeTime("shape", "Shape", "CPUExecutionProvider", 1),
        NodeTime("inside", "If", "", 1),
    ]
    assert nodes_elsewhere(nodes, "cuda") == (NodePlace("shape", "Shape", "CPUExecutionProvider"),)
    assert [place.node for place in nodes_elsewhere(nodes, "cpu")] == ["conv"]
