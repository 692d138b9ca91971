"""The table of all commands of `millstream`, each with its settings class and its coroutine.

Both are given as `module:name` and imported when the command runs: `millstream lag` loads no
gateway, and the base install needs no torch.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from streams.base_settings import Settings

CommandFunction = Callable[[Any, Any], Awaitable[int | None]]


@dataclass(frozen=True)
class Command:
    """One command of the command line, such as `millstream models add`: a row of `COMMANDS`.

    `name` is the words that call the command and `help` its line in the overview. `settings` and
    `run` name its settings class and its coroutine function, each as text of the form
    `module:name`. The modules are imported only by `load_settings` and `load_run`.
    """

    name: str
    help: str
    settings: str
    run: str

    def load_settings(self) -> type[Settings]:
        """Import the module that defines the command's settings class, and return the class."""
        return cast(type[Settings], _import_target(self.settings))

    def load_run(self) -> CommandFunction:
        """Import the module that defines the command's coroutine function, and return the function.

        The function is to be called as `run(settings, stop)`. `stop` is an `asyncio.Event` that the
        first SIGTERM or SIGINT sets. The coroutine returns the process's exit status; None means 0.
        """
        return cast(CommandFunction, _import_target(self.run))


def _import_target(target: str) -> object:
    module, name = target.split(":")
    return getattr(import_module(module), name)


