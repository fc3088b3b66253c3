"""samrag: verified multimodal retrieval-augmented generation, and the distillation pipeline that trains it."""

__version__ = "0.1.0"
