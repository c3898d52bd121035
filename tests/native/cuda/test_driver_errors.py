"""What the CUDA driver refuses becomes one clear line that names the node; nothing leaks, and the next try works."""

from __future__ import annotations

import os
import subprocess
import sys

import onnxruntime as ort
import pytest

from onnx_sparseconv.custom_ops import library
from tests.native.cuda.reference import model_with_image
from tests.support import cuda_emulation
from tests.support.native_build import ROOT
from tests.support.sparse_models import (
    SparseConvCase,
    assert_within,
    geometry_2d,
    make_model,
    oracle,
    random_inputs,
    random_weight,
)

# Of fewer rows than warpgroups take.
CASE = SparseConvCase(random_weight((7, 6, 3, 3), 0.4), geometry_2d())
SHAPE = (2, 6, 5, 7)
NAMES = {2: "CUDA_ERROR_OUT_OF_MEMORY", 100: "CUDA_ERROR_NO_DEVICE", 700: "CUDA_ERROR_ILLEGAL_ADDRESS"}
CREATION = (
    "cuDeviceGet",
    "cuCtxGetCurrent",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuDeviceGetAttribute",
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuKernelGetFunction",
    "cuFuncLoad",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuOccupancyMaxActiveClusters",
    "cuMemAlloc_v2",
    "cuMemcpyHtoD_v2",
    "cuStreamSynchronize",
)
RUN = ("cuStreamGetCtx", "cuCtxPushCurrent_v2", "cuLaunchKernel")
# These report what went wrong earlier; nobody is there to be told.
RELEASE = ("cuMemFree_v2", "cuLibraryUnload", "cuDevicePrimaryCtxRelease_v2", "cuCtxPopCurrent_v2")


def check_message(error, function, code, node="SparseConv node 'conv1'"):
    message = str(error)
    assert f"{node}: the CUDA driver's {function} failed with {NAMES[code]} ({code}" in message
    assert "\n" not in message.strip()


def run_and_check(session, x_shape=SHAPE):
    inputs = random_inputs(CASE, x_shape)
    (actual,) = session.run(None, inputs)
    assert_within(actual, *oracle(CASE, inputs))


@pytest.mark.parametrize("code", NAMES)
@pytest.mark.parametrize("function", CREATION)
def test_every_call_at_creation_may_fail(driver, make_session, function, code):
    model = model_with_image(CASE)
    before = driver.calls(function)
    session = make_session(model)
    count = driver.calls(function) - before
    del session
    assert count > 0
    for nth in range(1, count + 1):
        live = driver.live()
        driver.fail(function, nth, code)
        with pytest.raises(Exception, match="conv1") as caught:
            make_session(model)
        check_message(caught.value, function, code)
        assert driver.live() == live
    run_and_check(make_session(model))


@pytest.mark.parametrize("asked", [{"cuda_kernel": "csr"}, {"cuda_splits": 2}, {"cuda_passes": 2}])
@pytest.mark.parametrize("function", RUN)
def test_every_call_of_a_run_may_fail(driver, make_session, function, asked):
    session = make_session(model_with_image(CASE, chunk_channels=2), **asked)
    before = driver.calls(function)
    run_and_check(session)
    for nth in range(1, driver.calls(function) - before + 1):
        live = driver.live()
        driver.fail(function, nth, 700)
        with pytest.raises(Exception, match="conv1") as caught:
            session.run(None, random_inputs(CASE, SHAPE))
        check_message(caught.value, function, 700)
        assert "start the process again" in str(caught.value)
        assert driver.live() == live
        run_and_check(session)


def test_a_launch_of_clusters_may_fail(driver, make_session):
    session = make_session(model_with_image(CASE, tile_channels=4, threads=32), cuda_splits=1)
    run_and_check(session)
    assert driver.last_generated().cluster_blocks == 2
    driver.fail("cuLaunchKernelEx", 1, 700)
    with pytest.raises(Exception, match="conv1") as caught:
        session.run(None, random_inputs(CASE, SHAPE))
    check_message(caught.value, "cuLaunchKernelEx", 700)
    run_and_check(session)


