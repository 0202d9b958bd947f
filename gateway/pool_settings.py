"""What holds for one client of one pool, resolved from user, database and front.

The values are all there is to a pool: a reload resolves them again and compares.
Called by the workers at login and by the supervisor for its budgets. The precedence is that of PgBouncer's [users] and
[databases]: https://www.pgbouncer.org/config.html
"""

from typing import TypeVar

from gateway.settings import CONSOLE_DATABASES, PoolSettings, Settings, User

T = TypeVar("T")

NOBODY = User()


def pool_settings(settings: Settings, database: str, user: str) -> PoolSettings | None:
    """Resolve what holds for a client that logs in as `user` and asks for `database`.

    None when there is no such database (3D000), which includes the console's own names.
    """
    if database in CONSOLE_DATABASES:
        return None
    entry = settings.database.get(database) or settings.database.get("*")
    if entry is None:
        return None
    front = settings.front
    server_user = entry.user or user
    owner = settings.user.get(server_user, NOBODY)
    client = settings.user.get(user, NOBODY)
    startup = {
        "client_encoding": entry.client_encoding,
        "DateStyle": entry.datestyle,
        "TimeZone": entry.timezone,
        "application_name": entry.application_name,
    }
    return PoolSettings(
        database=database,
        user=user,
        cluster=entry.cluster,
        node=entry.node,
        dbname=entry.dbname or database,
        server_user=server_user,
        forced_user=entry.user is not None,
        password=entry.password,
        startup=tuple((name, value) for name, value in startup.items() if value is not None),
        connect_query=entry.connect_query,
        pool_mode=_first(owner.pool_mode, entry.pool_mode, front.pool_mode),
        pool_size=_first(owner.pool_size, entry.pool_size, front.default_pool_size),
        min_pool_size=_first(entry.min_pool_size, front.min_pool_size),
        warm_pool_size=front.warm_pool_size,
        reserve_pool_size=_first(owner.reserve_pool_size, entry.reserve_pool_size, front.reserve_pool_size),
        reserve_pool_timeout=front.reserve_pool_timeout,
        max_db_connections=_first(entry.max_db_connections, front.max_db_connections),
        max_user_connections=_first(owner.max_user_connections, front.max_user_connections),
        max_db_client_connections=_first(entry.max_db_client_connections, front.max_db_client_connections),
        max_user_client_connections=_first(client.max_user_client_connections, front.max_user_client_connections),
        max_prepared_statements=front.max_prepared_statements,
        server_lifetime=_first(entry.server_lifetime, front.server_lifetime),
        server_idle_timeout=front.server_idle_timeout,
        server_connect_timeout=front.server_connect_timeout,
        server_login_retry=front.server_login_retry,
        server_check_query=front.server_check_query,
        server_check_delay=front.server_check_delay,
        server_reset_query=front.server_reset_query,
        server_reset_query_always=front.server_reset_query_always,
        server_round_robin=front.server_round_robin,
        server_cleanup_timeout=front.server_cleanup_timeout,
        query_wait_timeout=_first(client.query_wait_timeout, entry.query_wait_timeout, front.query_wait_timeout),
        query_wait_notify=front.query_wait_notify,
        query_timeout=_first(owner.query_timeout, front.query_timeout),
        transaction_timeout=_first(owner.transaction_timeout, front.transaction_timeout),
        idle_transaction_timeout=_first(owner.idle_transaction_timeout, front.idle_transaction_timeout),
        client_idle_timeout=_first(client.client_idle_timeout, front.client_idle_timeout),
        cancel_wait_timeout=front.cancel_wait_timeout,
        reads=_first(client.reads, settings.cluster[entry.cluster].reads),
    )


def _first(*choices: T | None) -> T:
    return next(choice for choice in choices if choice is not None)
