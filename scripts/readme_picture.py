"""Draw the README's picture, docs/steps.png, from recorded runs; needs a Chromium."""

from pathlib import Path

from shadowkv_lab.strategies import STRATEGIES
from shadowkv_lab.ui import decode

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "steps.png"


def main() -> None:
    steps = decode.recorded("glm-5", 8).query(
        "pool_tokens == 495_616 and concurrency == 1 and context == 1024"
    )
    figure = decode.step_by_phase(steps[steps.strategy.isin(STRATEGIES)])
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_bytes(figure.to_image("png", scale=1.5))


if __name__ == "__main__":
    main()
