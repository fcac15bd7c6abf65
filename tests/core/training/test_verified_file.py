"""Files of which every byte is verified: what is written comes back or is refused, and nothing else is touched."""

import errno
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save, save_file

from shardpass.core.ranks import Blocks, TensorInfo, header_of, places_in, tensor_digest
from shardpass.core.training import read_verified, write_verified
from shardpass.errors import InternalError
from shardpass.testing import LiveBytes

TEXT = '{"epoch": 3, "name": "Grüße"}'


def tensors():
    """Parts of other tensors, tensors that share memory, transposed, empty, of one number, and of several dtypes."""
    table = torch.arange(12.0).view(3, 4)
    shared = torch.arange(5)
    return {
        "whole": table,
        "the same": table.view(4, 3),
        "transposed": table.t(),
        "part": table[1:, ::2],
        "one": shared,
        "as one": shared,
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def test_what_is_written_comes_back(tmp_path):
    write_verified(tmp_path / "new" / "folder" / "a", tensors(), TEXT)
    text, found = read_verified(tmp_path / "new" / "folder" / "a")
    assert text == TEXT and found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
    assert os.listdir(tmp_path / "new" / "folder") == ["a"]
    write_verified(tmp_path / "new" / "folder" / "a", {"other": torch.ones(1)})
    assert read_verified(tmp_path / "new" / "folder" / "a") == ("", {"other": torch.ones(1)})


def test_a_tensor_is_not_copied_to_be_written(tmp_path):
    rows = torch.ones(1000)
    with LiveBytes() as live:
        write_verified(tmp_path / "a", {"rows": rows, "part": rows[500:]})
    assert live.peak == rows.nbytes


def test_rows_are_written_block_by_block(tmp_path):
    rows = torch.arange(12.0).view(6, 2)
    write_verified(tmp_path / "a", {"rows": Blocks(rows.dtype, (6, 2), iter(rows.split(4)))}, TEXT)
    write_verified(tmp_path / "b", {"rows": rows}, TEXT)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with pytest.raises(InternalError, match=r"tmp: wrote 32 bytes of 'rows', announced 48$"):
        write_verified(tmp_path / "c", {"rows": Blocks(rows.dtype, (6, 2), [rows[:4]])})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("length", range(8))
def test_the_header_is_that_of_the_library(length):
    """Tensors begin at multiples of their items, whatever the length of the header."""
    flags = "flags" + "s" * length
    tensors = {flags: torch.ones(3).bool(), "wide": torch.ones(2, 1).double()}
    header, size = header_of({name: Blocks.of(tensor) for name, tensor in tensors.items()}, {"text": "t"})
    saved = save(tensors, {"text": "t"})
    assert saved.startswith(header) and size == len(saved) and len(header) % 8 == 0
    wide, bits = TensorInfo(torch.float64, (2, 1)), TensorInfo(torch.bool, (3,))
    assert places_in(header) == {"wide": (wide, len(header)), flags: (bits, len(header) + 16)}


def test_the_file_is_that_of_earlier_releases(tmp_path):
    write_verified(tmp_path / "a", {"b": torch.arange(3), "a": torch.ones(2, 2)}, "text")
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata() == {
            "shardpass": "text",
            "checksum": "d4f85f3c390e8eba9bec639b3849b2cb6f79f43333552b32e350b625e1f9b842",
        }
    assert tensor_digest(torch.arange(3)[::2]) == tensor_digest(torch.tensor([0, 2]))
    assert tensor_digest(torch.arange(3)[::2]) == tensor_digest(torch.tensor([[0], [2]]))
    assert tensor_digest(torch.zeros(1)) == "df3f619804a92fdb4057192dc43dd748ea778adc52bc498ce80524c014b81119"


def test_every_flipped_bit_is_noticed(tmp_path):
    write_verified(tmp_path / "a", {"rows": torch.arange(4.0), "ids": torch.arange(2)}, "text")
    content = (tmp_path / "a").read_bytes()
    for position in range(len(content)):
        for bit in (1, 128):
            changed = bytearray(content)
            changed[position] ^= bit
            (tmp_path / "b").write_bytes(changed)
            with pytest.raises(
                ValueError, match=r"b' (is torn, or|was altered or damaged: its|is no file of shardpass)"
            ):
                read_verified(tmp_path / "b")
    for size in range(len(content)):
        (tmp_path / "b").write_bytes(content[:size])
        with pytest.raises(ValueError, match="b' is torn, or something else: "):
            read_verified(tmp_path / "b")


@pytest.mark.parametrize("metadata", [None, {"shardpass": "text"}, {"checksum": "0"}, {"format": "pt"}], ids=str)
def test_other_files_of_tensors_are_told(metadata, tmp_path):
    save_file({"rows": torch.ones(1)}, tmp_path / "a", metadata)
    with pytest.raises(ValueError, match=r"a' is no file of shardpass: its header has no checksum$"):
        read_verified(tmp_path / "a")


def test_names_and_types_belong_to_the_checksum(tmp_path):
    """Whole tensors that were exchanged, or are read as something else."""
    write_verified(tmp_path / "a", {"a": torch.zeros(2), "b": torch.ones(2)}, "text")
    _, found = read_verified(tmp_path / "a")
    with safe_open(tmp_path / "a", framework="pt") as file:
        metadata = file.metadata()
    forged = [
        {"a": found["b"], "b": found["a"]},
        {"a": found["a"], "c": found["b"]},
        {"a": found["a"]},
        {"a": found["a"].view(torch.int32), "b": found["b"]},
        {"a": found["a"].view(1, 2), "b": found["b"]},
    ]
    for other in forged:
        save_file(other, tmp_path / "b", metadata)
        with pytest.raises(ValueError, match=r"b' was altered or damaged: its checksum does not fit$"):
            read_verified(tmp_path / "b")


def test_the_disk_has_it_before_the_name_is_given(tmp_path, monkeypatch):
    order = []
    sync, give = os.fsync, os.replace

    def synced(descriptor):
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda old, new: (order.append("named"), give(old, new)))
    before = len(os.listdir("/proc/self/fd"))
    write_verified(tmp_path / "a", {"rows": torch.ones(1)})
    assert order == [f".a.{os.getpid()}.tmp", "named", tmp_path.name]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fails", ["shardpass.core.training.checkpoint_file._fill", "os.fsync", "os.replace"])
