"""Every strategy's attention error by its own GPU kernels; apart, so that it needs torch alone."""

import pytest

from shadowkv_lab import accuracy, facts
from shadowkv_lab.sources import poolfile
from shadowkv_lab.strategies import STRATEGIES, parse


@pytest.mark.gpu
def test_every_strategy_on_a_gpu():
    """What is stored is the CPU's, bit for bit; each kernel is near float64 over it."""
    pool = poolfile.load(facts.DATA / "pools" / "tiny-glm-5-random.safetensors")
    found = accuracy.attention_errors(pool, [k() for k in STRATEGIES.values()], device="cuda:0")
    cpu = {e.layer: e for e in accuracy.attention_errors(pool, [parse("full_cast")])}
    for error in found:
        if STRATEGIES[error.name].kinds[0] == "fp8":
            assert error.storage_output == pytest.approx(cpu[error.layer].storage_output, rel=1e-9)
        assert error.kernel_output < 1e-2, error
    gpu = accuracy.coherence(pool, device="cuda:0")
    assert gpu.exact_equals_full_cast and gpu.exact_survives_restore
