"""`millstream models`: what an operator adds is what the services see."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import admin.service
from millstream.admin import console_output
from millstream.admin.admin_client import AdminRefused
from millstream.models.check import check
from millstream.models.commands import (
    add,
    list_aliases,
    list_models,
    move_alias_back,
    remove,
    set_alias,
    show,
)
from millstream.models.settings import (
    AddSettings,
    AliasBackSettings,
    AliasSettings,
    CheckSettings,
    DiffSettings,
    HistorySettings,
    ListSettings,
    RemoveSettings,
    ShowSettings,
)
from millstream.models.version_changes import diff, show_history
from registry.artifact_verification import ArtifactRefused
from registry.price_book import PriceBook
from registry.store import Registry
from streams.errors import ModelNotFound
from streams.subjects import Priority
from streams.usage_accounts import NO_CURRENCY, Price, PriceEntry
from tests.support.accounts_server import connect
from tests.support.checkpoints import config_of, shapes_of, tokenizer_of, write_json, write_model
from tests.support.nats_server import NatsServer
from tests.support.safetensors_files import write_adapter
from tests.support.services import admin_settings, command_settings, opened_registry, running

STOP = asyncio.Event()
CONFIG = config_of("llama", head_dim=3, num_hidden_layers=1)


async def run_add(url: str, path: Path, **options: str) -> None:
    await add(AddSettings.model_validate({**command_settings(url), "path": path, **options}), STOP)


async def run_list(url: str, as_json: bool = False) -> None:
    await list_models(ListSettings.model_validate({**command_settings(url), "json": as_json}), STOP)


async def run_show(url: str, name: str, as_json: bool = False) -> None:
    await show(
        ShowSettings.model_validate({**command_settings(url), "name": name, "json": as_json}), STOP
    )


async def run_remove(url: str, name: str) -> None:
    await remove(RemoveSettings.model_validate({**command_settings(url), "name": name}), STOP)


@pytest.fixture
async def nats_url(nats_server: NatsServer) -> AsyncIterator[str]:
    """The URL of a broker at which an admin service is, whose log is not the commands' output."""
    with capture_logs():
        async with running(admin.service, admin_settings(nats_server.url)):
            yield nats_server.url


@asynccontextmanager
async def registry_at(url: str) -> AsyncIterator[Registry]:
    async with connect(url, "test") as broker, opened_registry(broker) as registry:
        yield registry


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_model(tmp_path / "llama", CONFIG)


