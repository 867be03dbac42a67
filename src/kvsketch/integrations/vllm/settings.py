"""Which method vLLM runs, and what cannot be served there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvsketch.cache import rotary
from kvsketch.integrations.vllm import CONNECTOR
from kvsketch.integrations.vllm.kept_pages import KeptPages
from kvsketch.methods import parse_method, supporting
from kvsketch.methods.base import BudgetedMethod, Method
from kvsketch.methods.parameters import RANDOM
from kvsketch.methods.rehearse import LEARNED
from kvsketch.methods.waiting import WaitingMethod
from kvsketch.ops.codec import Codec
from kvsketch.slots.codes import UNQUANTISED
from kvsketch.slots.pages import CLOCK

KEY, HOST = "kvsketch", "kvsketch_host_gb"  # of vLLM's additional_config
EXAMPLE = """--additional-config '{"kvsketch": "h2o:budget=1024"}'"""
CONNECT = f"""--kv-transfer-config '{{"kv_connector": "{CONNECTOR}", "kv_role": "kv_both"}}'"""
SERVED = (*supporting("vllm"),)
BLOCK_SIZES = (16, 32, 64, 128, 256)  # of heads whose tokens lie in blocks
FIRST_KEYS = 8  # bits of the first layer's keys at least: fewer do most of the harm to qwen2.5-coder-0.5b
AUTOMATIC = {"automatic": True}  # of a connector that the plugin has added by itself
PART_FOR_PROMPTS = 0.125  # of the free memory, for prompts that are held whole while vLLM reads them in parts
PART_FOR_GRAPHS = 0.75  # of the free memory, that pages may take while vLLM measures its graphs


def chosen_method(additional_config: Any, model: Any = None) -> BudgetedMethod:
    """The method in vLLM's `additional_config`; ValueError, in one line, for one that cannot be served.

    model: the config of the model, for a share of bytes.
    """
    method = _named(additional_config)
    if isinstance(method, WaitingMethod) and method.bytes is not None and model is not None:
        # Late: the plugin starts without what caches of transformers need.
        from kvsketch.cache.memory import in_tokens

        method = in_tokens(method, model)
    served = servable(method)
    return served if model is None else _with_maps(served, model)


def _with_maps(method: BudgetedMethod, model: Any) -> BudgetedMethod:
    """The method with the maps that it names; ValueError, in one line, for those of a model of another shape."""
    if getattr(method, "replay", None) != LEARNED:
        return method
    from kvsketch.cache.replay.fitting import with_learned
    from kvsketch.cache.saving.model_identity import ModelIdentity

    learned = with_learned(method, ModelIdentity(model, model), None)
    assert isinstance(learned, BudgetedMethod)
    return learned


def refuse_maps(method: Method, parallel: Any) -> None:
    """Raises ValueError, in one line, for maps of heads that other processes have."""
    if getattr(method, "replay", None) == LEARNED and parallel.tensor_parallel_size > 1:
        raise ValueError(
            f"{method} cannot be served with tensor_parallel_size={parallel.tensor_parallel_size}: its maps are those "
            "of all heads; use tensor_parallel_size=1, or replay=virtual"
        )


def most_whole(longest: int, token: int, free: int | None) -> int:
    """Tokens of divided prompts that are held whole, `token` bytes each, of texts of at most `longest` tokens.

    Two prompts at once: vLLM begins one in the forward that ends another. free: bytes of the GPU; None: there is none.
    """
    return 2 * longest if free is None else min(2 * longest, int(PART_FOR_PROMPTS * free) // token)


def host_places(additional_config: Any, page: int) -> int:
    """Pages of `page` bytes that may lie in memory of the host; ValueError, in one line, for less than one."""
    given = additional_config.get(HOST, 0)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < float("inf"):
        raise ValueError(f"{HOST}={given!r} is no number of GB; use one such as 32, or 0 for no memory of the host")
    places = int(given * 1e9) // page
    if given and not places:
        raise ValueError(f"{HOST}={given} holds no page: one takes {page / 1e9:.3f} GB here; use at least that")
    return places


def refuse_host(config: Any, method: Method, connected: bool) -> None:
    """Raises ValueError, in one line, for memory of the host where no page is used again."""
    if not config.additional_config.get(HOST):
        return
    reason = ""
    if method.keeps_all:
        reason = f"{method} keeps its tokens in vLLM's blocks, and rehearse has pages; leave it out"
    elif not isinstance(method, WaitingMethod):
        reason = f"pages of {method.name} are not used again; use rehearse"
    elif not config.cache_config.enable_prefix_caching:
        reason = "without prefix caching no page is used again; drop --no-enable-prefix-caching"
    elif config.parallel_config.pipeline_parallel_size > 1:
        reason = "the processes of a pipeline have pages of different sizes; use --tensor-parallel-size"
    elif not connected:
        reason = f"several processes need a connector: add {CONNECT}; models with windows or linear attention have none"
    if reason:
        raise ValueError(f"{HOST}: {reason}")


def refuse_share(method: BudgetedMethod, connected: bool) -> None:
    """Raises ValueError, in one line, for a share of prompts whose length nobody tells."""
    if method.budget_size.share is not None and not connected:
        raise ValueError(
            f"{method} needs to know how long a prompt is, which several processes are told by a connector: add "
            f"{CONNECT}; beside layers with a window, or linear attention, use a number of tokens such as budget=1024"
        )


def keeps_all(additional_config: Any) -> bool:
    """Whether the method keeps every token, in vLLM's own blocks."""
    return _named(additional_config).keeps_all


