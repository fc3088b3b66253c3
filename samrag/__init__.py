"""samrag: verified multimodal retrieval-augmented generation, and the distillation pipeline that trains it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samrag.interactive import SamRag

__version__ = "0.1.0"
__all__ = ["SamRag", "__version__"]


def __getattr__(name: str) -> Any:
    """`SamRag`, imported when it is asked for: `import samrag` alone stays light."""
    if name == "SamRag":
        from samrag.interactive import SamRag

        return SamRag
    raise AttributeError(f"module 'samrag' has no attribute {name!r}")