async def test_an_added_model_is_listed_and_shown(
    nats_url: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The three commands, with an alias and a name that looks like markup."""
    await run_add(nats_url, files, name="[b]x", alias="chat")
    await run_list(nats_url)
    await run_show(nats_url, "chat")
    out = capsys.readouterr().out
    assert out.count("[b]x") == 3
    assert "config.json" in out
    assert "chat" in out


async def test_a_digest_is_whole_on_a_narrow_terminal(
    nats_url: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there to be compared; where it does not fit, it is wrapped."""
    await run_add(nats_url, files, name="m")
    async with registry_at(nats_url) as registry:
        digest = registry.models["m"].default.digest
    capsys.readouterr()
    monkeypatch.setattr(console_output, "PIPED_COLUMNS", 80)
    await run_show(nats_url, "m")
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    cells = [line.split("│")[3].strip() for line in out.splitlines() if line.count("│") == 4]
    assert digest in "".join(cells)


async def test_json_is_for_programs(
    nats_url: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--json` prints nothing else and carries everything."""
    await run_add(nats_url, files, name="m", version="v1", alias="chat")
    capsys.readouterr()
    await run_list(nats_url, as_json=True)
    (listed,) = json.loads(capsys.readouterr().out)
    await run_show(nats_url, "m", as_json=True)
    assert json.loads(capsys.readouterr().out) == listed
    assert listed["aliases"] == ["chat"]
    files_of_v1 = listed["versions"]["v1"]["files"]
    assert files_of_v1.keys() == {"config.json", "model.safetensors", "tokenizer.json"}


async def test_a_link_registers_nothing(
    nats_url: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal names the file, and no half of the model is left behind."""
    (files / "vocab.json").symlink_to("config.json")
    with pytest.raises(ArtifactRefused, match=r"vocab.json"):
        await run_add(nats_url, files, name="m")
    await run_list(nats_url, as_json=True)
    assert json.loads(capsys.readouterr().out) == []


async def test_what_no_engine_reads_is_told_and_left_out(
    nats_url: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older weights beside the safetensors, as directories of the Hub have them."""
    (files / "pytorch_model.bin").write_bytes(b"")
    await run_add(nats_url, files, name="m")
    assert "pytorch_model.bin: is read by no engine" in "".join(capsys.readouterr())
    await run_show(nats_url, "m", as_json=True)
    assert "pytorch_model.bin" not in capsys.readouterr().out


async def test_a_directory_without_weights_is_refused(nats_url: str, files: Path) -> None:
    """No worker could ever load it."""
    (files / "model.safetensors").unlink()
    with pytest.raises(ArtifactRefused, match=r"has no \.safetensors"):
        await run_add(nats_url, files, name="m")


@pytest.mark.parametrize("alias", ["taken", "m"])
async def test_an_alias_that_cannot_be_registers_nothing(
    nats_url: str, files: Path, alias: str
) -> None:
    """Not the model without it: who repeats the command would meet another error."""
    await run_add(nats_url, files, name="taken")
    with pytest.raises(AdminRefused, match=alias):
        await run_add(nats_url, files, name="m", alias=alias)
    async with registry_at(nats_url) as registry:
        assert [*registry.models] == ["taken"]


async def test_a_model_is_no_adapter(nats_url: str, files: Path) -> None:
    """The other way about, `models add` of an adapter says to give `--adapter-of`."""
    await run_add(nats_url, files, name="m")
    with pytest.raises(ArtifactRefused, match="llama is a model: leave out --adapter-of"):
        await run_add(nats_url, files, name="a", adapter_of="m")


async def test_an_added_adapter_is_listed_and_shown(
    nats_url: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its model, of which it is a part; as JSON too."""
    await run_add(nats_url, files, name="m", alias="chat")
    await run_add(nats_url, write_adapter(tmp_path / "lora"), name="mine", adapter_of="chat")
    assert "m:mine: LoRA, rank 2 on q_proj" in capsys.readouterr().out
    await run_list(nats_url)
    await run_show(nats_url, "chat:mine")
    out = capsys.readouterr().out
    assert out.count("m:mine") == 1
    assert "adapter_model.safetensors" in out
    await run_list(nats_url, as_json=True)
    (listed,) = json.loads(capsys.readouterr().out)
    await run_show(nats_url, "m:mine", as_json=True)
    assert [json.loads(capsys.readouterr().out)] == listed["adapters"]


async def test_an_alias_is_set_and_moved(
    nats_url: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To a model, then to one of its versions; never to what is not there."""
    await run_add(nats_url, files, name="m", version="1")
    for target in ("m", "m@1"):
        told = {**command_settings(nats_url), "name": "chat", "target": target}
        await set_alias(AliasSettings.model_validate(told), STOP)
        assert f"chat: {target}" in capsys.readouterr().out
    with pytest.raises(AdminRefused, match="'m@2' does not exist"):
        await set_alias(AliasSettings.model_validate({**told, "target": "m@2"}), STOP)
    await list_aliases(
        ListSettings.model_validate({**command_settings(nats_url), "json": True}), STOP
    )
    alias = json.loads(capsys.readouterr().out)
    assert alias.pop("earlier") == [{"model": "m", "version": None}]
    assert alias == {"name": "chat", "model": "m", "version": "1"}
    await list_aliases(ListSettings.model_validate({**command_settings(nats_url)}), STOP)
    assert "chat" in capsys.readouterr().out


async def test_an_alias_goes_back_and_its_history_is_told(
    nats_url: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who moved it, and why; not if another has moved it meanwhile, and not before its start."""
    common = command_settings(nats_url)
    await run_add(nats_url, files, name="m", version="1", why="first")
    (files / "generation_config.json").write_text('{"temperature": 0.5}')
    await run_add(nats_url, files, name="m", version="2")
    for version, more in (("1", {}), ("2", {"expected": "m@1", "why": "better"})):
        told = {**common, "name": "prod", "target": f"m@{version}", **more}
        await set_alias(AliasSettings.model_validate(told), STOP)
    with pytest.raises(AdminRefused, match="'prod' means m@2, and not m@1"):
        await set_alias(AliasSettings.model_validate(told), STOP)
    back = AliasBackSettings.model_validate({**common, "name": "prod", "why": "worse"})
    capsys.readouterr()
    await move_alias_back(back, STOP)
    assert capsys.readouterr().out == "prod: m@1\n"
    with pytest.raises(AdminRefused, match="has meant nothing but m@1"):
        await move_alias_back(back, STOP)
    found = [json.loads(line) for line in await history_lines(nats_url, "prod", capsys)]
    assert [each["why"] for each in found] == ["", "better", "worse"]
    assert found[1]["changes"] == ["version 1 -> 2"]
    found = [json.loads(line) for line in await history_lines(nats_url, "m", capsys)]
    assert [each["changes"][0] for each in found] == ["version 1 added", "version 2 added"]
    assert found[1]["changes"][1] == "default_version 1 -> 2"
    await diff(
        DiffSettings.model_validate({**common, "old": "prod", "new": "m@2", "json": True}), STOP
    )
    compared = json.loads(capsys.readouterr().out)
    assert compared["files"].keys() == {"generation_config.json"}
    assert compared["fields"].keys() == {"digest"}
    with pytest.raises(ModelNotFound):
        await history_lines(nats_url, "nothing", capsys)


async def history_lines(
    nats_url: str, name: str, capsys: pytest.CaptureFixture[str]
) -> Sequence[str]:
    told = {**command_settings(nats_url), "name": name, "json": True}
    await show_history(HistorySettings.model_validate(told), STOP)
    return capsys.readouterr().out.splitlines()


async def test_an_adapter_that_cannot_be_served_registers_nothing(
    nats_url: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The operator reads why; no client gets a name that only fails."""
    await run_add(nats_url, files, name="m")
    with pytest.raises(ArtifactRefused, match="use_dora"):
        await run_add(
            nats_url, write_adapter(tmp_path / "a", use_dora=True), name="a", adapter_of="m"
        )
    with pytest.raises(AdminRefused, match="'nope'"):
        await run_add(nats_url, write_adapter(tmp_path / "b"), name="b", adapter_of="nope")
    capsys.readouterr()
    await run_list(nats_url, as_json=True)
    assert json.loads(capsys.readouterr().out)[0]["adapters"] == []


@pytest.mark.parametrize("wrong", [{"name": "A.b"}, {"version": "1"}, {"alias": "x"}])
def test_what_an_adapter_cannot_have_is_refused(files: Path, wrong: dict[str, str]) -> None:
    """Before anything is read or written."""
    with pytest.raises(ValueError):
        AddSettings.model_validate({"path": files, "name": "a", "adapter_of": "m", **wrong})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"context_length": 9}, "only for --remote: --context-length"),
        ({"concurrency": 16, "task": "embed"}, "only for --remote: --task, --concurrency"),
        ({"adapter_of": "m", "max_output_tokens": 9}, "not for an adapter: --max-output-tokens"),
    ],
)
def test_an_option_that_would_mean_nothing_is_refused(
    files: Path, given: dict[str, object], why: str
) -> None:
    """Nobody gives one to have it passed over."""
    with pytest.raises(ValueError, match=why):
        AddSettings.model_validate({"path": files, "name": "m", **given})


async def test_showing_an_unknown_model_is_an_error(nats_url: str) -> None:
    """Scripts rely on the exit status."""
    with pytest.raises(AdminRefused, match="'nope'"):
        await run_show(nats_url, "nope")


async def test_what_is_removed_is_gone_with_what_belongs_to_it(
    nats_url: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter or an alias alone, or all of a model; the files stay."""
    await run_add(nats_url, files, name="m", alias="chat")
    for name in ("x", "y"):
        await run_add(nats_url, write_adapter(tmp_path / name), name=name, adapter_of="m")
    await run_remove(nats_url, "m:x")
    async with registry_at(nats_url) as registry:
        assert (list(registry.adapters), list(registry.aliases)) == (["m:y"], ["chat"])
    await run_remove(nats_url, "m")
    async with registry_at(nats_url) as registry:
        assert not {*registry.models, *registry.aliases, *registry.adapters}
    assert "m: removed" in capsys.readouterr().out
    assert (files / "config.json").exists()


@pytest.mark.parametrize("name", ["nope", "m@1", "m:nope"])
async def test_removing_what_is_not_there_is_an_error(
    nats_url: str, files: Path, name: str
) -> None:
    """A slip must not look like a success; a version alone cannot be taken from its model."""
    await run_add(nats_url, files, name="m", version="1")
    with pytest.raises(AdminRefused, match=name):
        await run_remove(nats_url, name)


async def test_a_remote_model_is_added_without_files(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A URL instead of a path; the key's name and never the key."""
    options = {"context_length": "512", "api_key_variable": "CORN_KEY", "concurrency": "3"}
    await run_add_remote(nats_url, "http://corn:8000/v1", name="far", **options)
    said = " ".join(capsys.readouterr().out.split())
    assert "allow it with --upstream-host corn" in said
    assert "allow it with --upstream-key-variable CORN_KEY" in said
    await run_list(nats_url, as_json=True)
    (listed,) = json.loads(capsys.readouterr().out)
    (version,) = listed["versions"].values()
    assert (listed["engine"], listed["has_tokenizer"], listed["context_length"]) == (
        "remote",
        False,
        512,
    )
    assert version["options"] == {
        "url": "http://corn:8000/v1",
        "model": "far",
        "api": "openai",
        "concurrency": 3,
        "api_key_variable": "CORN_KEY",
        "first_seconds": 60,
        "chunk_seconds": 30,
        "context_length": 512,
    }


async def test_a_new_version_costs_what_the_model_did(nats_url: str) -> None:
    """Unless it says otherwise: a cap on spending would be void from one command to the next."""
    far = {"name": "far", "context_length": "512"}
    await run_add_remote(nats_url, "http://corn:8000/v1", prompt_price="2", **far)
    await run_add_remote(nats_url, "http://other:8000/v1", completion_price="3", **far)
    async with registry_at(nats_url) as registry:
        model = registry.models["far"]
        assert (len(model.versions), model.prompt_price, model.completion_price) == (2, 2, 3)
    async with connect(nats_url, "test") as broker:
        prices = await PriceBook.open(broker)
        entries = [record.entry for record in prices.records]
        assert entries == [
            PriceEntry(1, NO_CURRENCY, Price(2_000_000, 0)),
            PriceEntry(2, NO_CURRENCY, Price(2_000_000, 3_000_000)),
        ]
        assert prices.entry_for(model) == entries[-1]
        await prices.close()


async def test_limits_are_given_and_stay(nats_url: str, files: Path) -> None:
    """A new version is bounded as the one before, unless it says otherwise."""
    await run_add(nats_url, files, name="m", version="1", max_output_tokens="40")
    await run_add(nats_url, files, name="m", version="2", default_max_tokens="20")
    async with registry_at(nats_url) as registry:
        model = registry.models["m"]
        assert (model.max_output_tokens, model.default_max_tokens) == (40, 20)
        assert len(model.versions) == 2


async def test_whether_a_models_own_sampling_counts_is_said_once(
    nats_url: str, files: Path
) -> None:
    """By default it counts; a new version leaves it as it was said."""
    await run_add(nats_url, files, name="m", version="1")
    await run_add(nats_url, files, name="n", version="1", generation_config="none")
    await run_add(nats_url, files, name="n", version="2")
    async with registry_at(nats_url) as registry:
        found = [registry.models[name].generation_config for name in ("m", "n")]
        assert found == ["auto", "none"]


async def test_goals_are_given_by_priority_and_stay(nats_url: str) -> None:
    """A new version is to be as fast as the one before, unless it says otherwise."""
    far = {"name": "far", "context_length": "512"}
    first = {"interactive_goal_ms": "300", "batch_goal_ms": "60000"}
    await run_add_remote(nats_url, "http://corn:8000/v1", **first, **far)
    await run_add_remote(nats_url, "http://other:8000/v1", interactive_goal_ms="250", **far)
    async with registry_at(nats_url) as registry:
        goals = registry.models["far"].goals
        assert {of: goal.time_to_first_token_ms for of, goal in goals.items()} == {
            Priority.INTERACTIVE: 250,
            Priority.BATCH: 60_000,
        }


async def test_what_a_server_may_do_at_once_can_change_and_where_it_is_cannot(
    nats_url: str,
) -> None:
    """A version means one server and model: another one is another version."""
    far = {"name": "far", "version": "1", "context_length": "512"}
    await run_add_remote(nats_url, "http://corn:8000/v1", **far)
    await run_add_remote(nats_url, "http://corn:8000/v1", concurrency="5", **far)
    with pytest.raises(AdminRefused, match="exists with other files"):
        await run_add_remote(nats_url, "http://other:8000/v1", **far)


async def run_add_remote(url: str, remote: str, **options: str) -> None:
    await add(
        AddSettings.model_validate({**command_settings(url), "remote": remote, **options}), STOP
    )


async def run_check(
    path: Path, capsys: pytest.CaptureFixture[str], **options: Path
) -> tuple[int, Any]:
    """The exit status of `models check --json`, and what it prints."""
    settings = CheckSettings.model_validate({"path": path, "json": True, **options})
    status = await check(settings, STOP)
    return status, json.loads(capsys.readouterr().out)


async def test_a_directory_is_checked_without_being_registered(
    nats_url: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its memory is told in numbers that follow from config.json."""
    status, report = await run_check(files, capsys)
    assert (status, report["servable"], report["refusals"]) == (0, True, [])
    memory = report["memory"]
    numbers = sum(math.prod(shape) for shape in shapes_of(CONFIG).values())
    assert memory["weight_bytes"] == 4 * numbers
    assert memory["kv_bytes_per_token"] == 2 * 3 * 4  # K and V, head size, float32
    assert memory["kv_bytes_per_1000_tokens"] == 1000 * memory["kv_bytes_per_token"]
    assert memory["kv_tokens"] == 64 * 64  # all sequences at their longest
    await run_list(nats_url)
    assert "llama" not in capsys.readouterr().out


async def test_a_check_tells_all_refusals_at_once(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Registration stops at the first."""
    (files / "chat_template.jinja").write_text("{% if")
    write_json(files / "config.json", CONFIG | {"num_hidden_layers": 4})
    status, report = await run_check(files, capsys)
    assert (status, report["servable"], report["memory"]) == (1, False, None)
    assert [each["path"] for each in report["refusals"]] == ["config.json", "chat_template.jinja"]
    await check(CheckSettings.model_validate({"path": files}), STOP)
    assert "refusal  config.json: num_hidden_layers is 4" in capsys.readouterr().out


async def test_an_adapter_is_checked_with_its_model(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its files and the model's: no server is asked, and nothing is registered."""
    q_proj = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    a, b = f"{q_proj}A.weight", f"{q_proj}B.weight"
    outputs, inputs = shapes_of(CONFIG)["model.layers.0.self_attn.q_proj.weight"]
    adapter = write_adapter(tmp_path / "lora", {a: (2, inputs), b: (outputs, 2)})
    status, report = await run_check(adapter, capsys, adapter_of=files)
    assert (status, report["servable"], report["refusals"]) == (0, True, [])
    assert (report["rank"], report["targets"]) == (2, ["q_proj"])
    assert report["parameters"] == 2 * (inputs + outputs)
    write_adapter(tmp_path / "wide", {a: (2, inputs + 1), b: (outputs, 2)})
    await check(
        CheckSettings.model_validate({"path": tmp_path / "wide", "adapter_of": files}), STOP
    )
    assert f"q_proj fits ({outputs}, {inputs + 1})" in capsys.readouterr().out


async def test_an_adapter_is_checked_with_a_model_alone(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its model, or with something else, the check says what to give."""
    adapter = write_adapter(tmp_path / "lora")
    status, report = await run_check(adapter, capsys)
    assert "models check PATH --adapter-of DIR" in report["refusals"][0]["reason"]
    status, report = await run_check(adapter, capsys, adapter_of=tmp_path / "nowhere")
    assert (status, report["refusals"][0]["reason"]) == (1, "does not exist")
    status, report = await run_check(files, capsys, adapter_of=files)
    assert "leave out --adapter-of" in report["refusals"][0]["reason"]


async def test_a_directory_of_no_known_kind_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without config.json there is nothing to compare with."""
    status, report = await run_check(tmp_path, capsys)
    assert (status, report["engine"]) == (1, None)
    assert "is empty" in report["refusals"][0]["reason"]


async def test_registration_prints_warnings(
    nats_url: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They keep nobody from using the model."""
    write_json(files / "tokenizer.json", tokenizer_of(32, image=40))
    await run_add(nats_url, files, name="m")
    assert "warning: tokenizer.json: has 1 tokens up to id 40" in capsys.readouterr().out