def chosen_full(additional_config: Any) -> Method:
    """The method, if it quantises every token; ValueError, in one line, for one that does not."""
    method = _named(additional_config)
    if (reason := method.capabilities.vllm.reason) is not None:
        raise ValueError(f"{method} cannot be served by vLLM: {reason}, or drop --attention-backend CUSTOM")
    return method


def block_codecs(method: Method, layer: int, key_size: int, value_size: int) -> tuple[Codec, Codec]:
    """How a layer's keys and values are coded; ValueError for heads that no kernel serves."""
    for size in (key_size, value_size):
        if size not in BLOCK_SIZES:
            raise ValueError(
                f"{method} cannot serve heads of size {size} in vLLM, only {', '.join(map(str, BLOCK_SIZES))}; drop "
                "--attention-backend CUSTOM"
            )
    refuse_basis(method)
    keys, values = method.stored_bits.pair
    if layer == 0 and method.key_bits is None:
        keys = max(keys, FIRST_KEYS)
    return Codec(keys, key_size), Codec(values, value_size)


def refuse_block_size(cache: Any, tokens: int) -> None:
    """Raises ValueError, in one line, for a --block-size that is no whole number of our blocks."""
    if cache.user_specified_block_size and cache.block_size % tokens:
        raise ValueError(
            f"kvsketch cannot serve --block-size {cache.block_size}; leave it out, or use a multiple of {tokens}"
        )


def _named(additional_config: Any) -> Method:
    given = additional_config if isinstance(additional_config, Mapping) else {}
    for name in given:
        if str(name).startswith(KEY) and name not in (KEY, HOST):
            raise ValueError(f"--additional-config knows no {name!r} of kvsketch's; use {KEY}, {HOST}")
    text = given.get(KEY)
    if not text:
        raise ValueError(
            f"the attention backend CUSTOM is kvsketch's, and no method was named; add {EXAMPLE}; methods: "
            f"{', '.join(SERVED)}, full:bits=4"
        )
    return parse_method(text)


def servable(method: Method) -> BudgetedMethod:
    """The method, if a page of fixed size can hold what it stores."""
    if (reason := method.capabilities.vllm.reason) is not None:
        others = "" if method.name in SERVED else f"; use {', '.join(SERVED)}, full:bits=4, or kvsketch.generate"
        raise ValueError(f"{method.name} cannot be served by vLLM: {reason}{others}")
    assert isinstance(method, BudgetedMethod)
    return method


@dataclass(frozen=True)
class DocumentsRequest:
    """What the connector was asked for."""

    budget: int  # tokens of a document that each KV head keeps, on average
    count: int  # documents that memory is set aside for
    folder: str | None = None  # of the files that keep them

    @property
    def path(self) -> Path | None:
        return None if self.folder is None else Path(self.folder)


