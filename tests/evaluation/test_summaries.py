"""ROUGE of summaries: the measure, the prompt, beams, records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvsketch import models
from kvsketch.benchmark import records
from kvsketch.evaluation import summaries
from kvsketch.evaluation.summaries import encode, read_articles, rouge
from tiny import save_tiny_model

DATA = Path(__file__).parent.parent / "data" / "summaries.jsonl"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def command(tiny: Path, out: Path, *more: str) -> list[str]:
    line = ["--methods", "full,keyformer", "--budgets", "20%,50%", "--max-prompt", "200"]
    tokens = ["--min-new-tokens", "3", "--max-new-tokens", "5"]
    return ["--model", str(tiny), "--data", str(DATA), "--out", str(out), "--device", "cpu", *line, *tokens, *more]


def test_rouge_by_hand() -> None:
    pytest.importorskip("rouge_score")
    found = rouge("The states joined the union", "the union joined a state")
    # After stemming 4 of 5 words are shared, one pair of words of 4, and a subsequence of 2.
    assert found == pytest.approx({"rouge1": 0.8, "rouge2": 0.25, "rougeL": 0.4})
    assert rouge("", "the union") == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}


@pytest.mark.parametrize("form", summaries.FORMS)
def test_a_long_article_is_cut_at_its_end(tiny: Path, form: str) -> None:
    tokenizer: Any = models.load(tiny)[1]
    tokenizer.chat_template = "<user>{{ messages[0].content }}<answer>"
    article = read_articles(str(DATA), "article", "highlights")[0].text
    ids, cut = encode(tokenizer, article, form, "Summarize.", 150)
    text = tokenizer.decode(ids[0])
    before, after = summaries.prompt_parts(tokenizer, form, "Summarize.")
    assert cut and ids.shape[1] == 150 and text.startswith(before) and text.endswith(after)
    assert article.startswith(text.removeprefix(before).removesuffix(after))
    whole, cut = encode(tokenizer, article, form, "Summarize.", 10_000)
    assert not cut and tokenizer.decode(whole[0]) == before + article + after
    with pytest.raises(ValueError, match="--max-prompt 5 has no room"):
        encode(tokenizer, article, form, "Summarize.", 5)


def test_a_run_resumes_and_the_full_cache_is_the_models_own(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rouge_score")
    loads: list[Any] = []
    load = models.load
    monkeypatch.setattr(models, "load", lambda *a, **k: loads.append(a) or load(*a, **k))
    assert summaries.main(command(tiny, tmp_path, "--limit", "1")) == 0
    assert summaries.main(command(tiny, tmp_path, "--limit", "1")) == 0 and len(loads) == 1
    assert summaries.main(command(tiny, tmp_path, "--limit", "2")) == 0
    data = [record["data"] for record in records.read(tmp_path / "summaries.jsonl")]
    assert [(d["method"], d["budget"]) for d in data] == 2 * [("full", ""), ("keyformer", "20%"), ("keyformer", "50%")]
    assert [d["tokens_stored"] for d in data[1:3]] == [40, 100] and data[0]["prompt_tokens"] == 200
    model, tokenizer = load(tiny, device="cpu")
    article = read_articles(str(DATA), "article", "highlights")[0].text
    ids = encode(tokenizer, article, "alpaca", summaries.INSTRUCTION, 200)[0]
    own = model.generate(ids, do_sample=False, min_new_tokens=3, max_new_tokens=5)[0, 200:]
    assert data[0]["answer"] == tokenizer.decode(own, skip_special_tokens=True).strip()
    assert "rougeL" in capsys.readouterr().out


def test_beams(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    assert summaries.main(command(tiny, tmp_path, "--limit", "1", "--beams", "4")) == 0
    data = [record["data"] for record in records.read(tmp_path / "summaries.jsonl")]
    assert [d["beams"] for d in data] == [4, 4, 4] and not any("failed" in d for d in data)
    model, tokenizer = models.load(tiny, device="cpu")
    article = read_articles(str(DATA), "article", "highlights")[0].text
    ids = encode(tokenizer, article, "alpaca", summaries.INSTRUCTION, 200)[0]
    own = model.generate(ids, do_sample=False, num_beams=4, min_new_tokens=3, max_new_tokens=5)[0, 200:]
    assert data[0]["answer"] == tokenizer.decode(own, skip_special_tokens=True).strip()


def test_one_method_that_fails_leaves_the_others(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rouge_score")
    cache = summaries.CompressedCache

    def broken(model: Any, method: Any, **options: Any) -> Any:
        if "20%" in str(method):
            raise RuntimeError("no memory")
        return cache(model, method, **options)

    monkeypatch.setattr(summaries, "CompressedCache", broken)
    assert summaries.main(command(tiny, tmp_path, "--limit", "1")) == 0
    data = [record["data"] for record in records.read(tmp_path / "summaries.jsonl")]
    assert [d.get("failed") for d in data] == [None, "RuntimeError: no memory", None]


def test_errors_say_what_to_do(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"line 1 has no text 'body' but: article, highlights; .* --article-field"):
        read_articles(str(DATA), "body", "highlights")
    with pytest.raises(FileNotFoundError, match="--data nowhere is no file"):
        read_articles("nowhere", "article", "highlights")
    with pytest.raises(ValueError, match="--min-new-tokens 9 and --max-new-tokens 5"):
        summaries.main(command(tiny, tmp_path, "--min-new-tokens", "9"))
    with pytest.raises(ValueError, match="--beams 0"):
        summaries.main(command(tiny, tmp_path, "--beams", "0"))
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ImportError, match=r"needs the package rouge-score: pip install 'kvsketch\[eval\]'"):
        summaries.main(command(tiny, tmp_path))
    assert not (tmp_path / "summaries.jsonl").exists()
