import datasets
import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Converted copies go to the test's folder, and nothing is asked of the network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
