"""A device for lowered layers without a GPU: the kernels of benchmarks/ compiled for the CPU, products in numpy."""

from __future__ import annotations

import ctypes
import math

import numpy as np

from tests.support.cuda_host_build import build_host_image, launch


class EmulatedDevice:
    """Works on host memory. ``failing`` algorithms of the sparse product raise."""

    sparse_algorithms = (6, 4)

    def __init__(self, memory, lowering, dtype, failing=()):
        from lowering import kernel_source

        self.memory, self.lowering, self.dtype, self.failing = memory, lowering, dtype, failing
        self.image = build_host_image(kernel_source(lowering, dtype))
        self.is_closed = False
        self.versions = {"emulated": "1"}

    def allocate(self, size_bytes):
        address = self.memory.allocate(size_bytes)
        self.memory.fill(address, size_bytes, 0)
        return address

    def upload(self, values):
        from device_memory import upload

        return upload(self.memory, values)

    def lower(self, x, lowered, images, strides):
        self._launch("lower", images, (x, lowered), strides)

    def finish(self, product, y, bias, images, strides):
        self._launch("finish", images, (product, y, bias), strides)

    def multiply(self, weight, lowered, product, shape):
        left = self._read(weight, (shape.rows, shape.depth)).astype(np.float32)
        right = self._read(lowered, (shape.count, shape.depth, shape.columns)).astype(np.float32)
        self.memory.write(product, np.matmul(left, right).astype(self.dtype))

    def sparse_product(self, csr, lowered, product, columns, algorithm):
        def multiply():
            if algorithm in self.failing:
                raise RuntimeError(f"no algorithm {algorithm}")
            pointers = self.memory.read(csr.pointers, (csr.rows + 1,), np.dtype(np.int32))
            indices = self.memory.read(csr.indices, (csr.nonzeros,), np.dtype(np.int32))
            left = np.zeros((csr.rows, csr.columns), np.float32)
            left[np.repeat(np.arange(csr.rows), np.diff(pointers)), indices] = self._read(csr.values, (csr.nonzeros,))
            right = self._read(lowered, (csr.columns, columns)).astype(np.float32)
            self.memory.write(product, (left @ right).astype(self.dtype))

        return multiply

    def recorded(self, runs):
        return _Runs(runs)

    def close(self):
        self.is_closed = True

    def _read(self, address, shape):
        return self.memory.read(address, shape, self.dtype)

    def _launch(self, name, images, addresses, strides):
        from lowering import launch_shape

        grid, threads = launch_shape(name, self.lowering, self.dtype.itemsize, images)
        params = [ctypes.c_void_p(address) for address in addresses] + [ctypes.c_longlong(s) for s in strides]
        launch(self.image, name, grid, (threads,), params)


class _Runs:
    mode = "emulated"

    def __init__(self, runs):
        self.runs, self.next = runs, 0

    def __call__(self):
        self.runs[self.next % len(self.runs)]()
        self.next += 1

    def burst(self, runs):
        for _ in range(runs):
            self()


def reference(x, weights, layer):
    """bias + Relu of the layer in float64, all positions; 1-D layers included."""
    from suite_rows import Layer

    assert isinstance(layer, Layer)
    flat = layer.height == 1
    x = x.astype(np.float64)
    weight = weights["w"].astype(np.float64)
    if flat:
        x, weight = x[:, :, None], weight[:, :, None]
    pad_y, stride_y = (0, 1) if flat else (layer.pad, layer.stride)
    padded = np.pad(x, ((0, 0), (0, 0), (pad_y, pad_y), (layer.pad, layer.pad)))
    height, width = (1, *layer.out_sizes) if flat else layer.out_sizes
    y = np.zeros((x.shape[0], layer.out_channels, height, width))
    for place in np.ndindex(height, width):
        top, left = place[0] * stride_y, place[1] * layer.stride
        patch = padded[:, :, top : top + weight.shape[2], left : left + weight.shape[3]]
        y[(..., *place)] = np.einsum("ncij,kcij->nk", patch, weight)
    y = np.maximum(y + weights["b"].astype(np.float64)[None, :, None, None], 0)
    return y.reshape(x.shape[0], layer.out_channels, *layer.out_sizes)


def size_of(shape, dtype):
    return math.prod(shape) * np.dtype(dtype).itemsize
