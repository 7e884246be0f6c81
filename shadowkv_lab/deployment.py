"""What a step is asked of: the setting of one GPU."""

from dataclasses import dataclass, field

from shadowkv_lab.load import Load
from shadowkv_lab.model import Model


@dataclass(frozen=True)
class Setting:
    """What one GPU's decode step depends on, beside the strategy and the card.

    `heads` are the query heads on this GPU; `pool_tokens` (P) the slots of its pool, without the
    dummy page. `order` says how slots lie ("random", "contiguous"), `rows` what fills them.
    """

    model: Model
    heads: int
    pool_tokens: int
    load: Load = field(default_factory=Load)
    page_size: int = 1
    order: str = "random"
    rows: str = "synthetic"

    def __str__(self) -> str:
        return f"{self.model.name}, pool {self.pool_tokens:,}, {self.load}"
