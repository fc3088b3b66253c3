"""Prompts: one template per call kind and style, and the one renderer that fills them."""

from samrag.prompts.render import Prompt, PromptStyle, render, style_hash, template_hash

__all__ = ["Prompt", "PromptStyle", "render", "style_hash", "template_hash"]
