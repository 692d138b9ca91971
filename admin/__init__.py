"""The admin service: declares streams and buckets, and is the one writer of their records.

Any number of processes may run; the one that holds the lease `admin` declares. A request of an
operator comes in by HTTP or over NATS, is checked, changes a record by compare-and-set, and is
answered once that is stored.

service          builds the parts and runs them
declarer         what is declared, and when
operation_table  every operation: its name, its HTTP method and path, its arguments (pure)
operations       what each operation does with models and tenants, `key_operations` with keys and
                 the deny-list for tokens, `price_operations` with prices, `audit_operations`
                 with the audit log, `account_operations` with tenants' accounts at the broker,
                 of which `account_updates` tells the servers; `admin_api` checks, counts and
                 logs them
audit_trail      writes each change into the audit log before it is made, and how it ended
http_api         operations under `/admin/v1`, for the `caller` whom `admin_keys` finds by a key;
                 uvicorn runs it in `http_server`
nats_api         the same operations on `infer.admin.>`
openapi          the document of the HTTP API
"""