COMMANDS = (
    Command(
        "up",
        "start everything on this machine: NATS, all services, workers",
        "millstream.up.settings:UpSettings",
        "millstream.up.supervisor:run",
    ),
    Command(
        "admin",
        "declare streams, and change models, tenants and keys for operators",
        "admin.settings:AdminSettings",
        "admin.service:run",
    ),
    Command(
        "admin bootstrap",
        "create the first API key with the scope admin, and show it this once",
        "millstream.keys.settings:BootstrapSettings",
        "millstream.keys.commands:bootstrap",
    ),
    Command(
        "gateway",
        "serve HTTP and WebSocket clients",
        "gateway.settings:GatewaySettings",
        "gateway.service:run",
    ),
    Command(
        "dispatcher",
        "queue requests and hand them to workers fairly",
        "dispatcher.settings:DispatcherSettings",
        "dispatcher.service:run",
    ),
    Command(
        "jobs",
        "run batches and background responses, send webhooks, remove what is deleted",
        "jobs.settings:JobsSettings",
        "jobs.service:run",
    ),
    Command(
        "fleet",
        "decide which machines there are to be, by what is asked for",
        "fleet.settings:FleetSettings",
        "fleet.service:run",
    ),
    Command(
        "fleet signals",
        "show demand, goals and load of each model, and load of the gateways",
        "millstream.fleet.settings:SignalsSettings",
        "millstream.fleet.signals:run",
    ),
    Command(
        "fleet types",
        "list the types of machines that there may be, with prices",
        "millstream.fleet.machine_settings:TypesSettings",
        "millstream.fleet.machine_commands:list_types",
    ),
    Command(
        "fleet machines",
        "list the machines that are wanted or there",
        "millstream.fleet.machine_settings:MachinesSettings",
        "millstream.fleet.machine_commands:list_machines",
    ),
    Command(
        "fleet set",
        "want so many machines of a type for a model, for a time",
        "millstream.fleet.machine_settings:FleetSetSettings",
        "millstream.fleet.machine_commands:set_machines",
    ),
    Command(
        "curves list",
        "list what machines of each type do with each model",
        "millstream.curves.settings:ListCurvesSettings",
        "millstream.curves.commands:list_curves",
    ),
    Command(
        "curves show",
        "show what machines of one type do with one model, and how it was measured",
        "millstream.curves.settings:ShowCurveSettings",
        "millstream.curves.commands:show_curve",
    ),
    Command(
        "curves import",
        "store curves from a file",
        "millstream.curves.settings:ImportCurvesSettings",
        "millstream.curves.commands:import_curves",
    ),
    Command(
        "plan",
        "compute how many workers a rate of requests needs, and what they cost",
        "millstream.curves.plan_settings:PlanSettings",
        "millstream.curves.plan:run",
    ),
    Command(
        "fleet pause",
        "decide nothing about machines for a time",
        "millstream.fleet.machine_settings:FleetPauseSettings",
        "millstream.fleet.machine_commands:pause",
    ),
    Command(
        "fleet resume",
        "decide about machines again",
        "millstream.fleet.machine_settings:FleetResumeSettings",
        "millstream.fleet.machine_commands:resume",
    ),
    Command(
        "fleet status",
        "show what is wanted for each model, and why",
        "millstream.fleet.machine_settings:StatusSettings",
        "millstream.fleet.plan_commands:show_status",
    ),
    Command(
        "fleet plan",
        "list the last changes of the plan, with their reasons",
        "millstream.fleet.machine_settings:FleetPlanSettings",
        "millstream.fleet.plan_commands:show_plan",
    ),
    Command(
        "fleet why",
        "explain why a model has the machines that it has",
        "millstream.fleet.machine_settings:FleetWhySettings",
        "millstream.fleet.plan_commands:explain_model",
    ),
    Command(
        "worker",
        "pull requests, run models, write tokens",
        "gpu_worker.settings:WorkerSettings",
        "gpu_worker.service:run",
    ),
    Command(
        "batch submit",
        "store a file of requests and run it as a batch",
        "millstream.batch.settings:SubmitSettings",
        "millstream.batch.commands:submit",
    ),
    Command(
        "batch estimate",
        "tell what a batch may cost and take, before it runs",
        "millstream.batch.settings:EstimateSettings",
        "millstream.batch.commands:estimate",
    ),
    Command(
        "batch list",
        "list the batches of a tenant, the newest first",
        "millstream.batch.settings:ListBatchesSettings",
        "millstream.batch.commands:list_batches",
    ),
    Command(
        "batch status",
        "show a batch",
        "millstream.batch.settings:OneBatchSettings",
        "millstream.batch.commands:status",
    ),
    Command(
        "batch watch",
        "show how far a batch is until it has ended",
        "millstream.batch.settings:OneBatchSettings",
        "millstream.batch.commands:watch",
    ),
    Command(
        "batch results",
        "print the results of a batch so far, in the order of its input",
        "millstream.batch.settings:ResultsSettings",
        "millstream.batch.commands:results",
    ),
    Command(
        "batch items",
        "show one line of a batch by its custom_id",
        "millstream.batch.settings:ItemSettings",
        "millstream.batch.commands:items",
    ),
    Command(
        "batch retry",
        "run the failed lines of a batch again, as a new one",
        "millstream.batch.settings:RetrySettings",
        "millstream.batch.commands:retry",
    ),
    Command(
        "batch cancel",
        "end a batch, and keep what had ended",
        "millstream.batch.settings:OneBatchSettings",
        "millstream.batch.commands:cancel",
    ),
    Command(
        "batch pause",
        "publish no further lines of a batch",
        "millstream.batch.settings:OneBatchSettings",
        "millstream.batch.commands:pause",
    ),
    Command(
        "batch resume",
        "go on with a paused batch",
        "millstream.batch.settings:OneBatchSettings",
        "millstream.batch.commands:resume",
    ),
    Command(
        "webhooks list",
        "list the webhook endpoints of a tenant",
        "millstream.webhooks.settings:WebhookCommandSettings",
        "millstream.webhooks.commands:list_endpoints",
    ),
    Command(
        "webhooks create",
        "have events posted to a URL, and show the secret that signs them this once",
        "millstream.webhooks.settings:CreateEndpointSettings",
        "millstream.webhooks.commands:create",
    ),
    Command(
        "webhooks test",
        "post a sample event to a webhook endpoint",
        "millstream.webhooks.settings:TestEndpointSettings",
        "millstream.webhooks.commands:test",
    ),
    Command(
        "webhooks deliveries",
        "show what was sent to a webhook endpoint, and what it answered",
        "millstream.webhooks.settings:DeliveriesSettings",
        "millstream.webhooks.commands:deliveries",
    ),
    Command(
        "webhooks redeliver",
        "send an event to a webhook endpoint again",
        "millstream.webhooks.settings:RedeliverSettings",
        "millstream.webhooks.commands:redeliver",
    ),
    Command(
        "webhooks rotate",
        "replace the secret of a webhook endpoint, and show the new one this once",
        "millstream.webhooks.settings:RotateSecretSettings",
        "millstream.webhooks.commands:rotate",
    ),
    Command(
        "webhooks enable",
        "send events to a disabled webhook endpoint again",
        "millstream.webhooks.settings:OneEndpointSettings",
        "millstream.webhooks.commands:enable",
    ),
    Command(
        "webhooks delete",
        "send nothing more to a webhook endpoint",
        "millstream.webhooks.settings:OneEndpointSettings",
        "millstream.webhooks.commands:delete",
    ),
    Command(
        "lag",
        "show every lane and every worker",
        "millstream.admin.settings:LagSettings",
        "millstream.admin.lag:run",
    ),
    Command(
        "drain",
        "have a worker finish or hand over its work and end",
        "millstream.admin.settings:DrainSettings",
        "millstream.admin.drain:run",
    ),
    Command(
        "usage",
        "show what tenants and keys have used: of their quotas, or by key, model or day",
        "millstream.admin.settings:UsageSettings",
        "millstream.admin.usage:run",
    ),
    Command(
        "audit",
        "show or verify what was changed, by whom and from where",
        "millstream.audit.settings:AuditSettings",
        "millstream.audit.commands:run",
    ),
    Command(
        "audit export",
        "write what was changed into files",
        "millstream.audit.settings:AuditExportSettings",
        "millstream.audit.commands:export",
    ),
    Command(
        "prices set",
        "enter what a model costs from now on",
        "millstream.prices.settings:PriceSettings",
        "millstream.prices.commands:set_price",
    ),
    Command(
        "prices list",
        "list what models cost, and did before",
        "millstream.prices.settings:PriceListSettings",
        "millstream.prices.commands:list_prices",
    ),
    Command(
        "ledger export",
        "write the ledger into files of JSON Lines, and remove from it what they hold",
        "millstream.ledger.settings:ExportSettings",
        "millstream.ledger.commands:export",
    ),
    Command(
        "ledger send",
        "send exported requests to a meter, as CloudEvents",
        "millstream.ledger.settings:SendSettings",
        "millstream.ledger.commands:send",
    ),
    Command(
        "invoice",
        "add up what a tenant owes for a month",
        "millstream.ledger.settings:InvoiceSettings",
        "millstream.ledger.invoices:run",
    ),
    Command(
        "why",
        "say why a request waits, or how a tenant stands",
        "millstream.admin.settings:WhySettings",
        "millstream.admin.why:run",
    ),
    Command(
        "dead list",
        "list the requests that no worker could finish",
        "millstream.dead.settings:DeadListSettings",
        "millstream.dead.commands:list_letters",
    ),
    Command(
        "dead show",
        "show one dead letter with its attempts",
        "millstream.dead.settings:DeadShowSettings",
        "millstream.dead.commands:show",
    ),
    Command(
        "dead replay",
        "queue dead letters again, each as a new request",
        "millstream.dead.settings:DeadChangeSettings",
        "millstream.dead.commands:replay",
    ),
    Command(
        "dead drop",
        "remove dead letters",
        "millstream.dead.settings:DeadChangeSettings",
        "millstream.dead.commands:drop",
    ),
    Command(
        "broker init",
        "make keys and accounts of NATS, and its servers' configuration",
        "millstream.broker.settings:InitSettings",
        "millstream.broker.commands:init",
    ),
    Command(
        "broker user",
        "write the NATS credentials of one process",
        "millstream.broker.settings:UserSettings",
        "millstream.broker.commands:add_user",
    ),
    Command(
        "broker revoke",
        "cut off one user of NATS whose credentials were stolen",
        "millstream.broker.settings:RevokeSettings",
        "millstream.broker.revocation_commands:revoke",
    ),
    Command(
        "broker rotate",
        "replace signing keys of NATS and users' credentials while everything runs",
        "millstream.broker.rotation_settings:RotationSettings",
        "millstream.broker.rotation_commands:rotate",
    ),
    Command(
        "broker backup",
        "write all streams of a NATS server or cluster to a folder",
        "millstream.broker.backup_settings:BackupSettings",
        "millstream.broker.backup_commands:backup",
    ),
    Command(
        "broker restore",
        "make the streams of a backup in a broker that lacks them",
        "millstream.broker.backup_settings:RestoreSettings",
        "millstream.broker.backup_commands:restore",
    ),
    Command(
        "broker move",
        "give the streams of one stopped server to the accounts that own them",
        "millstream.broker.backup_settings:MoveSettings",
        "millstream.broker.backup_commands:move",
    ),
    Command(
        "bench",
        "put load on a gateway and report latencies",
        "millstream.bench.settings:BenchSettings",
        "millstream.bench:run",
    ),
    Command(
        "tls init",
        "make certificates for the gateway and its clients, by an authority of one's own",
        "millstream.tls.settings:TlsInitSettings",
        "millstream.tls.commands:init",
    ),
    Command(
        "models add",
        "register a model, or a new version of one",
        "millstream.models.settings:AddSettings",
        "millstream.models.commands:add",
    ),
    Command(
        "models list",
        "list the registered models",
        "millstream.models.settings:ListSettings",
        "millstream.models.commands:list_models",
    ),
    Command(
        "models show",
        "show one model with its versions and files",
        "millstream.models.settings:ShowSettings",
        "millstream.models.commands:show",
    ),
    Command(
        "models history",
        "tell who changed a model or an alias, when, what, and why",
        "millstream.models.settings:HistorySettings",
        "millstream.models.version_changes:show_history",
    ),
    Command(
        "models diff",
        "tell in what two versions of models differ",
        "millstream.models.settings:DiffSettings",
        "millstream.models.version_changes:diff",
    ),
    Command(
        "models check",
        "say what keeps a directory from being served, and what it takes in memory",
        "millstream.models.settings:CheckSettings",
        "millstream.models.check:check",
    ),
    Command(
        "models remove",
        "forget a model with its aliases and adapters, an alias, or an adapter; files stay",
        "millstream.models.settings:RemoveSettings",
        "millstream.models.commands:remove",
    ),
    Command(
        "models serve",
        "have a model served by running workers: those of a type, or one",
        "millstream.models.settings:ServeSettings",
        "millstream.models.serving:serve",
    ),
    Command(
        "models unserve",
        "have a model served there no longer",
        "millstream.models.settings:ServeSettings",
        "millstream.models.serving:unserve",
    ),
    Command(
        "models served",
        "list which workers have to serve which models, and how far they are",
        "millstream.models.settings:ListSettings",
        "millstream.models.serving:list_served",
    ),
    Command(
        "alias set",
        "make a name mean a model, or one of its versions",
        "millstream.models.settings:AliasSettings",
        "millstream.models.commands:set_alias",
    ),
    Command(
        "alias back",
        "make an alias mean what it meant before",
        "millstream.models.settings:AliasBackSettings",
        "millstream.models.commands:move_alias_back",
    ),
    Command(
        "alias list",
        "list the aliases",
        "millstream.models.settings:ListSettings",
        "millstream.models.commands:list_aliases",
    ),
    Command(
        "keys create",
        "create an API key, and show it this once",
        "millstream.keys.settings:CreateKeySettings",
        "millstream.keys.commands:create",
    ),
    Command(
        "keys change",
        "change the limits of an API key, also for what is open",
        "millstream.keys.settings:ChangeKeySettings",
        "millstream.keys.commands:change",
    ),
    Command(
        "keys list",
        "list the managed API keys",
        "millstream.keys.settings:ListKeysSettings",
        "millstream.keys.commands:list_keys",
    ),
    Command(
        "keys rotate",
        "replace an API key by a new one with the same rights",
        "millstream.keys.settings:RotateKeySettings",
        "millstream.keys.commands:rotate",
    ),
    Command(
        "keys revoke",
        "withdraw an API key, also from what is open",
        "millstream.keys.settings:RevokeKeySettings",
        "millstream.keys.commands:revoke",
    ),
    Command(
        "tenants add",
        "add a tenant, with NATS credentials if it is to publish there",
        "millstream.tenants.settings:AddTenantSettings",
        "millstream.tenants.commands:add",
    ),
    Command(
        "tenants change",
        "change limits of a tenant, issue or withdraw its NATS credentials",
        "millstream.tenants.settings:ChangeTenantSettings",
        "millstream.tenants.commands:change",
    ),
    Command(
        "tenants list",
        "list the tenants with their limits",
        "millstream.tenants.settings:ListTenantsSettings",
        "millstream.tenants.commands:list_tenants",
    ),
    Command(
        "tenants remove",
        "remove a tenant with its keys",
        "millstream.tenants.settings:RemoveTenantSettings",
        "millstream.tenants.commands:remove",
    ),
)


def find_command(words: list[str]) -> tuple[Command, list[str]] | None:
    """Return the command whose name `words` begin with, and the list of the words after the name.

    Of two such names the longer one counts: `admin bootstrap` is not `admin` with a word. None if
    `words` begin with no command's name; for example, `models` alone is none.
    """
    for length in (2, 1):
        for command in COMMANDS:
            if command.name.split() == words[:length]:
                return command, words[length:]
    return None