def documents_asked(config: Any) -> DocumentsRequest | None:
    """The documents that requests are to share; None: none. ValueError, in one line, for wrong settings."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return None
    if transfer.kv_connector_extra_config in ({}, None, AUTOMATIC):
        return None
    given = {"count": 4, **transfer.kv_connector_extra_config}
    for name in {"budget", "count"} | given.keys():
        value = given.get(name)
        if name not in (known := [field.name for field in fields(DocumentsRequest)]):
            raise ValueError(f"{CONNECTOR} knows no {name!r}; use {', '.join(known)}")
        if name == "folder":
            continue
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{CONNECTOR}: {name}={value!r} is no whole number of 1 or more")
    return DocumentsRequest(**given)


def turns_asked(config: Any, method: BudgetedMethod) -> KeptPages | None:
    """The pages of ended requests in which later ones go on; None: prefix caching is off, or the method cannot."""
    if not isinstance(method, WaitingMethod) or not config.cache_config.enable_prefix_caching:
        return None
    if method.budget_size.share is not None and method.recent_size.share is not None:
        return KeptPages(method.most_waiting, 0)
    return KeptPages(method.most_waiting, method.recent_size.of(method.budget_size.of(CLOCK)))


def document_method(method: BudgetedMethod, asked: DocumentsRequest) -> WaitingMethod:
    """The method that reads documents; ValueError for one that cannot share them."""
    if not isinstance(method, WaitingMethod):
        raise ValueError(f"{CONNECTOR} shares documents of rehearse, and {method.name} was named")
    return replace(method, budget=asked.budget)


def refuse_files(config: Any, asked: DocumentsRequest) -> None:
    """Raises ValueError, in one line, for files of documents that several processes would hold parts of."""
    processes = config.parallel_config.tensor_parallel_size * config.parallel_config.pipeline_parallel_size
    if asked.folder is not None and processes > 1:
        raise ValueError(f"{CONNECTOR}: files of documents are written by one process, not by {processes}; drop folder")


def refuse_shelf(config: Any) -> None:
    """Raises ValueError, in one line, for the connector beside layers that stay vLLM's own: its pages are blocks."""
    if config.kv_transfer_config is not None:
        raise ValueError(f"{CONNECTOR} serves models whose layers are all of full attention; drop it")


def refuse_bits(method: Method, size: int) -> None:
    """Raises ValueError, in one line, where heads of this size cannot be stored in the bits of the method."""
    refuse_basis(method)
    for bits in {*method.stored_bits.pair} - {UNQUANTISED}:
        Codec(bits, size)


def refuse_basis(method: Method) -> None:
    """Raises ValueError, in one line, for directions that were learned."""
    if method.basis != RANDOM:
        raise ValueError(f"{method} cannot be served in vLLM, which has no kernel for learned directions; drop basis")


def rotary_angles(method: Method, config: Any) -> tuple[float, ...]:
    """Radians per position of the model with this config; ValueError where they are not known."""
    angles = rotary.frequencies(config)
    if not angles:
        what = f"{method.name} rotates queries by the rotary angles of the model"
        raise ValueError(f"{what}, and {rotary.unknown(config, 'another method, such as snapkv')}")
    return angles


def rank_of(index: int, total: int, kinds: list[str] | None) -> tuple[int, int]:
    """The place of a layer among those of full attention, and how many those are; `kinds`: of all `total` layers."""
    full = [i for i, kind in enumerate(kinds or []) if kind == "full_attention"]
    return (full.index(index), len(full)) if index in full else (index, total)


def bound_captures(compilation: Any, request: int, free: int | None) -> None:
    """No step is captured for more requests than a part of the `free` bytes holds, `request` bytes each.

    To measure its graphs, vLLM allocates one page for each row of the largest of them. By default that is 512 rows:
    more pages than a GPU holds, and more than will ever run together. None: there is no GPU.
    """
    sizes = compilation.cudagraph_capture_sizes
    if not sizes or free is None:
        return
    most = int(PART_FOR_GRAPHS * free) // request
    fitting = [size for size in sizes if size <= most] or [min(sizes)]
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = fitting, max(fitting)


class Share(NamedTuple):
    """What layers of one kind take for one request."""

    layers: int
    nbytes: int


