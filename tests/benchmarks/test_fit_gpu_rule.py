"""The fit of the rule for GPUs: it finds what made the times, and what it says of itself is so."""

from __future__ import annotations

import dataclasses
import functools
import importlib

import numpy as np
import pytest

from tests.benchmarks.conftest import importable_programs


@pytest.fixture(scope="module")
def program():
    with importable_programs():
        yield importlib.import_module("fit_gpu_rule")


@pytest.fixture(scope="module")
def library(program):
    return program.read_library_rows()


@pytest.fixture(scope="module")
def rows(program):
    return program.read_rows(program.RESULTS, program.LIBRARY_RESULTS)


def test_the_constants_decide_the_measured_layers_as_measured(program, rows):
    """Whatever was changed since: where this fails, run ``python benchmarks/fit_gpu_rule.py``."""
    model, margin = program.gpu_time_constants.MODEL, program.gpu_time_constants.MIN_GAIN
    quality = program.rate(rows, program.foretell(rows, model), margin)
    assert quality.rows >= 90
    assert quality.right >= 0.85 * quality.rows
    assert quality.losing <= 0.03 * quality.rows
    assert quality.gain_error < 1.6


def test_layers_that_the_fit_did_not_see_are_decided_right_too(program, rows):
    quality = program.rate(rows, program.foretell_unseen(rows), program.gpu_time_constants.MIN_GAIN)
    assert quality.right >= 0.8 * quality.rows


def test_a_fit_finds_the_model_that_made_the_times(program, rows):
    truth = dataclasses.replace(
        program.fit(rows),
        float_tflops=300.0,
        half_tflops=600.0,
        layout_us=9.0,
        row_us=0.0,  # found behind the others
        sparse_slowdown=1.7,
        library_mhz=1200.0,
    )
    dense_us, sparse_us, warpgroup_us = program.foretell(rows, truth)
    made = dataclasses.replace(rows, dense_us=dense_us, sparse_us=sparse_us, warpgroup_us=warpgroup_us)
    found = program.fit(made)
    # Not exactly: constants are pulled to where the search begins.
    assert found.float_tflops == pytest.approx(300, rel=0.05)
    assert found.half_tflops == pytest.approx(600, rel=0.05)
    assert found.layout_us == pytest.approx(9, rel=0.05)
    assert found.sparse_slowdown == pytest.approx(1.7, rel=0.05)
    assert found.library_mhz == pytest.approx(1200, rel=0.05)
    quality = program.rate(made, program.foretell(made, found), 1.2)
    assert quality.gain_error < 1.1


def test_what_convolutions_in_one_dimension_take_more_is_found(program, rows):
    model, in_row = program.fit(rows), rows.dense.is_row > 0
    assert in_row.sum() == 4

    def error(row_us):
        times = dataclasses.replace(model, row_us=row_us).dense_us(rows.dense)
        return np.abs(np.log(times / rows.dense_us))[in_row].mean()

    assert error(model.row_us) < 0.25
    assert error(0.0) > 0.4


def test_a_fit_finds_what_made_the_times_of_the_librarys_kernels(program, rows, library):
    truth = dataclasses.replace(program.fit(rows), library_launch_us=4.0, library_mhz=900.0)
    assert len(library.few_images.layers) >= 90
    assert len(library.pointwise.layers) >= 13

    def made(of):
        return dataclasses.replace(of, took_us=truth.cycles_us(of.work))

    some = dataclasses.replace(rows, warpgroup_us=np.full_like(rows.warpgroup_us, np.inf))
    made_up = {"few_images": made(library.few_images), "pointwise": made(library.pointwise)}
    found = program.fit(some, dataclasses.replace(library, **made_up))
    assert found.library_launch_us == pytest.approx(4, rel=0.05)
    assert found.library_mhz == pytest.approx(900, rel=0.05)
    assert "| all | " in program.library_table(library.pointwise, found.cycles_us(library.pointwise.work))


@pytest.mark.parametrize("of", ["few_images", "clusters", "pointwise"])
def test_times_of_the_librarys_kernels_are_foretold_within_a_fifth(program, library, of):
    rows = getattr(library, of)
    foretold = program.gpu_time_constants.MODEL.cycles_us(rows.work)
    assert program._typical(foretold / rows.took_us) < 1.2


