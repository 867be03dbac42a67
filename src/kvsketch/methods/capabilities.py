"""What a method can do: each capability is supported, or has a reason why it is not.

A method declares them (`Method.declared`). Caches, engines, the vLLM plugin, `kvsketch methods` and the table of
docs/methods read them (`Method.capabilities`), and refuse with the reason.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvsketch.slots.codes import QuantBits


@dataclass(frozen=True)
class Support:
    """True where something is supported; else false, with the reason."""

    reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is None


def no(reason: str) -> Support:
    """Not supported, for this reason."""
    return Support(reason)


SUPPORTED = Support()
NOT_MEASURED = no("nothing was measured with it")


@dataclass(frozen=True)
class Capabilities:
    """What a method with its parameters can do; where it declares nothing, the reason stands here."""

    batched: Support = no("its tables have no fixed shape with rows of their own")
    documents: Support = no("what comes later changes what it keeps of a text")
    cache_positions: Support = NOT_MEASURED
    latent: Support = no("it reads or rewrites values apart from keys")
    shared_budget: Support = no("it has no scores that heads could compare")
    offload: Support = no("it drops tokens, so that there is nothing to recall")
    stream: Support = SUPPORTED
    memory: Support = no("what it holds grows beyond any budget or is not known")
    vllm: Support = no("its memory does not fit pages of one size")

    def named(self) -> dict[str, Support]:
        """Each by its name."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    def of_option(self, option: str) -> Support:
        """That which a parameter asks for; supported where it asks for none."""
        return self.named().get(OPTIONS.get(option, ""), SUPPORTED)

    def stored_in(self, bits: QuantBits) -> Capabilities:
        """The same for keys and values in so many bits."""
        if bits.keys == bits.values:
            return self
        keys = "auto" if bits.auto else bits.keys
        apart = no(f"key_bits={keys} and value_bits={bits.values} differ; use bits")
        result = dataclasses.replace(self, latent=self.latent and apart)
        if not bits.auto:
            return result
        chosen = "each prompt chooses the bits of its keys"
        return dataclasses.replace(
            result,
            batched=self.batched and no(f"{chosen}, and rows of one table have the same; use key_bits=8"),
            offload=self.offload and no(f"{chosen}; use bits=4"),
            vllm=self.vllm and no(f"{chosen}, and vLLM lays out its memory before; use bits=4 or bits=8"),
        )

    def along(self, basis: str) -> Capabilities:
        """The same for vectors rounded along learned directions."""
        latent, vllm = (
            no(f"basis={basis} knows no latents; use basis=random"),
            no("it rounds in random directions alone"),
        )
        return dataclasses.replace(self, latent=self.latent and latent, vllm=self.vllm and vllm)


OPTIONS = {
    "positions": "cache_positions",
    "share": "shared_budget",
    "offload": "offload",
}  # what asks for one
MEANINGS = {
    "batched": "requests of a server share tables and decode steps",
    "documents": "many texts continue one document (`cache.continued()`)",
    "cache_positions": "texts beyond the trained length (`positions=cache`)",
    "latent": "models with latent attention",
    "shared_budget": "heads share a budget (`share=layer`, `share=model`)",
    "offload": "keys and values in host memory (`offload=host`)",
    "stream": "prompts are read in parts (`prefill='stream'`)",
    "memory": "a budget from bytes (`memory='2GB'`)",
    "vllm": "the vLLM plugin",
}