def one_request(method: str, tokens: int, pages: Share, others: Share) -> str:
    """How much memory the whole model takes for a request, in words."""
    total, size = pages.layers + others.layers, (pages.nbytes + others.nbytes) / 1e6
    told = f"kvsketch: {method} in {pages.layers} of {total} layers; a request of {tokens:,} tokens takes {size:.1f} MB"
    if not others.layers:
        return f"{told}, and so does a shorter one"
    return (
        f"{told} at most: {pages.nbytes / 1e6:.1f} MB in these layers, {others.nbytes / 1e6:.1f} MB in the other "
        f"{others.layers}, whose attention and cache are vLLM's own"
    )


def refuse_config(config: Any) -> None:
    """Raises ValueError, in one line, for an engine that asks for what a compressed page cannot give."""
    model, parallel = config.model_config, config.parallel_config
    asked = {
        "another KV connector than its own": (
            config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector != CONNECTOR
        ),
        "decode context parallel": parallel.decode_context_parallel_size > 1,
        "multi-head latent attention (MLA)": model.use_mla,
        "prefix caching (--no-enable-prefix-caching) beside linear attention": (
            model.is_hybrid and config.cache_config.enable_prefix_caching
        ),
        "chunked attention (attention_chunk_size)": bool(getattr(model.hf_text_config, "attention_chunk_size", None)),
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"kvsketch cannot serve {what} in vLLM; turn it off, or drop --attention-backend CUSTOM")


def refuse_drafts(config: Any, method: Method, connected: bool) -> None:
    """Raises ValueError, in one line, for drafts of tokens that a page cannot take back.

    Rejected tokens wait in a page of rehearse, and the next ones are written over them. Other methods rewrite their
    pages with each token. A draft model would need pages of its own.
    """
    drafts = config.speculative_config
    if drafts is None:
        return
    reason = ""
    if method.keeps_all:
        reason = "its steps read one token of a request; drop speculation, or use rehearse"
    elif not isinstance(method, WaitingMethod):
        reason = f"{method.name} changes its page with every token, and cannot take one back; use rehearse"
    elif drafts.method != "ngram":
        reason = f"a draft model ({drafts.method}) would need a cache of its own; use the method ngram"
    elif config.scheduler_config.async_scheduling:
        reason = "nobody knows in time which tokens were accepted; add --no-async-scheduling"
    elif not connected:
        reason = "that needs its connector, which runs in one process and without windows or linear attention"
    elif drafts.num_speculative_tokens > method.most_waiting // 8:
        reason = f"there is room for {method.most_waiting // 8} draft tokens; use fewer, or a larger wait"
    if reason:
        raise ValueError(f"kvsketch cannot serve this speculative decoding in vLLM: {reason}")


def refuse_windows(config: Any) -> None:
    """Raises ValueError, in one line, where layers with a sliding window cannot stay vLLM's own."""
    window = config.cache_config.sliding_window
    if window is not None:
        raise ValueError(
            f"kvsketch has nothing to compress: every layer of this model has a sliding window of {window} tokens; "
            "drop --attention-backend CUSTOM"
        )
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError(
            "kvsketch cannot serve sliding windows with pipeline parallel, where a process may have no other layers; "
            "use --tensor-parallel-size"
        )
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ValueError(
            "kvsketch cannot serve sliding windows where vLLM gives all layers blocks of one kind; leave out "
            "--disable-hybrid-kv-cache-manager and what turns it on"
        )


def refuse_pages(method: str, requests: int, page: int, free: int | None) -> None:
    """Raises ValueError, in one line, where a page for each of the `requests` takes too much of the `free` bytes.

    None: there is no GPU.
    """
    if free is not None and requests * page > PART_FOR_GRAPHS * free:
        fitting = int(PART_FOR_GRAPHS * free) // page
        raise ValueError(
            f"{method}: beside layers of vLLM's own every request that may run has its page from the start; "
            f"max_num_seqs={requests} pages of {page / 1e6:.1f} MB do not fit in {free / 1e9:.1f} GB; use a smaller "
            f"budget, or --max-num-seqs {fitting} or less"
        )


def refuse_layer(**given: Any) -> None:
    """Raises ValueError, in one line, for attention that is more than causal attention of queries to their own keys."""
    for name, value in given.items():
        if value is not None:
            advice = "leave out --kv-cache-dtype" if name == "kv_cache_dtype" else "use another attention backend"
            shown = value if isinstance(value, int | float | str) else "set"
            raise ValueError(f"kvsketch cannot serve a layer with {name}={shown} in vLLM; {advice}")