def test_the_figures_of_quality(program, rows):
    some = rows.select(np.arange(len(rows.layers)) < 4)
    none = np.full(4, np.inf)
    measured = {"dense_us": np.array([400.0, 100.0, 200.0, 16.0]), "sparse_us": np.array([100.0, 200.0, 100.0, 8.0])}
    some = dataclasses.replace(some, **measured, warpgroup_us=none)
    foretold = np.array([400.0, 300.0, 100.0, 24.0]), np.array([100.0, 200.0, 100.0, 12.0]), none
    found = program.rate(some, foretold, 1.2)
    # As measured, one that would lose, one that would be missed, and one that saves next to nothing.
    assert (found.rows, found.right, found.losing, found.missed) == (4, 1, 1, 1)
    assert (found.worst_loss, found.best_missed) == (0.5, 2.0)
    assert found.sparse_error == pytest.approx(np.exp(np.sqrt(np.log(1.5) ** 2 / 4)))
    assert found.dense_error == pytest.approx(np.exp(np.sqrt((np.log(3) ** 2 + np.log(2) ** 2 + np.log(1.5) ** 2) / 4)))
    assert found.gain_error == pytest.approx(np.exp(np.sqrt((np.log(3) ** 2 + np.log(2) ** 2) / 4)))


def test_of_two_sparse_kernels_the_one_that_is_foretold_to_be_faster_counts(program, rows):
    some = rows.select(np.arange(len(rows.layers)) < 2)
    times = {"dense_us": [400.0, 400.0], "sparse_us": [100.0, 100.0], "warpgroup_us": [50.0, 50.0]}
    some = dataclasses.replace(some, **{name: np.array(values) for name, values in times.items()})
    foretold = np.array([400.0, 400.0]), np.array([100.0, 100.0]), np.array([50.0, 500.0])
    np.testing.assert_array_equal(program.fastest_us(some, *foretold[1:]), [[50.0, 100.0], [50.0, 100.0]])
    found = program.rate(some, foretold, 1.2)
    assert (found.right, found.sparse_error, found.gain_error) == (2, 1.0, 1.0)


def test_the_margin_lets_no_measured_layer_lose_much(program, rows):
    model = program.fit(rows)
    margin = program.choose_margin(rows, model)
    dense, *others = program.foretell(rows, model)
    sparse, took = program.fastest_us(rows, *others)
    gain = rows.dense_us / took
    rewritten = [(dense >= m * sparse) & (dense - sparse >= program.MIN_SAVED_US) for m in program.MARGINS]
    losers = [int(np.sum(one & (gain < program.MAX_LOSS))) for one in rewritten]
    assert losers[program.MARGINS.index(margin)] == min(losers)


def test_weights_that_were_not_measured_are_told(program):
    layer = {"name": "one", "in_channels": 8, "out_channels": 8, "height": 8, "width": 8, "kernel": 3, "stride": 1}
    setting = {"sparsity": 0.9, "dtype": "float32"}
    with pytest.raises(ValueError, match="one was measured with 3 non-zeros"):
        program.make_measured_layer({**layer, "pad": 1, "group": 1}, setting, 3)


def test_weights_are_those_of_the_benchmark(program):
    from layers import Layer, make_weights

    layer = Layer("one", 8, 8, 1, 9, 3, 1, 1, 1)
    wanted = make_weights(layer, 0.8, "float16")["w"]
    setting = {"sparsity": 0.8, "dtype": "float16"}
    made = program.make_measured_layer(dataclasses.asdict(layer), setting, np.count_nonzero(wanted))
    np.testing.assert_array_equal(made.weight[:, :, 0], wanted)


