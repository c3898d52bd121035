"""Launches that the library chooses write every output exactly once, by the checker's count."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from onnx_sparseconv.kernels.checker import Launch, count_writes
from tests.native.cuda.reference import make_plan, model_with_image
from tests.support.sparse_models import SparseConvCase, geometry_2d, random_inputs, random_weight

SHAPES = [(1, 12, 8, 8), (5, 12, 7, 7), (2, 12, 31, 33), (3, 12, 1, 50), (1, 12, 40, 3)]
PLANS = [{"threads": 32}, {"threads": 256, "tile_channels": 3}, {"threads": 64, "tile_channels": 8}]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("stride", [1, 2])
def test_every_output_is_written_once(driver, make_session, dtype, stride):
    case = SparseConvCase(random_weight((8, 12, 3, 3), 0.4), geometry_2d(stride=stride), dtype=np.dtype(dtype))
    names = [field.name for field in dataclasses.fields(Launch) if field.name != "batch"]
    for changes, splits, multiprocessors in itertools.product(PLANS, (1, 3), (1, 4, 132)):
        driver.set_device(num_multiprocessors=multiprocessors)
        session = make_session(model_with_image(case, **changes), cuda_kernel="generated", cuda_splits=splits)
        for shape in SHAPES:
            session.run(None, random_inputs(case, shape))
            params = driver.last_generated()
            launch = Launch(batch=shape[0], **{name: getattr(params, name) for name in names})
            assert (count_writes(make_plan(case, **changes), launch) == 1).all(), launch
