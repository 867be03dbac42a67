"""A server of a model that has maps: its `rehearse` is learned, in documents and rows alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("starlette", "prometheus_client", "uvicorn"):
    pytest.importorskip(package, reason="not installed: pip install 'kvsketch[serve]'")

from kvsketch import CompressedCache, models  # noqa: E402
from kvsketch.cache.replay import fitting  # noqa: E402
from kvsketch.methods.replay_map import ReplayMap  # noqa: E402
from kvsketch.serve import server  # noqa: E402
from tests.helpers.serving import settled  # noqa: E402
from tests.helpers.tiny import save_tiny_model  # noqa: E402

TEXT = "The harbour was rebuilt in 1921. Its second basin is 14 metres deep.\n" * 3
METHOD = "rehearse:budget=1/2:chunk=64:sinks=2:recent=4:wait=64"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def loaded(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model, which has maps, and its tokenizer."""
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path))
    model, tokenizer = models.load(folder, device="cpu", dtype="float32")
    torch.manual_seed(0)
    maps = ReplayMap(
        {layer: 0.1 * torch.randn(4, 18, 8) for layer in (0, 1)},
        {layer: 0.1 * torch.randn(2, 8, 1) for layer in (0, 1)},
    )
    identity = CompressedCache(model).identity.describe()
    fitting.save(fitting.default_path(identity), fitting.Learned(maps, None), identity)
    return model, tokenizer


def test_documents_of_learned_maps_lie_in_the_rows_of_a_server(loaded: Any, tmp_path: Path) -> None:
    service = server.start_service(
        *loaded, "tiny", f"{METHOD}:replay=auto", folder=tmp_path / "documents", rows=2, memory=50_000_000
    )
    try:
        assert "replay=learned" in str(service.method)
        document = settled(service.documents, service.documents.add(TEXT, method=METHOD).id)
        assert document.status == "ready" and document.method == str(service.method), document
        cache = service.documents.cache(document.id)
        assert cache.method == service.method and service.engine._shared.document_slots(cache) > 0
        written = service.documents.written
        assert written(METHOD) == str(service.method) != written(f"{METHOD}:replay=virtual")
    finally:
        service.close(drain=False)


def test_an_application_takes_maps_that_exist_and_fits_none(
    folder: str, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(server, "create_app", lambda service, **_: asked.append(service))
    options: dict[str, Any] = {"folder": tmp_path / "documents", "rows": 1, "device": "cpu", "dtype": "float32"}
    for method in (METHOD, f"{METHOD}:replay=virtual"):
        server.application(folder, method, **options)
        asked[-1].close(drain=False)
    assert ["replay=learned" in str(service.method) for service in asked] == [True, False]
    (fitted,) = (tmp_path / "maps").glob("*.safetensors")
    fitted.unlink()
    server.application(folder, METHOD, **options)
    asked[-1].close(drain=False)
    assert "learned" not in str(asked[-1].method) and not fitted.exists()
