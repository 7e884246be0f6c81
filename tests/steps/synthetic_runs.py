"""Recorded runs made from a known model of time, as an oracle for the fit."""

import pandas as pd

from shadowkv_lab.model import load_model
from shadowkv_lab.strategies import parse

LAUNCH_MS = 0.005  # a layer and phase
SHARE = {"cast": 0.25, "attention": 0.6, "write": 0.5}  # of the device's bandwidth
H200_GB_PER_S = 4800


def layer_ms(phase: str, moved_bytes: float, gb_per_s: float = H200_GB_PER_S) -> float:
    """The known model: a launch, and bytes at a constant share of the bandwidth."""
    return LAUNCH_MS + moved_bytes / (gb_per_s * SHARE[phase]) / 1e6


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
) -> pd.DataFrame:
    shape, rows = load_model(model), []
    for name in strategies.split(","):
        strategy = parse(name)
        for P in pools:
            for R, n in loads:
                if R * n > P:
                    continue
                moves = strategy.at(0).moves(shape, P, R * n, R)
                ms = {
                    p: shape.layers * layer_ms(p, b, gb_per_s) if b else 0.0
                    for p, b in zip(SHARE, moves, strict=True)
                }
                rows.append(
                    {
                        "strategy": name,
                        "model": model,
                        "layers": shape.layers,
                        "heads": heads,
                        "pool_tokens": P,
                        "concurrency": R,
                        "context": n,
                        "live_tokens": R * n,
                        "new_tokens": R,
                        "page_size": 1,
                        "slot_order": "random",
                        "backend": "flashinfer_fa3",
                        "mode": mode,
                        "step_ms": sum(ms.values()),
                        "cast_ms": ms["cast"],
                        "attention_ms": ms["attention"],
                        "write_ms": ms["write"],
                        "error": 2e-3,
                        "origin.device": device,
                        "origin.date": "2026-01-01",
                        "origin.copy_gb_per_s": gb_per_s,
                    }
                )
    return pd.DataFrame(rows)
