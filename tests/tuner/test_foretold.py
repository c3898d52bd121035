"""Times of layers that nobody timed: by themselves, as those that were timed, whatever the network around them."""

from __future__ import annotations

import pytest

from onnx_sparseconv.converter.gpu_predictions import GpuRule, predict
from onnx_sparseconv.kernels.gpu_time_constants import MODEL
from onnx_sparseconv.tuner.foretold import foretell_layer
from tests.converter.test_gpu_rule import amid_others, sites_of


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_layer_amid_others_is_foretold_by_itself(index):
    """What changes of layout cost it is taken off later, for each layout that is tried."""
    site = sites_of(amid_others())[index]
    rule = GpuRule((90,))
    (inside,), (alone,) = predict(site, rule), predict(site, rule, by_itself=True)
    found = foretell_layer(site, site.input_shape, rule, rewrite=True)
    assert inside.is_in_network
    assert (found.dense_us, found.sparse_us) == (alone.dense_us, alone.sparse_us)
    assert found.dense_us != inside.dense_us
    assert found.reorder_in_us == MODEL.transpose_us(site.input_shape, 4)
