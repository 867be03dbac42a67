"""A plugin for vLLM.

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"kvsketch": "h2o:budget=1024"}'

vLLM calls `register` in each of its processes. `settings` reads the method and refuses what cannot be served, `paged`
is attention over pages that hold one request each, `backend` is what vLLM asks of an attention backend, and `layers`
leaves layers with a sliding window to vLLM. `blocks` and `block_backend` are the same over vLLM's own token blocks, for
`full` in few bits; `chosen` decides between the two. `connector`, `library` and `shelf`: documents that requests share.
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

    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.chosen.ChosenBackend")
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, f"{__name__}.connector", CONNECTOR)
    if current_platform.is_cpu():
        # On a CPU vLLM asks for its own backend, whatever was chosen.
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.cpu.Backend")
