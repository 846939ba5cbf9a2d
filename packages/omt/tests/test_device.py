"""E-steps in PyTorch: the same as numpy's, on PyTorch's CPU and, where there is one, on a CUDA device."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy import sparse

from omt.chunks import as_source
from omt.families import Gaussian
from omt.families.gaussian import COVARIANCE_TYPES
from omt.fitting.device import TorchEngine, engine_for
from omt.fitting.em import fit_mixture
from omt.fitting.supervision import Supervision
from omt.fitting.sweeps import Data, Model, evidence, sweep

torch = pytest.importorskip("torch")

gpu = pytest.mark.gpu
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=gpu)]


@pytest.fixture
def samples(random_mixture):
    return random_mixture(3, 5, 4, spread=1.5).sample(1500, 2)


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def known(kind: str, N: int, K: int) -> Supervision:
    rng = np.random.default_rng(0)
    if kind == "labels":
        return Supervision(rng.integers(-1, 2, size=N), np.array([0, 0, 1, 1, 1])[:K])
    if kind == "soft labels":
        soft = rng.dirichlet(np.ones(K), size=N)
        soft[::3] = np.nan
        soft[1] = np.eye(K)[0]
        return Supervision(soft=soft)
    return Supervision()


@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
@pytest.mark.parametrize("supervision", ["nothing", "labels", "soft labels"])
def test_one_pass_gives_the_sums_of_numpy(samples, device, kind, supervision):
    family = Gaussian(kind, rank=2 if kind == "lowrank" else None)
    mixture = fit_mixture(samples, 5, family=family, n_init=1)
    weight = np.random.default_rng(1).uniform(0.5, 1.5, size=1500)
    data = Data(as_source(samples), 400, np.dtype(float), weight, known(supervision, 1500, 5))
    model = Model(mixture.weights, mixture.components)
    plain, plain_evidence = sweep(data, family, model), evidence(data, model)
    data.engine = TorchEngine(torch.device(device), "float64")
    moved, moved_evidence = sweep(data, family, model), evidence(data, model)
    assert moved.evidence == pytest.approx(plain.evidence, rel=1e-10)
    assert moved_evidence == pytest.approx(plain_evidence, rel=1e-10)
    for name, sums in plain.statistics.sums.items():
        np.testing.assert_allclose(moved.statistics.sums[name], sums, rtol=1e-8, atol=1e-8)
    assert [value for value, _ in sorted(moved.candidates, key=lambda pair: pair[0])[:8]] == pytest.approx(
        [value for value, _ in sorted(plain.candidates, key=lambda pair: pair[0])[:8]]
    )


@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
def test_a_whole_fit_gives_the_mixture_of_numpy(samples, device, kind, monkeypatch):
    plain = fit_mixture(samples, 4, covariance=kind)
    monkeypatch.setattr("omt.fitting.em.engine_for", lambda *_, **__: TorchEngine(torch.device(device), "float64"))
    moved = fit_mixture(samples, 4, covariance=kind)
    np.testing.assert_allclose(moved.weights, plain.weights, atol=1e-6)
    np.testing.assert_allclose(moved.log_prob(samples), plain.log_prob(samples), atol=1e-6)


def test_a_large_fit_gives_the_mixture_of_numpy(random_mixture, device, monkeypatch):
    X = random_mixture(0, 4, 5, spread=3.0).sample(52_000, 1)
    plain = fit_mixture(X, 4, n_init=1)
    monkeypatch.setattr("omt.fitting.em.engine_for", lambda *_, **__: TorchEngine(torch.device(device), "float64"))
    moved = fit_mixture(X, 4, n_init=1)
    assert moved.report.method == "stepwise"
    np.testing.assert_allclose(moved.log_prob(X[:1000]), plain.log_prob(X[:1000]), atol=1e-6)


def test_labels_give_the_components_of_numpy(samples, device, monkeypatch):
    labels = np.where(samples[:, 0] > 0, "right", "left")
    plain = fit_mixture(samples, labels=labels)
    monkeypatch.setattr("omt.fitting.em.engine_for", lambda *_, **__: TorchEngine(torch.device(device), "float64"))
    moved = fit_mixture(samples, labels=labels)
    np.testing.assert_allclose(moved.components.covariances, plain.components.covariances, atol=1e-9)


@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
def test_responsibilities_in_float32_are_off_by_1e_4_at_most(samples, device, kind):
    far = samples + 1000.0  # far from the origin, in units of the spread
    mixture = fit_mixture(far, 5, covariance=kind, n_init=1)
    engine = TorchEngine(torch.device(device), "float32")
    data = Data(as_source(far), 400, np.dtype(np.float32))
    model = Model(mixture.weights, mixture.components)
    R, _ = engine._assigned(data, model, slice(0, 1500), engine._log_densities(model, engine._moved(far)))
    # A sample at 1000 has lost four digits before anything is computed: compare with the samples that float32 holds.
    exact = mixture.responsibilities(far.astype(np.float32))
    np.testing.assert_allclose(R.cpu().numpy(), exact, atol=1e-4)


def test_a_sample_far_from_every_component_is_no_nan(device):
    mixture = fit_mixture(np.random.default_rng(0).normal(size=(100, 2)), 2)
    far = np.array([[1e160, 0.0], [0.0, 0.0]])
    engine = TorchEngine(torch.device(device), "float64")
    model = Model(mixture.weights, mixture.components)
    R, value = engine._assigned(
        Data(as_source(far), 2, np.dtype(float)), model, slice(0, 2), engine._log_densities(model, engine._moved(far))
    )
    assert value[0] == -torch.inf
    assert not R.isnan().any()


@gpu
def test_cuda_fits_what_the_cpu_fits(random_mixture):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    X = random_mixture(0, 8, 20, spread=2.0).sample(60_000, 1)
    moved, plain = fit_mixture(X, 8, device="cuda", n_init=1), fit_mixture(X, 8, n_init=1)
    np.testing.assert_allclose(moved.log_prob(X[:2000]), plain.log_prob(X[:2000]), atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- bad input
def test_without_cuda_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is 'cuda', but PyTorch finds no CUDA device here; give device='cpu'"):
        fit_mixture(np.zeros((4, 2)), 2, device="cuda")


def test_without_torch_the_command_that_installs_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"device='cuda' needs PyTorch: pip install 'omt\[torch\]'"):
        fit_mixture(np.zeros((4, 2)), 2, device="cuda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"X": np.zeros((4, 2)), "device": "warp"}, "device is 'warp'; it must be 'cpu' or a device of PyTorch"),
        ({"X": np.ones((4, 2)), "device": "cuda", "family": "poisson"}, "only Gaussian families run on a device"),
        ({"X": sparse.eye_array(4), "device": "cuda", "covariance": "diag"}, "X is sparse; give dense samples"),
        ({"X": np.zeros((4, 2)), "device": "mps"}, "'mps', which has no float64; give dtype='float32'"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_mixture(n_components=2, **arguments)


def test_the_cpu_needs_no_engine():
    assert engine_for("cpu", Gaussian(), "float64") is None


def test_fitting_on_the_cpu_does_not_import_torch():
    script = (
        "import sys, numpy as np; from omt.fitting.em import fit_mixture; fit_mixture(np.eye(4), 2);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
