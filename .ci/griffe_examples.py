"""Lets the site show a docstring's `Example:` as code."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section to the name that griffe knows."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        del kwargs
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace(
                "\nExample:\n", "\nExamples:\n"
            )
