"""What watches the training: gradients that reach every trained tensor, and a stop when nothing improves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import EarlyStoppingCallback, TrainerCallback

from samrag.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainingArguments

_MOVES = 20  # steps within which every trained tensor must have had a gradient; LoRA's A has none in the first


class GradientCheck(TrainerCallback):  # type: ignore[misc]
    """Refuses to go on when a trained tensor has had no gradient in the first steps with a learning rate."""

    def __init__(self) -> None:
        self._silent: set[str] | None = None
        self._moves = 0

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Note which tensors have a gradient."""
        if self._silent == set():
            return
        named = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        if all(gradient is None for gradient in named.values()):
            return  # kept elsewhere (DeepSpeed)
        live = {name for name, gradient in named.items() if gradient is not None and bool((gradient != 0).any())}
        self._silent = (set(named) if self._silent is None else self._silent) - live
        self._moves += any(group["lr"] > 0 for group in optimizer.param_groups)
        if self._moves > _MOVES and self._silent:
            raise UserError(
                f"{len(self._silent)} trained tensors, {min(self._silent)} among them, got no gradient in {_MOVES}"
                " steps; either no row uses their part (an adapter in the vision tower needs rows with images), or"
                " activation_checkpointing keeps it from them: freeze the part, or switch that off."
            )


def early_stopping(patience: int | None, training: TrainingArguments) -> list[TrainerCallback]:
    """The callback that stops a run which no longer improves, where it is asked for.

    Raises:
        UserError: it is asked for without evaluations, or without a best checkpoint to come back to.
    """
    if patience is None:
        return []
    if training.eval_strategy == "no" or not training.load_best_model_at_end:
        raise UserError(
            "early_stopping_patience needs eval_strategy, load_best_model_at_end: true and metric_for_best_model."
        )
    return [EarlyStoppingCallback(patience)]
