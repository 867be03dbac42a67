"""How many users a GPU holds, and how fast it answers them, before anything is loaded.

    users that fit = (memory * (1 - RESERVE) - weights - shared document) / bytes of one user's cache
    tokens/s       = users * speed / (weights + every user's cache and the document)

Bytes are what the methods promise for the shapes of the model (`cache.memory.Sizes`). A step of many users reads the
weights once, and each user reads the document as well as what is its own. The speed is what our own steps read in a
second on an H200 (`advice.speeds`, from records), times the GPU's bandwidth over the H200's; a method without a record
has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsketch.byte_sizes import parsed
from kvsketch.models.catalog import CATALOG, ModelCard
from kvsketch.models.loading import HUB_NAME

if TYPE_CHECKING:
    from kvsketch.cache.memory import Sizes
    from kvsketch.methods import Method

RESERVE = 0.1  # of the memory, for activations and workspace: what vLLM leaves free too
METHODS = "full,full:bits=4,rehearse:budget=50%,rehearse:budget=40%,rehearse:budget=20%:replay=exact"


@dataclass(frozen=True)
class Gpu:
    """Memory, and how much of it is read in a second, as its maker's data sheet says."""

    memory: int
    bandwidth: float | None = None


GPUS = {
    name: Gpu(gigabytes * 10**9, rate * 1e9)
    for name, gigabytes, rate in (
        ("t4", 16, 320), ("l4", 24, 300), ("a10", 24, 600), ("rtx-3090", 24, 936), ("rtx-4090", 24, 1008),
        ("rtx-5090", 32, 1792), ("a100-40gb", 40, 1555), ("l40s", 48, 864), ("a100-80gb", 80, 2039),
        ("h100", 80, 3350), ("h200", 141, 4800), ("b200", 180, 8000),
    )
}  # fmt: skip
H200 = 4800e9  # bytes a second, of the GPU that records speak of


def gpu_of(text: str) -> Gpu:
    """A GPU by its name, or one of so much memory; ValueError names the choices."""
    known = GPUS.get(text.strip().lower())
    if known is not None:
        return known
    try:
        return Gpu(parsed(text))
    except ValueError:
        raise ValueError(f"--gpu {text} is not possible; use a size such as 24GB, or {', '.join(GPUS)}") from None


@dataclass(frozen=True)
class Demand:
    """So many users, each with `context` tokens, of which the first `document` are the same for all."""

    context: int
    users: int
    document: int = 0

    def __post_init__(self) -> None:
        if self.users < 1:
            raise ValueError(f"--users {self.users} is not possible; use a whole number of 1 or more")
        if not 0 <= self.document < self.context:
            raise ValueError(f"--document {self.document} is not possible; use 0 to {self.context - 1} tokens")


@dataclass(frozen=True)
class Plan:
    """What a method takes and gives for a demand on a GPU."""

    method: str
    weights: int
    user_bytes: int
    document_bytes: int
    total_bytes: int  # weights, document and all users
    users_that_fit: int
    tokens_per_s: float | None  # of all users together; None: they do not fit, or nothing is known of the speed


def shape_of(model: str) -> tuple[Any, int]:
    """The config of a model and the bytes of its weights.

    model: a config.json, a folder with one, a short name of `kvsketch models`, or a hub name, of which nothing but
    config.json is fetched.
    """
    path = Path(model).expanduser()
    known = next((card for card in CATALOG.values() if model.lower() in (card.name, card.hub_repo.lower())), None)
    if not path.exists() and known is None and not HUB_NAME.fullmatch(model):
        names = ", ".join(CATALOG)
        raise ValueError(f"--model {model} is no config.json, no folder with one, no hub name and none of {names}")
    # A wrong name is answered before this import, which takes seconds.
    from transformers import AutoConfig

    if path.exists():
        config = AutoConfig.from_pretrained(str(path))
        return config, weight_bytes(config)
    if known is not None:
        return _config_of_card(known), 2 * known.parameters
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"the config.json of --model {model} could not be fetched from the hub ({reason}); check the name and the "
            f"network, give a config.json, or use one of {', '.join(CATALOG)}"
        ) from error
    return config, weight_bytes(config)


def _config_of_card(card: ModelCard) -> Any:
    """What sizes need of a built-in model, from its card: nothing is fetched."""
    from transformers import AutoConfig

    sliding = {"sliding_window": card.window} if card.window else {}
    return AutoConfig.for_model(
        card.architecture, num_hidden_layers=card.layers, num_attention_heads=card.query_heads,
        num_key_value_heads=card.kv_heads, head_dim=card.head_dim, hidden_size=card.query_heads * card.head_dim,
        max_position_embeddings=card.context, dtype="bfloat16", **sliding,
    )  # fmt: skip


def weight_bytes(config: Any) -> int:
    """Bytes of the model's weights in its own dtype, without making them."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(config, "dtype", None) or torch.bfloat16)
    return sum(parameter.nbytes for parameter in model.parameters())


def plans(
    config: Any,
    methods: Sequence[str],
    demand: Demand,
    gpu: Gpu,
    speeds: dict[str, float],
    weights: int | None = None,
) -> list[Plan]:
    """What each method takes and gives. `weights`: their bytes, counted from the config unless given."""
    from kvsketch.cache.memory import sizes_of
    from kvsketch.methods import parse_method

    weights = weight_bytes(config) if weights is None else weights
    own = sizes_of(config, demand.context - demand.document)
    shared = sizes_of(config, demand.document) if demand.document else None
    result = []
    for method in (own.in_tokens(parse_method(text)) for text in methods):
        document = 0 if shared is None else _bytes(shared, method, 0)
        user = _bytes(own, method, None)
        free = gpu.memory * (1 - RESERVE) - weights - document
        fit = max(0, int(free // user))
        known, rate = speeds.get(_name(method)), None
        if known is not None and gpu.bandwidth is not None and fit >= demand.users:
            read = weights + demand.users * (user + document)
            rate = demand.users * known * gpu.bandwidth / H200 / read
        total = weights + document + demand.users * user
        result.append(Plan(str(method), weights, user, document, total, fit, rate))
    return result


def _bytes(sizes: Sizes, method: Method, more: int | None) -> int:
    held = sizes.bytes(method, more)
    if held is None:
        raise ValueError(f"{method}: its size is not bounded or not known; name another method")
    return held


def _name(method: Method) -> str:
    """The text form that records of speed have: without the budget and how the text is replayed."""
    return ":".join(part for part in str(method).split(":") if not part.startswith(("budget=", "replay=")))