@pytest.fixture
def files(program, tmp_path, monkeypatch):
    constants, document = tmp_path / "constants.py", tmp_path / "rule.md"
    document.write_text("Words.\n<!-- table: gpu-rule -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(program, "CONSTANTS", constants)
    monkeypatch.setattr(program, "DOCUMENT", document)
    return constants, document


@pytest.fixture(scope="module")
def network(program):
    return program.read_network_rows(program.NETWORK_RESULTS, "float32", program.ARCHITECTURE, program.CLOCK_MHZ)


@pytest.fixture(scope="module")
def half_network(program):
    return program.read_network_rows(program.HALF_NETWORK_RESULTS, "float16", program.ARCHITECTURE, program.CLOCK_MHZ)


@pytest.fixture
def measured(program, rows, library, network, half_network):
    return program.Measured(rows, library, network, half_network)


def remembering(fit):
    """A fit that is computed once for the same objects."""
    found = {}

    def remember(*arguments):
        key = tuple(map(id, arguments))
        if key not in found:
            found[key] = fit(*arguments), arguments  # these have to live on, else others get their identities
        return found[key][0]

    return remember


def test_constants_and_tables_are_written_and_checked(program, measured, files, monkeypatch, capsys):
    rows, library, network = measured.rows, measured.library, measured.network
    monkeypatch.setattr(program, "read_measured", lambda: measured)
    for name in ("fit", "fit_network"):
        monkeypatch.setattr(program, name, remembering(getattr(program, name)))
    monkeypatch.setattr(program, "read_library_times", functools.cache(program.read_library_times))
    constants, document = files
    monkeypatch.setattr("sys.argv", ["fit_gpu_rule.py"])
    assert program.main() == 0
    namespace = {}
    exec(constants.read_text(), namespace)
    assert namespace["MODEL"] == program.rounded(program.fit(rows, library))
    assert namespace["NETWORK"] == program.rounded(program.fit_network(network, program._fit_some))
    of_halves = program.fit_network(measured.half_network, program._fit_some)
    assert namespace["HALF_NETWORK"] == program.rounded(of_halves) != namespace["NETWORK"]
    assert f"| all | {len(rows.layers)} |" in document.read_text()
    monkeypatch.setattr(program.gpu_time_constants, "MODEL", namespace["MODEL"])
    monkeypatch.setattr(program.gpu_time_constants, "NETWORK", namespace["NETWORK"])
    monkeypatch.setattr(program.gpu_time_constants, "HALF_NETWORK", namespace["HALF_NETWORK"])
    monkeypatch.setattr(program.gpu_time_constants, "MIN_GAIN", namespace["MIN_GAIN"])
    assert program.check(measured) == []
    other = dataclasses.replace(namespace["MODEL"], layout_us=1.0)
    monkeypatch.setattr(program.gpu_time_constants, "MODEL", other)
    monkeypatch.setattr("sys.argv", ["fit_gpu_rule.py", "--check"])
    capsys.readouterr()
    assert program.main() == 1
    told = capsys.readouterr().err
    assert "layout_us is 1, and fitted" in told
    assert "run: python benchmarks/fit_gpu_rule.py" in told


def test_a_fit_finds_the_network_model_that_made_the_times(program, network):
    truth = dataclasses.replace(
        program.gpu_time_constants.NETWORK,
        tflops=300.0,
        depthwise_tb=2.0,
        bias_us=5.0,
        activation_us=1.0,
        slow_activation_us=3.0,
        code_slowdown=1.5,
        code_size_us=40.0,
    )
    is_depthwise, moutputs = network.is_depthwise, network.dense.moutputs
    an_activation_us = np.where(network.is_slow, truth.slow_activation_us, truth.activation_us)
    made = dataclasses.replace(
        network,
        product_us=np.where(is_depthwise, truth.depthwise_us(network.dense), truth.product_us(network.dense)),
        bias_us=np.where(network.bias_us > 0, truth.pass_us(moutputs, truth.bias_us), 0.0),
        activation_us=np.where(network.activation_us > 0, truth.pass_us(moutputs, an_activation_us), 0.0),
        code_us=truth.code_us(network.code),
    )
    found = program.fit_network(made, program._fit_some)
    for name in ("tflops", "depthwise_tb"):  # pulled to where the search begins
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.05)
    for name in (
        "bias_us",
        "activation_us",
        "slow_activation_us",
        "code_slowdown",
        "code_size_us",
        "code_in_us",
        "code_out_us",
    ):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-3)


def test_times_in_networks_are_foretold_within_a_quarter(program, network):
    dense, code = program.network_errors(network, program.gpu_time_constants.NETWORK)
    assert len(dense) >= 70
    assert len(code) >= 50
    for ratios in (dense, code):
        assert np.exp(np.sqrt(np.mean(np.log(ratios) ** 2))) < 1.25


def test_dense_times_of_halves_in_networks_are_foretold_within_a_quarter(program, half_network):
    dense, code = program.network_errors(half_network, program.gpu_time_constants.HALF_NETWORK)
    assert len(dense) >= 170
    assert np.exp(np.sqrt(np.mean(np.log(dense) ** 2))) < 1.25
    # Parts of sums, and small depthwise maps, take longer than foretold.
    assert 50 <= len(code) < len(dense)
    assert np.exp(np.sqrt(np.mean(np.log(code) ** 2))) < 1.5


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_librarys_kernels_in_networks_are_foretold_within_a_quarter(program, dtype):
    model = program.gpu_time_constants.MODEL
    times = program.read_library_times(program.HALF_NETWORK_RESULTS, dtype, program.ARCHITECTURE, model)
    others = {"tensor"} if dtype == "float16" else {"csr"}
    assert set(times.kernels) == {"cluster", "depthwise", "octets", "pointwise", "wgmma"} | others
    assert np.exp(np.sqrt(np.mean(np.log(times.foretold_us / times.took_us) ** 2))) < 1.25
