"""Files for a tenant's producer: credentials, and programs that know their server."""

import ast
import json
import re
import stat
from pathlib import Path

import pytest

from millstream import cli
from millstream.command_table import find_command
from millstream.settings_loader import UsageError
from millstream.tenants.producer_files import (
    EXAMPLES,
    ProducerConnection,
    ProducerFilesNotWritten,
    check_directory,
    write_files,
)

CONNECTION = ProducerConnection(
    "tls://a:4222,tls://b:4222", '/a "b"\\ü/ca.pem', "acme", "e_z_51wen"
)
CONSTANTS = {"URL": CONNECTION.url, "CA": CONNECTION.ca, "TENANT": "acme", "MODEL": "e_z_51wen"}


def test_the_programs_are_for_this_server_tenant_and_model(tmp_path: Path) -> None:
    """Also where a path has what ends a text in either language."""
    written = write_files(tmp_path, CONNECTION, "secret")
    assert [each.name for each in written] == ["acme.creds", *EXAMPLES]
    module = ast.parse((tmp_path / "producer.py").read_text())
    found = {
        node.targets[0].id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    assert found == CONSTANTS
    script = (tmp_path / "producer.mjs").read_text()
    lines = dict(re.findall(r'^const ([A-Z]+) = (".*");', script, re.MULTILINE))
    assert {name: json.loads(value) for name, value in lines.items()} == CONSTANTS


def test_nobody_else_reads_the_credentials_and_nothing_else_has_them(tmp_path: Path) -> None:
    """New ones replace the old ones, and keep their mode."""
    for secret in ("old secret", "new secret"):
        written = write_files(check_directory(tmp_path / "new" / "er"), CONNECTION, secret)
    assert written[0].read_text() == "new secret"
    assert stat.S_IMODE(written[0].stat().st_mode) == 0o600
    assert not [file for file in written[1:] if "secret" in file.read_text()]
    assert {each.name for each in written[0].parent.iterdir()} == {f.name for f in written}


def test_a_directory_that_is_a_file_is_told(tmp_path: Path) -> None:
    """Before credentials are issued, which are shown once."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ProducerFilesNotWritten, match="name another directory"):
        check_directory(tmp_path / "file")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tenants add acme --expires 1d", "--expires needs --producer"),
        ("tenants change acme --overlap 1h", "--overlap needs --producer"),
        ("tenants change acme --withdraw --producer d", "not both"),
        ("tenants change acme --producer d --overlap soon", "no duration"),
        ("tenants change acme --producer d --expires 0", "greater than 0"),
    ],
)
def test_flags_that_do_not_go_together_are_told(words: str, message: str) -> None:
    """Each with what would."""
    found = find_command(words.split())
    assert found
    with pytest.raises(UsageError, match=message):
        cli.parse_settings(*found)
