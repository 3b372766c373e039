"""The identity of weights: equal for equal weights, other for others, and cheap the second time."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import ConfigError, LayoutError
from kvtide.index import weights_identity
from kvtide.index.weights_identity import SAMPLES, identify
from tests.weights import from_parameters

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Floats = npt.NDArray[np.float32]


class Reads:
    """The names of the files that were read, since the last look."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def take(self) -> list[str]:
        names, self.names = sorted(self.names), []
        return names


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "weights.json"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Counts files read, and lets the cache keep stamps of files as young as a test's."""
    real, seen = weights_identity._read, Reads()

    def counted(file: Path) -> tuple[tuple[int, int, int, int], str]:
        seen.names.append(file.name)
        return real(file)

    monkeypatch.setattr(weights_identity, "_read", counted)
    monkeypatch.setattr(weights_identity, "_SETTLED_NS", -(10**18))
    return seen


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "more").mkdir(parents=True)
    (folder / "a.safetensors").write_bytes(b"A" * 5000)
    (folder / "b.safetensors").write_bytes(b"B" * 5000)
    (folder / "more" / "c.bin").write_bytes(b"C" * 10)
    (folder / "config.json").write_text("{}")
    return folder


def rewrite(file: Path, content: bytes) -> None:
    """New content in the same file, of the same size, with the old mtime put back."""
    before = file.stat()
    assert before.st_size == len(content)
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # until the clock's next tick
        file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_given_name_wins(model: Path) -> None:
    assert identify(model, weights_id="mine-7") == "given:mine-7"
    for bad in ("", "  ", "a\nb"):
        with pytest.raises(ConfigError, match="weights_id is"):
            identify(model, weights_id=bad)


def test_nothing_to_go_by(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give their path, or a weights_id"):
        identify()
    with pytest.raises(ConfigError, match="no weights at meta-llama/Llama"):
        identify("meta-llama/Llama", cache=None)
    with pytest.raises(LayoutError, match=r"no \.safetensors, .* under"):
        identify(tmp_path, cache=None)


def test_files_are_told_by_names_and_contents(model: Path, tmp_path: Path) -> None:
    first = identify(model, cache=None)
    assert first.startswith("files:")
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "config.json").write_text('{"other": 1}')
    assert identify(copy, cache=None) == first
    (copy / "more" / "c.bin").write_bytes(b"c" * 10)
    changed = identify(copy, cache=None)
    (copy / "more" / "c.bin").rename(copy / "c.bin")
    assert len({first, changed, identify(copy, cache=None)}) == 3


def test_swapped_names_are_other_weights(model: Path) -> None:
    first = identify(model, cache=None)
    (model / "a.safetensors").rename(model / "x")
    (model / "b.safetensors").rename(model / "a.safetensors")
    (model / "x").rename(model / "b.safetensors")
    assert identify(model, cache=None) != first


def test_one_file_whatever_its_name(model: Path, tmp_path: Path) -> None:
    copy = shutil.copy(model / "a.safetensors", tmp_path / "renamed.weights")
    assert identify(copy, cache=None) == identify(model / "a.safetensors", cache=None)
    assert identify(copy, cache=None) != identify(model / "b.safetensors", cache=None)


def test_linked_folders_count_and_loops_end(model: Path, tmp_path: Path) -> None:
    first = identify(model, cache=None)
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "d.pt").write_bytes(b"D")
    (model / "link").symlink_to(tmp_path / "apart")
    (model / "loop").symlink_to(model)
    assert identify(model, cache=None) != first


def test_a_dangling_shard_is_a_clear_error(model: Path) -> None:
    (model / "gone.safetensors").symlink_to(model / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot be read: .*gone\.safetensors"):
        identify(model, cache=None)


def test_the_second_time_nothing_is_read(model: Path, cache: Path, reads: Reads) -> None:
    first = identify(model, cache=cache)
    assert reads.take() == ["a.safetensors", "b.safetensors", "c.bin"]
    assert identify(model, cache=cache) == first
    assert reads.take() == []
    assert [file.name for file in cache.parent.iterdir()] == [cache.name]


def test_only_the_changed_file_is_read_again(model: Path, cache: Path, reads: Reads) -> None:
    first = identify(model, cache=cache)
    reads.take()
    (model / "b.safetensors").write_bytes(b"longer" * 5000)
    assert identify(model, cache=cache) != first
    assert reads.take() == ["b.safetensors"]


def test_rewritten_in_place_with_its_mtime_put_back(model: Path, cache: Path, reads: Reads) -> None:
    first = identify(model, cache=cache)
    rewrite(model / "a.safetensors", b"X" * 5000)
    assert identify(model, cache=cache) != first


def test_replaced_by_a_file_of_the_same_size_and_mtime(model: Path, cache: Path, reads: Reads) -> None:
    first = identify(model, cache=cache)
    old = (model / "a.safetensors").stat()
    (model / "new").write_bytes(b"X" * 5000)
    os.utime(model / "new", ns=(old.st_atime_ns, old.st_mtime_ns))
    (model / "new").replace(model / "a.safetensors")
    assert identify(model, cache=cache) != first


def test_a_young_file_is_not_remembered(model: Path, cache: Path) -> None:
    identify(model, cache=cache)
    assert not cache.exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b"[]", b'{"/x": 3}', b'{"/x": [[1], ""]}'])
def test_a_damaged_cache_is_replaced(model: Path, cache: Path, reads: Reads, damage: bytes) -> None:
    first = identify(model, cache=cache)
    cache.write_bytes(damage)
    reads.take()
    assert identify(model, cache=cache) == first
    assert len(reads.take()) == 3
    assert identify(model, cache=cache) == first
    assert reads.take() == []


