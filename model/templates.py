"""Chat templates: the text that transformers makes of a conversation. Needs no torch."""

from collections.abc import Mapping
from typing import Any


def render(template: Any, named: Mapping[str, Any]) -> str:
    """The text of a template, or of the default of a list of them, before an answer; nothing where
    it fails. named: its variables, such as messages."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # comes with torch

        if isinstance(template, list):
            template = {one["name"]: one["template"] for one in template}["default"]
        known = {}
        for name, value in named.items():
            if isinstance(value, dict):  # a token with its properties, of older files
                value = value.get("content")
            known[name] = value or ""
        jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        jinja.add_extension("jinja2.ext.loopcontrols")
        return jinja.from_string(template).render(known, add_generation_prompt=True, tools=None)
    except Exception:  # it is a program, and may raise anything
        return ""
