"""lm-eval with a compressed cache: the tasks of the Language Model Evaluation Harness through any method.

    python -m kvsketch.integrations.lm_eval --model kvsketch \
        --model_args model=smollm2-135m,method=snapkv:budget=25% --tasks gsm8k

All options are lm-eval's; importing this module registers the model name `kvsketch`. Model arguments beyond those of
lm-eval's `hf`: model (short name, folder, .gguf file or hub name), method, seed, loglikelihood.

Tasks that generate run through the cache. Tasks of log-likelihoods do not by themselves: lm-eval scores a text in one
forward, which reads no cache, so every method would get the score of the full cache. They are refused, unless
loglikelihood=split: then the context without its last token is read and compressed, and that token and the continuation
are fed one at a time, so that every scored token reads the compressed cache.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvsketch import models
from kvsketch.cache.compressed import CompressedCache
from kvsketch.compare.shared_prefill import Prefilled, shared_prefill
from kvsketch.defaults import SEED
from kvsketch.methods import parse_method
from kvsketch.models.identity import model_sha256

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError("this needs the package lm-eval: pip install 'kvsketch[lm-eval]'") from error

LOGLIKELIHOODS = ("refuse", "split")
REFUSED = (
    "a task of log-likelihoods is scored in one forward, which never reads a compressed cache: every method would get "
    "the score of the full cache; use tasks that generate, or model_args loglikelihood=split"
)
REFUSED_ROLLING = (
    "rolling log-likelihoods score all tokens of a window in one forward, which never reads a compressed cache; "
    "kvsketch eval perplexity measures perplexity through the cache"
)

Continuation = tuple[tuple[str, str], list[int], list[int]]  # texts, tokens of the context, tokens of the continuation


class Refused(ValueError):
    """A task whose score would say nothing about the cache, or a wrong model or method."""


class CompressedLM(HFLM):
    """lm-eval's Hugging Face model, with a CompressedCache of its own for each batch."""

    def __init__(
        self,
        model: str | None = None,
        method: str = "full",
        seed: int = SEED,
        loglikelihood: str = "refuse",
        pretrained: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        **options: Any,
    ) -> None:
        """model (or pretrained): short name, folder, .gguf file or hub name; options: those of lm-eval's `hf`."""
        if (model is None) == (pretrained is None):
            raise Refused("name the model once in model_args, such as model=smollm2-135m")
        if loglikelihood not in LOGLIKELIHOODS:
            raise Refused(f"unknown loglikelihood={loglikelihood!r}; choose one of: {', '.join(LOGLIKELIHOODS)}")
        options.pop("trust_remote_code", None)
        # lm-eval's command line asks for cuda:0 unless told otherwise, and takes the CPU where there is none.
        absent = str(device).startswith("cuda") and not torch.cuda.is_available()
        self.spec, self.seed, self.scoring = str(model or pretrained), int(seed), loglikelihood
        try:
            self.method = parse_method(str(method))
            loaded, tokenizer = models.load(
                self.spec, dtype=None if dtype == "auto" else dtype, device=None if absent else device
            )
        except (ValueError, OSError) as error:
            raise Refused(str(error)) from error
        super().__init__(pretrained=loaded, tokenizer=tokenizer, backend="causal", **options)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes about the model into its results, with the method added."""
        info = {"model_sha": model_sha256(self.spec), "method": str(self.method), "cache_seed": self.seed}
        return {**super().get_model_info(), **info, "loglikelihood": self.scoring}

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        cache = CompressedCache(self.model, self.method, seed=self.seed)
        return super()._model_generate(context, max_length, stop, past_key_values=cache, **options)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        if self.scoring == "refuse":
            raise Refused(REFUSED)
        return super().loglikelihood(requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise Refused(REFUSED_ROLLING)

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[Continuation], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Scores through the cache, one request after another; those with the same context share its prefill."""
        result: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda index: requests[index][1])
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for context, indices in itertools.groupby(order, key=lambda index: self._context(requests[index])):
                prefilled = shared_prefill(self.model, torch.tensor([context[:-1] or context]))
                for index in indices:
                    texts, _, continuation = requests[index]
                    result[index] = self._score(prefilled, context, continuation)
                    self.cache_hook.add_partial("loglikelihood", texts, result[index])
                    bar.update()
        return [result[index] for index in range(len(requests))]

    def _context(self, request: Continuation) -> list[int]:
        """The context, cut on its left where context and continuation together are longer than the model's."""
        _, context, continuation = request
        return context[max(0, len(context) + len(continuation) - self.max_length) :] or context[-1:]

    def _score(self, prefilled: Prefilled, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The log-probability of a continuation, and whether greedy decoding would give it."""
        cache = prefilled.cache(self.method, self.seed)
        # A context of one token has nothing before it to compress: the prefill itself predicts.
        predictions = [] if len(context) > 1 else [prefilled.logits]
        fed = [*context[1:][-1:], *continuation[:-1]]
        for token in fed:
            ids = torch.tensor([[token]], device=self.model.device)
            predictions.append(self.model(ids, past_key_values=cache, use_cache=True).logits[:, -1])
        log_probabilities = torch.cat(predictions).float().log_softmax(-1).cpu()
        wanted = torch.tensor(continuation)
        chosen = log_probabilities.gather(1, wanted[:, None])
        return float(chosen.sum()), bool((log_probabilities.argmax(-1) == wanted).all())


register_model("kvsketch")(CompressedLM)


def main() -> int:
    """lm-eval's command line, with the model `kvsketch` known."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
