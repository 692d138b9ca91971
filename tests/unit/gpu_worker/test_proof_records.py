"""Proofs last as long as the process, and longer where there is a directory for them."""

from pathlib import Path

import pytest

from gpu_worker.models.proof_records import ProofRecords

SETTING = "torch.bfloat16, cpu, torch 2.13.0"


def test_a_proof_is_for_one_version_in_one_setting(tmp_path: Path) -> None:
    """Other weights, another type or another library may compute something else."""
    records = ProofRecords(tmp_path)
    records.add("d1", SETTING)
    assert records.is_proven("d1", SETTING)
    assert not records.is_proven("d2", SETTING)
    assert not records.is_proven("d1", "torch.float32, cpu, torch 2.13.0")


def test_a_restarted_worker_knows_its_proofs(tmp_path: Path) -> None:
    """A start costs no proof that the start before has made."""
    ProofRecords(tmp_path / "proofs").add("d1", SETTING)
    assert ProofRecords(tmp_path / "proofs").is_proven("d1", SETTING)
    assert not ProofRecords(None).is_proven("d1", SETTING)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"proven": "another"}'])
def test_a_damaged_file_is_a_missing_proof(content: bytes, tmp_path: Path) -> None:
    """The worst that a file can do is to have the model proven again."""
    ProofRecords(tmp_path).add("d1", SETTING)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    records = ProofRecords(tmp_path)
    assert not records.is_proven("d1", SETTING)
    records.add("d1", SETTING)
    assert ProofRecords(tmp_path).is_proven("d1", SETTING)


def test_without_room_for_files_the_process_remembers(tmp_path: Path) -> None:
    """A container's file system may be read-only."""
    (tmp_path / "file").write_text("no directory")
    records = ProofRecords(tmp_path / "file")
    records.add("d1", SETTING)
    assert records.is_proven("d1", SETTING)


def test_a_version_without_a_digest_is_never_proven(tmp_path: Path) -> None:
    """Its files are not known, so a proof would be one of any such version."""
    records = ProofRecords(tmp_path)
    records.add("", SETTING)
    assert not records.is_proven("", SETTING)
