"""Options that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
ModelOption = Annotated[str, typer.Option(help="Short name (`kvsketch models`), local folder, .gguf file or hub name.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")]
DtypeOption = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; default: bfloat16 on a GPU, else float32.")
]


class Fit(StrEnum):
    """Whether a command fits the model where its method asks for what is learned of it."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


FIT = (
    "auto: a GPU fits a model without maps once, if that takes less than 3 minutes, so that rehearse keeps more of "
    "what is asked about; always: a CPU too, whatever it takes; never: rehearse replays virtually."
)
FitOption = Annotated[Fit, typer.Option(help=FIT, envvar="KVSKETCH_FIT")]
QUICK = "float32, bfloat16 or float16; default: bfloat16 on a GPU or a CPU with native support, else float32."
QuickDtypeOption = Annotated[str | None, typer.Option(help=QUICK)]

# The same as kvsketch.models.DEFAULT_MODEL, which a test checks; importing it here would make --help load torch.
DEFAULT_MODEL = "smollm2-135m"
# Of `demo` and `compare`: the smallest built-in model that answers questions about a text.
COMPARED_MODEL = "qwen2.5-coder-0.5b"
