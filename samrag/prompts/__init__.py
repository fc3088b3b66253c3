"""Prompts: one template per call kind and style, and the one renderer that fills them."""

from samrag.prompts.render import Prompt, PromptStyle, render, template_hash

__all__ = ["Prompt", "PromptStyle", "render", "template_hash"]
