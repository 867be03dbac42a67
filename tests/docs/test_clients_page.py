"""The code of docs/clients.md runs against a server, for the clients that are installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny import save_tiny_model

for package in ("starlette", "prometheus_client", "uvicorn", "openai", "llguidance"):
    pytest.importorskip(package, reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch.serve.server import Server, start_service  # noqa: E402
from tests.helpers.serving import started  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
CODE = dict(re.findall(r"^## (\S+)\n\n```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
TOLD = {
    "openai": "'full_bytes'", "anthropic": "get_weather", "langchain-openai": "'City'",
    "langchain-anthropic": "get_weather", "openai-agents": "'tool_call_output_item'",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model.config.max_position_embeddings = 2**20
    # Random weights write for ever: this one ends an answer as soon as it may, or else a string.
    bonus = torch.zeros(len(tokenizer))
    bonus[[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids('"')]] = torch.tensor([1000.0, 500.0])
    model.lm_head.register_forward_hook(lambda module, given, logits: logits + bonus)
    service = start_service(model, tokenizer, "tiny", "full", folder=tmp_path_factory.mktemp("documents"), rows=1)
    with started(made := Server(service)):
        yield made


def test_the_page_has_code_for_each_client() -> None:
    assert list(CODE) == list(TOLD)


@pytest.mark.parametrize("name", CODE)
def test_the_code_of_a_client_runs(name: str, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    module = "agents" if name == "openai-agents" else name.replace("-", "_")
    pytest.importorskip(module, reason=f"not installed: pip install {name}")
    code = CODE[name].replace("http://127.0.0.1:8000", server.address).replace("qwen2.5-coder-0.5b", "tiny")
    code = re.sub(r"max_tokens=\d+", "max_tokens=600", code)  # its tokens are bytes
    exec(compile(code, name, "exec"), {"__name__": name})
    assert TOLD[name] in capsys.readouterr().out
