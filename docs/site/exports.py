"""An extension of griffe, which reads the sources for the API reference: what a package exports.

muxkit's packages write each public name once, as an import of the form `from module import name as name`, and have no
`__all__` in their sources. Type checkers take such an import for an export. griffe doesn't, so it would leave out the
names of a package that come from its modules.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from griffe import Extension

if TYPE_CHECKING:
    from griffe import Inspector, Module, ObjectNode, Visitor


class Exports(Extension):
    """Gives each package that has no `__all__` the names that it imports as themselves."""

    def on_module_members(
        self, *, node: ast.AST | ObjectNode, mod: Module, agent: Visitor | Inspector, **kwargs: Any
    ) -> None:
        """Set the exports of a module after griffe has read it."""
        if mod.exports is None and mod.is_init_module and isinstance(node, ast.AST):
            names = sorted(
                alias.name
                for statement in ast.walk(node)
                if isinstance(statement, ast.ImportFrom)
                for alias in statement.names
                if alias.asname == alias.name
            )
            if names:
                mod.exports = list(names)
