"""How many users a GPU holds, and how fast it answers them, before anything is loaded.

    users that fit = (memory * (1 - RESERVE) - weights - shared document) / bytes of one user's cache
    tokens/s       = users * speed / (weights + every user's cache and the document)

Bytes are what the methods promise for the shapes of the model (`cache.memory.Sizes`; `layer_bytes` for the methods of
ACCOUNTS). A step of many users reads the
weights once, and each user reads the document as well as what is its own. The speed is what our own steps read in a
second on an H200 (`advice.speeds`, from records), times the GPU's bandwidth over the H200's; a method without a record
has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsketch.byte_sizes import parsed
from kvsketch.layer_bytes import Account, ModelBytes
from kvsketch.models import config_file
from kvsketch.models.catalog import CATALOG, ModelCard
from kvsketch.models.loading import HUB_NAME

if TYPE_CHECKING:
    from kvsketch.cache.memory import Sizes
    from kvsketch.methods import Method

RESERVE = 0.1  # of the memory, for activations and workspace: what vLLM leaves free too
# What is sized unless other methods are asked for, and what these promise, so that nobody waits for torch.
ACCOUNTS = {
    "full": Account(),
    "full:bits=4": Account((4, 4)),
    "rehearse": Account((4, 4), 50, 512, 4),
    "rehearse:budget=40%": Account((4, 4), 40, 512, 4),
    "rehearse:budget=20%:replay=exact": Account((4, 4), 20, 512, 4),
}


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


@dataclass(frozen=True)
class SizedModel:
    """A model as far as its sizes depend on it."""

    weights: int  # bytes
    config: Callable[[], Any]  # that of transformers, whose import takes seconds
    shape: ModelBytes | None = None  # after any number of tokens, where it is known without transformers

    @classmethod
    def of(cls, config: Any) -> SizedModel:
        return cls(weight_bytes(config), lambda: config)


def model_of(name: str) -> SizedModel:
    """A model by a config.json, a folder with one, a short name of `kvsketch models`, or a hub name, of which nothing
    but config.json is fetched.
    """
    path = Path(name).expanduser()
    known = next((card for card in CATALOG.values() if name.lower() in (card.name, card.hub_repo.lower())), None)
    if path.exists():
        return _of_file(path / "config.json" if path.is_dir() else path)
    if known is not None:
        return SizedModel(2 * known.parameters, lambda: _config_of_card(known), _shape_of_card(known))
    if not HUB_NAME.fullmatch(name):
        names = ", ".join(CATALOG)
        raise ValueError(f"--model {name} is no config.json, no folder with one, no hub name and none of {names}")
    import huggingface_hub

    try:
        fetched = huggingface_hub.hf_hub_download(name, "config.json")
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"the config.json of --model {name} could not be fetched from the hub ({reason}); check the name and the "
            f"network, give a config.json, or use one of {', '.join(CATALOG)}"
        ) from error
    return _of_file(Path(fetched))


def _of_file(path: Path) -> SizedModel:
    if not path.is_file():
        raise ValueError(f"--model {path.parent} has no config.json; name a folder that has one")

    def config() -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(str(path), trust_remote_code=False)

    known = config_file.read(path)
    return SizedModel.of(config()) if known is None else SizedModel(known.weights, config, known.shape)


def _shape_of_card(card: ModelCard) -> ModelBytes:
    windows = (card.window,) * (card.layers - card.growing_layers) if card.window else ()
    return ModelBytes(1, 1, card.kv_heads, card.query_heads, card.head_dim, 2, card.growing_layers, windows)


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
    model: SizedModel, methods: Sequence[str], demand: Demand, gpu: Gpu, speeds: Mapping[str, float]
) -> list[Plan]:
    """What each method takes and gives."""
    result = []
    for method, document, user in _bytes_of(model, methods, demand):
        free = gpu.memory * (1 - RESERVE) - model.weights - document
        fit = max(0, int(free // user))
        known, rate = speeds.get(_name(method)), None
        if known is not None and gpu.bandwidth is not None and fit >= demand.users:
            read = model.weights + demand.users * (user + document)
            rate = demand.users * known * gpu.bandwidth / H200 / read
        total = model.weights + document + demand.users * user
        result.append(Plan(method, model.weights, user, document, total, fit, rate))
    return result


def _bytes_of(model: SizedModel, methods: Sequence[str], demand: Demand) -> Iterator[tuple[str, int, int]]:
    """Each method with its bytes of the document, and of one user."""
    alone = demand.context - demand.document
    if model.shape is not None and all(text in ACCOUNTS for text in methods):
        for text in methods:
            account, shape = ACCOUNTS[text], model.shape
            document = account.bytes(replace(shape, context=demand.document), 0) if demand.document else 0
            yield text, document, account.bytes(replace(shape, context=alone))
        return
    from kvsketch.cache.memory import sizes_of
    from kvsketch.methods import parse_method

    config = model.config()
    own = sizes_of(config, alone)
    shared = sizes_of(config, demand.document) if demand.document else None
    for method in (own.in_tokens(parse_method(text)) for text in methods):
        document = 0 if shared is None else _bytes(shared, method, 0)
        yield str(method), document, _bytes(own, method, None)


def _bytes(sizes: Sizes, method: Method, more: int | None) -> int:
    held = sizes.bytes(method, more)
    if held is None:
        raise ValueError(f"{method}: its size is not bounded or not known; name another method")
    return held


def _name(method: str) -> str:
    """The text form that records of speed have: without the budget and how the text is replayed."""
    return ":".join(part for part in method.split(":") if not part.startswith(("budget=", "replay=")))
