"""The command line: every option explained, every slip answered with the nearest name."""

import pytest

from millstream import cli
from millstream.command_table import COMMANDS, Command, find_command
from millstream.settings_loader import fields_by_key, is_positional, is_table, to_flag

by_name = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is printed on stderr when the words are not understood."""
    assert cli.main(list(words)) == 2
    return capsys.readouterr().err.strip()


@by_name
def test_help_explains_every_option_with_its_default(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--help` is the reference: an option without a sentence does not exist for its reader."""
    with pytest.raises(SystemExit) as status:
        cli.main([*command.name.split(), "--help"])
    assert status.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for key, info in fields_by_key(command.load_settings()).items():
        assert info.description, key
        if not is_table(info):
            shown = key.upper() if is_positional(info) else to_flag(key)
            assert shown in text
            assert " ".join(cli.describe_option(info).replace("%%", "%").split()) in text


@by_name
def test_every_command_exists(command: Command) -> None:
    """The table names code by words: they must lead somewhere."""
    assert callable(command.load_run())


def test_the_list_of_commands_says_what_each_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The first thing that a stranger types."""
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command.name in text and command.help in text for command in COMMANDS)


def test_no_command_at_all_shows_them_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """A script that lost its arguments must not look successful."""
    assert cli.main([]) == 2
    assert "gateway" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gatway"], "unknown command gatway; did you mean gateway?"),
        (["models", "lst"], "say which: models add, models list, models show"),
        (["up", "--prot", "80"], "unknown option --prot; did you mean --port?"),
        (["up", "--prot=80"], "unknown option --prot; did you mean --port?"),
        (["up", "--nat", "1"], "unknown option --nat; did you mean --nats-port?"),
        (["gateway", "--max-body_bytes", "1"], "unknown option --max-body_bytes; did you mean "),
        (["up", "mock"], "unexpected argument mock"),
        (["up", "--port"], "argument --port: expected one argument"),
        (["up", "--port", "many"], "--port: Input should be a valid integer"),
        (["lag", "--nats", "x", "--json=1"], "argument --json: ignored explicit argument"),
        (["models", "show"], "NAME is required"),
        (["models", "add", "here"], "--name is required"),
    ],
)
def test_a_slip_stops_with_a_hint_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing starts with half of what was meant."""
    assert message in complaint(capsys, *words)


@by_name
def test_a_command_is_found_by_its_whole_name(command: Command) -> None:
    """Also one whose first word is a command itself, as `admin bootstrap`."""
    assert find_command([*command.name.split(), "--help"]) == (command, ["--help"])


def test_options_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--model a --model b` serves both."""
    settings = cli.parse_settings(COMMANDS[0], ["--model", "a", "--model", "b,c"])
    assert settings.model_dump()["model"] == ("a", "b,c")
