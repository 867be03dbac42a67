"""Groups of commands whose modules are imported only when a command runs or shows its options, so that help is fast."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvsketch.cli.boundary import new_app


def group(package: str, commands: dict[str, str], help_text: str) -> typer.Typer:
    """A group of commands by name, each with one line of help; the module `kvsketch_lab.<package>.<name>` has its
    `command`.
    """

    class Lazy(TyperCommand):
        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            module = importlib.import_module(f"kvsketch_lab.{package}.{str(self.name).replace('-', '_')}")
            return module.command().make_context(info_name, args, parent, **extra)

    class Group(TyperGroup):
        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in commands:
                raise ValueError(
                    f"unknown name {cmd_name!r} after `{ctx.info_name}`; choose one of: {', '.join(commands)}"
                )
            return super().get_command(ctx, cmd_name)

    app = new_app(help_text, cls=Group)
    for name, about in commands.items():
        app.command(name, help=about, cls=Lazy)(lambda: None)
    return app
