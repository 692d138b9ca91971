"""The table of rights in Markdown, as `docs/accounts.md` has it."""

from collections.abc import Iterator
from itertools import groupby

from streams.accounts.access import ACCOUNT_OF, UserClass, rights_of
from streams.accounts.rights import Right

_ACTIONS = {"publish": "publishes", "subscribe": "hears"}


def render_table() -> str:
    """Return the rights of each class, in a cell with one stream of token logs."""
    return "\n".join(line for each in UserClass for line in _section(each)).rstrip()


def _section(user_class: UserClass) -> Iterator[str]:
    account = ACCOUNT_OF.get(user_class)
    rights = rights_of(user_class)
    if not rights:
        return
    yield f"### {user_class}"
    yield ""
    yield f"Its account is `{account}`." if account else "Each tenant has an account of its own."
    yield ""
    yield "| does | on subjects of | for | subjects |"
    yield "|---|---|---|---|"
    for (action, owner, reason), found in groupby(rights, _group):
        subjects = ", ".join(f"`{_shown(right)}`" for right in found)
        yield f"| {_ACTIONS[action]} | {owner} | {reason} | {subjects} |"
    yield ""


def _group(right: Right) -> tuple[str, str, str]:
    return right.action, right.owner, right.reason


def _shown(right: Right) -> str:
    return f"{right.local} = {right.subject}" if right.local else right.subject