def test_writers_keep_each_others_entries(
    model: Path, cache: Path, reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    load, loads = weights_identity._load, iter([True])

    def while_another_saves(place: Path | None) -> object:
        found = load(place)
        if next(loads, False):  # between our load and our save
            identify(other, cache=cache)
        return found

    monkeypatch.setattr(weights_identity, "_load", while_another_saves)
    identify(model, cache=cache)
    reads.take()
    identify(model, cache=cache)
    identify(other, cache=cache)
    assert reads.take() == []


def test_a_cache_that_cannot_be_written_is_only_slower(
    model: Path, tmp_path: Path, reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        found = identify(model, cache=tmp_path / "file" / "weights.json")
    assert found == identify(model, cache=None)
    assert "are not kept in" in caplog.text


def test_the_default_cache_is_in_the_users_cache_folder(
    model: Path, tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    identify(model)
    assert (tmp_path / "xdg" / "kvtide" / "weights.json").is_file()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    identify(model)
    assert (tmp_path / "home" / ".cache" / "kvtide" / "weights.json").is_file()


def test_a_file_that_changes_while_it_is_read(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Meddling:
        AUTO = blake3.AUTO

        def __init__(self, max_threads: int = 1) -> None:
            self.hasher = blake3(max_threads=max_threads)

        def update(self, data: memoryview) -> None:
            self.hasher.update(data)
            with (model / "a.safetensors").open("ab") as file:
                file.truncate(4000)

        def hexdigest(self) -> str:
            return self.hasher.hexdigest()

    monkeypatch.setattr(weights_identity, "blake3", Meddling)
    with pytest.raises(ConfigError, match=r"a\.safetensors changed while it was read"):
        identify(model, cache=cache)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    repo = tmp_path / "hub" / "models--org--name"
    folder = repo / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for name in ("q4.gguf", "q8.gguf"):
        (repo / "blobs" / f"blob-of-{name}").write_bytes(name.encode())
        (folder / name).symlink_to(f"../../blobs/blob-of-{name}")
    return folder


def test_a_hub_snapshot_is_its_commit(snapshot: Path, tmp_path: Path, reads: Reads) -> None:
    assert identify(snapshot, cache=None) == f"hub:{COMMIT}"
    (tmp_path / "link").symlink_to(snapshot)
    assert identify(tmp_path / "link", cache=None) == f"hub:{COMMIT}"
    assert reads.take() == []


def test_files_of_one_commit_are_told_apart(snapshot: Path) -> None:
    assert identify(snapshot / "q4.gguf", cache=None) == f"hub:{COMMIT}/q4.gguf"
    assert identify(snapshot / "q8.gguf", cache=None) == f"hub:{COMMIT}/q8.gguf"


def test_a_snapshot_with_a_file_put_in_is_read(snapshot: Path) -> None:
    (snapshot / "q4.gguf").unlink()
    (snapshot / "q4.gguf").write_bytes(b"tuned")
    assert identify(snapshot, cache=None).startswith("files:")


def test_a_folder_that_only_looks_like_a_snapshot_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"W")
    assert identify(folder, cache=None).startswith("files:")


def parameters() -> dict[str, Floats]:
    random = np.random.default_rng(7)
    shapes = {"embed": (1000, 64), "layer.q": (64, 64), "layer.norm": (64,), "scale": ()}
    return {name: random.standard_normal(s, np.float32) for name, s in shapes.items()}


def test_parameters_are_told_by_what_they_hold_not_how() -> None:
    model = parameters()
    first = from_parameters(model.items())
    assert first.startswith("memory:")
    assert from_parameters(reversed(model.items())) == first
    fortran = {name: array.copy(order="F") for name, array in model.items()}
    assert from_parameters(fortran.items()) == first
    strided = np.repeat(model["embed"], 2, axis=1)[:, ::2]
    assert from_parameters((model | {"embed": strided}).items()) == first


@pytest.mark.parametrize("name", ["embed", "layer.q", "layer.norm", "scale"])
def test_a_step_of_training_on_one_parameter_is_noticed(name: str) -> None:
    model = parameters()
    first = from_parameters(model.items())
    model[name] = model[name] * np.float32(1.001)
    assert from_parameters(model.items()) != first


def test_a_step_that_rounding_keeps_from_most_elements_is_noticed() -> None:
    model = parameters()
    first = from_parameters(model.items())
    touched = np.random.default_rng(8).random(model["embed"].shape) < 0.01
    model["embed"] = np.where(touched, model["embed"] + 1, model["embed"])
    assert from_parameters(model.items()) != first


def test_name_dtype_and_shape_count() -> None:
    array = np.zeros((4, 6), np.float32)
    forms = [("a", array), ("b", array), ("a", array.reshape(6, 4)), ("a", array.view(np.int32))]
    assert len({from_parameters([form]) for form in forms}) == len(forms)
    assert from_parameters([("empty", np.zeros(0))]).startswith("memory:")


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(LayoutError, match="no parameters"):
        from_parameters([])
    with pytest.raises(LayoutError, match="'a' is there twice"):
        from_parameters([("a", np.zeros(1)), ("a", np.ones(1))])


@given(st.integers(0, 3 * SAMPLES) | st.integers(0, 1 << 40))
def test_samples_are_spread_over_all_of_it(size: int) -> None:
    places = weights_identity.places(size)
    assert len(places) == min(size, SAMPLES)
    if size:
        assert (places[0], places[-1]) == (0, size - 1)
        assert (np.diff(places) > 0).all()
        assert np.diff(places).max(initial=0) <= 2 * -(-size // SAMPLES)
