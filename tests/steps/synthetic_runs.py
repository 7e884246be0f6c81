"""Recorded steps made from a known model of time, as an oracle for the fit."""

from shadowkv_lab.deployment import Setting
from shadowkv_lab.load import Load
from shadowkv_lab.machine import card_of
from shadowkv_lab.model import load_model
from shadowkv_lab.steps.step import Origin, Phase, Step
from shadowkv_lab.strategies import parse

LAUNCH_MS = 0.005  # a layer and phase
SHARE = {"cast": 0.25, "attention": 0.6, "write": 0.5}  # of the device's bandwidth
H200_GB_PER_S = 4800


def layer_ms(phase: str, moved_bytes: float, gb_per_s: float = H200_GB_PER_S) -> float:
    """The known model: a launch, and bytes at a constant share of the bandwidth."""
    return LAUNCH_MS + moved_bytes / (gb_per_s * SHARE[phase]) / 1e6


def origin(device="NVIDIA H200", copy_gb_per_s=H200_GB_PER_S, date="2026-01-01") -> Origin:
    state = dict.fromkeys(("sm_clock_mhz", "memory_clock_mhz", "power_w", "driver"))
    versions = dict(torch="2.13.0", triton=None, flashinfer=None)
    told = dict(git_revision="abc", date=date, command="shadowkv measure")
    speeds = dict(copy_gb_per_s=copy_gb_per_s, read_gb_per_s=copy_gb_per_s)
    return Origin(device=device, **state, **versions, **speeds, **told)


def runs(
    strategies="full_cast,bf16_pool,shadow",
    pools=(65536, 262144, 495616),
    loads=((1, 1024), (1, 8192), (8, 1024), (8, 8192), (32, 1024), (32, 8192)),
    *,
    model="glm-5",
    heads=8,
    device="NVIDIA H200",
    gb_per_s=H200_GB_PER_S,
    mode="graph",
    date="2026-01-01",
    times=1.0,
) -> list[Step]:
    shape, found, card = load_model(model), [], card_of(device)
    for name in strategies.split(","):
        strategy = parse(name)
        for P in pools:
            for R, n in loads:
                if R * n > P:
                    continue
                moves = strategy.at(0).moves(shape, P, R * n, R)
                curves = (strategy.cast_curve, "flashinfer_fa3", strategy.write_curve)
                phases = tuple(
                    Phase(
                        phase,
                        times * shape.layers * layer_ms(phase, size, gb_per_s),
                        shape.layers * size,
                        curve,
                    )
                    for phase, size, curve in zip(SHARE, moves, curves, strict=True)
                    if size
                )
                found.append(
                    Step(
                        strategy.tag,
                        Setting(shape, heads, P, Load(R, n)),
                        card.name if card else device,
                        phases,
                        ms=sum(p.ms for p in phases),
                        kept_bytes=strategy.token_bytes(shape) * (P + 1),
                        mode=mode,
                        backend="flashinfer_fa3",
                        error=2e-3,
                        origin=origin(device, gb_per_s, date),
                    )
                )
    return found