def test_a_failed_write_leaves_what_was_there(fails, tmp_path, monkeypatch):
    write_verified(tmp_path / "a", {"rows": torch.zeros(1)}, "old")

    def full(*_, **__):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(fails, full)
        with pytest.raises(OSError, match="no space left"):
            write_verified(tmp_path / "a", {"rows": torch.ones(1)}, "new")
    assert os.listdir(tmp_path) == ["a"] and read_verified(tmp_path / "a")[0] == "old"


def test_a_full_disk_is_told_with_the_bytes_that_it_lacks(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_verified(tmp_path / "a", tensors(), TEXT)
    monkeypatch.setattr(os, "fsync", full)
    words = f"{tmp_path / 'a'} cannot be written: it needs {(tmp_path / 'a').stat().st_size} bytes .No space left"
    with pytest.raises(OSError, match=words):
        write_verified(tmp_path / "a", tensors(), TEXT)


def test_links_of_strangers_are_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".a.{os.getpid()}.tmp").symlink_to(victim)
    write_verified(tmp_path / "a", {"rows": torch.ones(1)})
    assert victim.read_text() == "precious" and not (tmp_path / "a").is_symlink()
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write_verified(tmp_path / "folder", {"rows": torch.ones(1)})
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is no regular file, and will not be replaced"):
        write_verified(tmp_path / "pipe", {"rows": torch.ones(1)})
    with pytest.raises(ValueError, match=r"pipe' is torn, or something else: .*will not be read"):
        read_verified(tmp_path / "pipe")
