"""Launching the kernels of ``library_kernels.cu`` in the emulation, with arrays between forbidden pages."""

from __future__ import annotations

import ctypes

import numpy as np

from onnx_sparseconv.kernels.device_sources import LIBRARY_KERNELS
from onnx_sparseconv.kernels.unified_csr import encode
from tests.support.cuda_host_build import address, check_surroundings, device_array, kernel_image, launch
from tests.support.sparse_models import output_shape, resolve

HUGE = 1 << 30  # bytes of an input that is not copied

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class Epilogue(ctypes.Structure):
    _fields_ = [
        ("bias", _pointer),
        ("residual", _pointer),
        ("activation", _int),
        ("alpha", _float),
        ("beta", _float),
        ("bounds", 2 * ctypes.c_uint),
    ]


class CsrParams(ctypes.Structure):
    _fields_ = [
        ("x", _pointer),
        ("y", _pointer),
        ("epilogue", Epilogue),
        ("values", _pointer),
        ("columns", _pointer),
        ("row_begin", _pointer),
        ("block_rows", _int),
        ("batch", _int),
        ("in_channels", _int),
        ("out_channels", _int),
        ("group_in_channels", _int),
        ("group_out_channels", _int),
        ("in_dims", _int * 3),
        ("out_dims", _int * 3),
        ("kernel_shape", _int * 3),
        ("strides", _int * 3),
        ("dilations", _int * 3),
        ("pads_begin", _int * 3),
    ]


class ReduceParams(ctypes.Structure):
    _fields_ = [
        ("y", _pointer),
        ("epilogue", Epilogue),
        ("partial", _pointer),
        ("part_values", ctypes.c_longlong),
        ("num_splits", _int),
        ("out_channels", _int),
        ("plane", _int),
        ("num_values", ctypes.c_longlong),
    ]


def type_name(dtype):
    return {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}[np.dtype(dtype)]


def csr_rows(case):
    """Values, columns and row begins of a case's weight, in the order of output channels."""
    csr = encode(case.weight, case.geometry.group, case.slice_height)
    lengths = np.repeat(csr.nnz_per_row, csr.slice_height)[: case.out_channels]
    begins = np.concatenate([[0], np.cumsum(lengths)])
    stored = np.argsort(csr.row_order)  # stored row of each output channel
    entries = np.concatenate([np.arange(begins[row], begins[row + 1]) for row in stored])
    row_begin = np.concatenate([[0], np.cumsum(lengths[stored])])
    return csr.values[entries].astype(np.float32), csr.columns[entries].astype(np.uint32), row_begin.astype(np.uint32)


def three(values, fill=1):
    return (_int * 3)(*[fill] * (3 - len(values)), *values)


def epilogue(case, bias, residual):
    return Epilogue(address(bias), address(residual), int(case.activation), case.alpha, case.beta)


def run_csr(case, inputs, sub_batch, *, threads=128, max_grid=65535, block_rows=1):
    """The output of ``sparseconv_csr_*`` for a case of `tests.support.sparse_models`."""
    arrays = {name: a if a.nbytes > HUGE else device_array(a, misalignment=None) for name, a in inputs.items()}
    values, columns, row_begin = (device_array(array, misalignment=None) for array in csr_rows(case))
    shape = output_shape(case, inputs["X"].shape)
    y = device_array(np.full(shape, np.nan, case.dtype), misalignment=1, writable=True)
    geometry, group = case.geometry, case.geometry.group
    params = CsrParams(
        x=address(arrays["X"]),
        y=address(y),
        epilogue=epilogue(case, arrays.get("B"), arrays.get("Z")),
        values=address(values),
        columns=address(columns),
        row_begin=address(row_begin),
        block_rows=block_rows,
        batch=shape[0],
        in_channels=case.in_channels,
        out_channels=case.out_channels,
        group_in_channels=case.in_channels // group,
        group_out_channels=case.out_channels // group,
        in_dims=three(inputs["X"].shape[2:]),
        out_dims=three(shape[2:]),
        kernel_shape=three(geometry.kernel_shape),
        strides=three(geometry.strides),
        dilations=three(geometry.dilations),
        pads_begin=three([begin for begin, _, _ in resolve(geometry, inputs["X"].shape[2:])], fill=0),
    )
    positions = int(np.prod(shape[2:]))
    wanted = (-(-positions // threads), -(-case.out_channels // block_rows), -(-shape[0] // sub_batch))
    grid = (wanted[0], *(min(n, max_grid) for n in wanted[1:]))
    kernel = f"sparseconv_csr_{type_name(case.dtype)}_b{sub_batch}"
    launch(kernel_image(LIBRARY_KERNELS), kernel, grid, (threads,), [params])
    check_surroundings(y)
    return y


def run_reduce(case, partial, bias, residual, *, threads=64, blocks=None):
    """The output of ``sparseconv_reduce_*`` for partial sums ``[splits, N, K, *sizes]``."""
    y = device_array(np.full(partial.shape[1:], np.nan, case.dtype), writable=True)
    partial = device_array(partial, misalignment=None)
    plane = int(np.prod(partial.shape[3:]))
    sums = epilogue(case, bias, residual)
    params = ReduceParams(address(y), sums, address(partial), y.size, partial.shape[0], partial.shape[2], plane, y.size)
    grid = (blocks or -(-y.size // threads),)
    launch(kernel_image(LIBRARY_KERNELS), f"sparseconv_reduce_{type_name(case.dtype)}", grid, (threads,), [params])
    check_surroundings(y)
    return y
