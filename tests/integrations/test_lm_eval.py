"""The lm-eval model: generation through the cache, log-likelihoods refused or split, lm-eval's command line."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch import CompressedCache, models
from tests.helpers.tiny import save_tiny_model

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from kvsketch.integrations import lm_eval as adapter

TEXT = "The welfare of our country is the great object to which our cares and efforts ought to be directed."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def build(tiny: Path, **options: Any) -> Any:
    return get_model("kvsketch")(model=str(tiny), device="cpu", **options)


def asked(kind: Any, *requests: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=r, idx=i) for i, r in enumerate(requests)]


def generated(lm: Any, *texts: str) -> list[str]:
    result: list[str] = lm.generate_until(
        asked("generate_until", *((t, {"until": [], "max_gen_toks": 8}) for t in texts))
    )
    return result


def test_generation_goes_through_the_cache(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[Any] = []
    make = adapter.CompressedCache
    monkeypatch.setattr(adapter, "CompressedCache", lambda *a, **k: caches.append(make(*a, **k)) or caches[-1])
    lm = build(tiny, method="streamingllm:budget=25%", batch_size=2)
    texts = [TEXT, "Knowledge is in every country the surest basis of happiness."]
    batched = generated(lm, *texts)
    assert [cache.tokens_seen for cache in caches] == [len(TEXT) + 7]
    assert caches[0].tokens_stored == len(TEXT) // 4
    assert batched == [generated(lm, text)[0] for text in texts], "a row alone is a row in a padded batch"
    for text, answer in zip(texts, batched, strict=True):
        model, tokenizer = models.load(tiny, device="cpu")
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        cache = CompressedCache(model, "streamingllm:budget=25%")
        own = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert answer == tokenizer.decode(own, skip_special_tokens=True)
    assert generated(build(tiny, method="full"), TEXT) != batched[:1]


def test_log_likelihoods_are_refused(tiny: Path) -> None:
    lm = build(tiny, method="snapkv:budget=25%")
    with pytest.raises(
        adapter.Refused, match=r"one forward, which never reads a compressed cache.*loglikelihood=split"
    ):
        lm.loglikelihood(asked("loglikelihood", (TEXT, " directed")))
    for scoring in adapter.LOGLIKELIHOODS:
        lm.scoring = scoring
        with pytest.raises(adapter.Refused, match="kvsketch eval perplexity"):
            lm.loglikelihood_rolling(asked("loglikelihood_rolling", (TEXT,)))


def test_split_scores_with_the_full_cache_are_lm_evals_own(tiny: Path) -> None:
    requests = asked("loglikelihood", (TEXT, " yes"), (TEXT, " no"), ("", "peace"), ("A", "b"), (TEXT[:40], "!"))
    result = build(tiny, method="full", loglikelihood="split").loglikelihood(requests, disable_tqdm=True)
    model, tokenizer = models.load(tiny, device="cpu")
    theirs = get_model("hf")(pretrained=model, tokenizer=tokenizer).loglikelihood(requests, disable_tqdm=True)
    for (ours, greedy), (expected, their_greedy) in zip(result, theirs, strict=True):
        assert ours == pytest.approx(expected, abs=1e-4) and greedy == their_greedy


def test_split_scores_read_the_compressed_cache(tiny: Path) -> None:
    request = asked("loglikelihood", (TEXT, "!"))
    full = build(tiny, method="full", loglikelihood="split").loglikelihood(request, disable_tqdm=True)
    lm = build(tiny, method="streamingllm:budget=8", loglikelihood="split")
    result = lm.loglikelihood(request, disable_tqdm=True)
    assert abs(result[0][0] - full[0][0]) > 1e-3, "a single token of continuation reads the cache too"
    ids = torch.tensor([lm.tok_encode(TEXT)])
    cache = CompressedCache(lm.model, "streamingllm:budget=8")
    lm.model(ids[:, :-1], past_key_values=cache)
    logits = lm.model(ids[:, -1:], past_key_values=cache).logits[0, -1]
    assert result[0][0] == pytest.approx(float(logits.log_softmax(-1)[lm.tok_encode("!")[0]]), abs=1e-5)


def test_a_context_too_long_is_cut_on_its_left(tiny: Path) -> None:
    lm = build(tiny, method="full", loglikelihood="split", max_length=20)
    cut = lm.loglikelihood(asked("loglikelihood", (TEXT, "abc"), (TEXT[-17:], "abc")), disable_tqdm=True)
    assert cut[0] == cut[1]


def test_arguments_that_cannot_be(tiny: Path) -> None:
    with pytest.raises(ValueError, match="name the model once"):
        adapter.CompressedLM()
    with pytest.raises(ValueError, match="name the model once"):
        build(tiny, pretrained=str(tiny))
    with pytest.raises(ValueError, match="loglikelihood='yes'; choose one of: refuse, split"):
        build(tiny, loglikelihood="yes")
    with pytest.raises(adapter.Refused, match="unknown method 'snap'"):
        build(tiny, method="snap")
    with pytest.raises(adapter.Refused, match="unknown dtype 'half'"):
        build(tiny, dtype="half")


def write_task(folder: Path) -> None:
    """A task of lm-eval with its documents in a file beside it."""
    (folder / "rows.jsonl").write_text("".join(json.dumps({"q": TEXT, "a": a}) + "\n" for a in ("x", "y")))
    (folder / "task.yaml").write_text(
        "task: kvsketch_local\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {json.dumps(str(folder / 'rows.jsonl'))}}}}}\n"
        "test_split: test\n"
        "output_type: generate_until\n"
        "doc_to_text: '{{q}}'\n"
        "doc_to_target: '{{a}}'\n"
        "generation_kwargs: {until: [], max_gen_toks: 4}\n"
        "metric_list: [{metric: exact_match}]\n"
    )


def test_lm_evals_command_line(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.tasks import TaskManager

    write_task(tmp_path)
    # lm-eval reads the thousands of files of its own tasks first, which takes ten seconds.
    monkeypatch.setattr(TaskManager, "__init__", functools.partialmethod(TaskManager.__init__, include_defaults=False))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    line = ["lm_eval", "--model", "kvsketch", "--include_path", str(tmp_path), "--tasks"]
    line += ["kvsketch_local", "--model_args", f"model={tiny},method=snapkv:budget=25%", "--output_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", line)
    assert adapter.main() == 0
    assert "kvsketch_local" in capsys.readouterr().out
    results = json.loads(next(tmp_path.glob("**/results_*.json")).read_text())
    assert results["config"]["method"].startswith("snapkv:budget=25%") and len(results["config"]["model_sha"]) == 64
    assert results["results"]["kvsketch_local"]["sample_len"] == 2


def test_a_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise adapter.Refused(adapter.REFUSED)

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", refuse)
    assert adapter.main() == 2
    assert capsys.readouterr().err == f"error: {adapter.REFUSED}\n"