@pytest.mark.parametrize("function", RELEASE)
def test_errors_at_the_end_are_nobodys(driver, make_session, function):
    session = make_session(model_with_image(CASE))
    run_and_check(session)
    driver.fail(function, 1, 700)
    del session
    driver.reset()
    run_and_check(make_session(make_model(CASE)))


def test_an_error_without_a_name(driver, make_session):
    driver.fail("cuMemAlloc_v2", 1, 12345)
    with pytest.raises(Exception, match=r"node 'conv1': .* cuMemAlloc_v2 failed with an unknown error \(12345\)"):
        make_session(make_model(CASE))


def test_an_old_gpu_is_refused(driver, make_session):
    driver.set_device(architecture=70)
    with pytest.raises(Exception, match=r"node 'conv1': the GPU has compute capability 7\.0, 7\.5 is needed"):
        make_session(make_model(CASE))


def test_the_current_context_is_taken_if_it_is_of_the_right_gpu(driver, make_session):
    for device, retained in ((0, 0), (1, 1)):
        with driver.current_context(device):
            before = driver.calls("cuDevicePrimaryCtxRetain")
            session = make_session(make_model(CASE))
            assert driver.calls("cuDevicePrimaryCtxRetain") == before + retained
            run_and_check(session)
            del session


CHILD = """
import sys
from tests.support import cuda_emulation
if sys.argv[1] == "loaded":
    driver = cuda_emulation.fake_driver()
    if len(sys.argv) > 2:
        driver.fail(sys.argv[2], 1, 100)
import onnxruntime as ort
from onnx_sparseconv.custom_ops import library
from tests.support.sparse_models import SparseConvCase, geometry_2d, make_model, random_inputs, random_weight
case = SparseConvCase(random_weight((8, 6, 3, 3), 0.4), geometry_2d())
for attempt in range(2):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    library.register(options)
    try:
        ort.InferenceSession(make_model(case).SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        print(error)
    else:
        print("works")
"""


def in_another_process(*arguments, **environment):
    """Lines that two attempts to create a session give in a process that has not asked for the driver yet."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_missing_driver():
    lines = in_another_process("missing")
    assert len(lines) == 2
    for line in lines:
        assert "SparseConv node 'conv1': could not open the CUDA driver (libfake_cuda.so" in line
        assert "install the NVIDIA driver, or run the model on the CPUExecutionProvider" in line


def test_an_old_driver():
    lines = in_another_process("loaded", FAKE_CUDA_DRIVER_VERSION="11080")
    assert len(lines) == 2
    for line in lines:
        assert (
            "node 'conv1': the NVIDIA driver supports CUDA up to 11.8, 12.1 is needed; install a newer driver" in line
        )


def test_no_gpu_at_first():
    first, second = in_another_process("loaded", "cuInit")
    check_message(first, "cuInit", 100)
    assert "compare nvidia-smi, CUDA_VISIBLE_DEVICES and the provider's device_id" in first
    assert second == "works"


def test_the_products_library_needs_no_driver(monkeypatch, native_library):
    """It registers the CUDA kernels, and runs on the CPU as if there were none."""
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(native_library))
    before = cuda_emulation.fake_driver().calls()
    options = ort.SessionOptions()
    options.add_session_config_entry("sparseconv.cuda_kernel", "csr")
    library.register(options)
    session = ort.InferenceSession(
        model_with_image(CASE).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    run_and_check(session)
    (record,) = library.describe_kernels()
    assert record.provider == "cpu"
    assert cuda_emulation.fake_driver().calls() == before
    assert b"libcuda.so.1" in native_library.read_bytes()
    assert b"libfake_cuda" not in native_library.read_bytes()
