"""One step of linear regression under every builder matches AutoDist's integration case c0."""

import numpy as np
import pytest
from builders import SYNCHRONOUS_STRATEGIES

import neondist as nd

CHIEF, WORKER = 123, 456
W, B = 5.0, 0.0
#: (W, b) after one step on the concatenated samples of these seeds
AFTER = {
    (CHIEF,): (4.957685286325961, 0.04175034879114915),
    (CHIEF, WORKER): (4.959388830573827, 0.041151709773275126),
    (CHIEF, CHIEF, WORKER): (4.958820982491205, 0.041351256112566466),
    (CHIEF, WORKER, WORKER): (4.959956678656449, 0.040952163433983786),
}


def draw_samples(seed):
    """Return 1000 samples of y = 3 x + 2 + noise, as AutoDist draws them."""
    rng = np.random.RandomState(seed)
    x = rng.randn(1000)
    return x[:, None], (3.0 * x + 2.0 + rng.randn(1000))[:, None]


def train_step(seeds, grid=None, strategy=None, accumulate=1):
    """Return (W, b) after one step on the samples of the seeds."""
    parts = [draw_samples(seed) for seed in seeds]
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    layer, model_class = (nd.FCLayer, nd.MLP) if grid is None else (nd.FCLayerDist, nd.MLPDist)
    options = {"cost": nd.MSE(), "optimizer": nd.SGD(0.01), "dtype": "float64", "accumulate": accumulate}
    model = model_class([layer(1)], strategy=strategy, **options)
    model.build((1,), len(x), grid)
    model.load_state({"fc1/weights": np.full((1, 1), W), "fc1/bias": np.full(1, B)})
    model.train_batch(model.scatter(x), y)
    state = model.state()
    return float(state["fc1/weights"].item()), float(state["fc1/bias"].item())


@pytest.mark.parametrize("strategy", SYNCHRONOUS_STRATEGIES)
@pytest.mark.parametrize("seeds", AFTER, ids=str)
@pytest.mark.long
def test_weights_after_one_step(seeds, strategy):
    """Devices with different numbers of samples are weighted by samples."""
    assert train_step(seeds, None, strategy) == pytest.approx(AFTER[seeds], rel=1e-13)
    for ranks in {len(seeds), 2}:
        results = nd.loopback.run(
            ranks, lambda world: train_step(seeds, nd.ProcessGrid(world, replicas=world.size), strategy)
        )
        for weights in results:
            np.testing.assert_allclose(weights, AFTER[seeds], rtol=1e-13)


@pytest.mark.parametrize("seeds", AFTER, ids=str)
def test_micro_batches_and_tiles_keep_the_weights(seeds):
    def body(world):
        return train_step(seeds, nd.ProcessGrid(world, replicas=7), "PSLoadBalancing", accumulate=3)

    for weights in nd.loopback.run(14, body):
        np.testing.assert_allclose(weights, AFTER[seeds], rtol=1e-13)
