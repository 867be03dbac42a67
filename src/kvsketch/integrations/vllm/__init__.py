"""A plugin for vLLM.

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"kvsketch": "h2o:budget=1024"}'

vLLM calls `register` in each of its processes.

settings.py        the method, and what cannot be served
chosen.py          pages of our own, or vLLM's blocks
cpu.py             the same on a CPU
backend.py         what vLLM asks of an attention backend
paged.py           attention over pages that hold one request each
recorded.py        single tokens beside prompts, whose work a GPU replays
joint_layers.py    the same for layers that decide together what stays
behind.py          new tokens behind what pages hold
divided.py         prompts that vLLM reads in several forwards
causal.py          whole prompts: by vLLM's flash attention where it is faster
page_map.py        pages outside of vLLM's pool, and whose they are
kept_pages.py      pages of ended requests, in which later ones go on
host_pages.py      those pages in memory of the host, when vLLM needs them
layers.py          layers with a sliding window stay vLLM's own
blocks.py          quantised tokens in vLLM's own blocks, for `full`
block_backend.py   their attention backend
connector.py       documents that requests share, as vLLM's KV connector
document_index.py  which documents there are
document_pool.py   where they lie on the device
files.py           documents as files
counts.py          what is counted of the work on pages
metrics.py         these counts in vLLM's log and its /metrics
"""

from __future__ import annotations

import warnings

from packaging.version import Version

CONNECTOR = "KVSketchDocuments"  # documents that requests share (`connector`)
OLDEST = "0.29"  # the first that keeps one block per request and lets a backend say what it stores


def register() -> None:
    """Makes kvsketch vLLM's attention backend CUSTOM; nothing else changes."""
    import vllm

    if Version(vllm.__version__) < Version(OLDEST):
        warnings.warn(
            f"kvsketch serves vLLM {OLDEST} or newer, and this is {vllm.__version__}: --attention-backend CUSTOM is "
            f"not there; pip install 'vllm>={OLDEST}'",
            stacklevel=2,
        )
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    slot, own = AttentionBackendEnum.CUSTOM, f"{__name__}.chosen.ChosenBackend"
    if slot.is_overridden() and slot.get_path() != own:
        warnings.warn(
            f"vLLM has one attention backend CUSTOM, which was {slot.get_path()} and is kvsketch's now; set "
            "VLLM_PLUGINS to the name of the plugin that you want",
            stacklevel=2,
        )
    register_backend(slot, own)
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, f"{__name__}.connector", CONNECTOR)
    if current_platform.is_cpu():
        # On a CPU vLLM asks for its own backend, whatever was chosen.
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.cpu.Backend")
