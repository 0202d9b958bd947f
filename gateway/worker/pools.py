"""All pools of a worker, and its shares of the limits that hold over all workers.

1. A pool comes into being with its first client and is resolved from the settings; a reload resolves it again.
2. A share begins as the worker's part of an even split and changes only by the supervisor's grants.
3. Where a pool's node is comes from the cluster views; a pool without a known node lets its clients wait.

Called by the front, by admission and by servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gateway import errors
from gateway.control import Configure, Demand, Limit, first_share
from gateway.pool_settings import pool_settings
from gateway.settings import PoolSettings
from gateway.worker.endpoint import SERVER_ACTIVE, SERVER_CLOSING, Server
from gateway.worker.pool import SECOND, UNLIMITED, Action, Pool, Share, Verb
from health.view import Admin, ClusterView, Role, Status

_PATIENCE = SECOND // 10
"""Wait in one pool after which servers of others that share its full limit make room."""

_IDENTITY = ("dbname", "password", "startup", "connect_query", "pool_mode", "max_prepared_statements")
"""Settings that a server connection is made with: where one changes, it is replaced. What a client of session mode has
left on one is not for those who come in another mode."""

REFUSALS = {
    "clients": errors.MAX_CLIENT_CONN,
    "database_clients": errors.MAX_DB_CLIENT_CONNECTIONS,
    "user_clients": errors.MAX_USER_CLIENT_CONNECTIONS,
}


class Pools:
    """The pools by (database, server user), the shares by what they limit, the views by cluster."""

    def __init__(self, configure: Configure) -> None:
        self.by_key: dict[tuple[str, str], Pool] = {}
        self.all: list[Pool] = []  # with those that another one has replaced since, as long as somebody is in them
        self.shares: dict[Limit, Share] = {}
        self.budgets: dict[Limit, int] = {}
        self.granted: dict[Limit, int] = {}
        self.views: dict[str, ClusterView] = {}
        self.configure(configure)

    def configure(self, configure: Configure) -> list[Pool]:
        """Take the settings; return the pools whose servers are not what they should be any more."""
        self.settings = configure.settings
        self.workers, self.index = configure.workers, configure.index
        return [pool for pool in self.all if self._reconfigure(pool)]

    def _reconfigure(self, pool: Pool) -> bool:
        before, after = pool.settings, pool_settings(self.settings, pool.database, pool.settings.user)
        pool.removed = after is None or after.server_user != before.server_user
        shares = pool.shares
        if after is None or pool.removed:
            return True  # those who are in it may finish; nobody else gets in
        pool.configure(after)
        _, _, pool.shares = self._limits(after)
        for share in set(pool.shares) - set(shares):
            share.used += len(pool.servers)
        address = pool.address
        moved = self._place(pool) != address and address is not None
        return moved or any(getattr(before, name) != getattr(after, name) for name in _IDENTITY)

    def get(self, database: str, user: str) -> Pool | None:
        """Return the pool for a client, made now if need be; None when there is no such database."""
        pool = self.by_key.get((database, user))
        if pool is not None and not pool.removed:
            return pool
        settings = pool_settings(self.settings, database, user)
        if settings is None:
            return None
        key = (database, settings.server_user)
        pool = self.by_key.get(key)
        if pool is None or pool.removed:
            pool = self.by_key[key] = Pool(settings, *self._limits(settings))
            self.all.append(pool)
            self._place(pool)
        return pool

    def sweep(self) -> list[Pool]:
        """Forget the removed pools that nobody is in any more; return the others."""
        for pool in [pool for pool in self.all if pool.removed and not (pool.clients or pool.servers or pool.warm)]:
            self.all.remove(pool)
            if self.by_key.get((pool.database, pool.settings.server_user)) is pool:
                del self.by_key[pool.database, pool.settings.server_user]
        return list(self.all)

    def share(self, kind: str, budget: int, database: str = "", user: str = "") -> Share:
        """Return the share of a limit, of which *budget* is the whole (0: there is none)."""
        limit = Limit(kind, database, user)
        share = self.shares.get(limit)
        if share is None:
            share = self.shares[limit] = Share(0, REFUSALS.get(kind))
        if self.budgets.get(limit) != budget:
            self.budgets[limit] = budget
            unlimited = budget == 0 and kind != "reserve"
            first = self.granted.get(limit, first_share(budget, self.workers, self.index))
            share.limit = UNLIMITED if unlimited else first
        return share

    def client_shares(self, pool: Pool, user: str) -> tuple[Share, ...]:
        """Return the shares of the limits that a client counts against."""
        settings = pool_settings(self.settings, pool.database, user) or pool.settings
        shares = [self.share("clients", self.settings.front.max_client_conn)]
        if settings.max_db_client_connections:
            shares.append(self.share("database_clients", settings.max_db_client_connections, pool.database))
        if settings.max_user_client_connections:
            shares.append(self.share("user_clients", settings.max_user_client_connections, "", user))
        return tuple(shares)

    def _limits(self, settings: PoolSettings) -> tuple[Share, Share, tuple[Share, ...]]:
        database, user = settings.database, settings.server_user
        shares = []
        if settings.max_db_connections or Limit("database", database) in self.shares:
            shares.append(self.share("database", settings.max_db_connections, database))
        if settings.max_user_connections or Limit("user", "", user) in self.shares:
            shares.append(self.share("user", settings.max_user_connections, "", user))
        return (
            self.share("pool", settings.pool_size, database, user),
            self.share("reserve", settings.reserve_pool_size, database, user),
            tuple(shares),
        )

    def see(self, view: ClusterView) -> list[tuple[Pool, Action]]:
        """Take a view; return what is to become of the servers that are not where the view wants them."""
        self.views[view.name] = view
        pools = [pool for pool in self.all if pool.settings.cluster == view.name]
        return [(pool, action) for pool in pools for action in self._follow(pool)]

    def _follow(self, pool: Pool) -> Iterator[Action]:
        """A node that has another address serves on as long as somebody needs it; one that is replaced may not.

        Warm servers are adopted as far as the limits go without those that are cut.
        """
        place = self._place(pool)
        cut = []
        for server in pool.servers if pool.node is not None else ():
            if server.address == place:
                server.node = pool.node
            elif server.node != pool.node and pool.settings.node is None:
                cut.append(Action(Verb.CUT, server, "the primary is another node now"))
            elif place is None and self._is_cut_off(pool):
                cut.append(Action(Verb.CUT, server, "an operator took its node out"))
            elif not server.retiring:
                server.retiring = True
                yield Action(Verb.RETIRE, server, "the node has moved")
        room = min(share.limit - share.used for share in (pool.share, *pool.shares)) + len(cut)
        for server in pool.warm:
            if server.node == pool.node and server.address == place and room > 0:
                room -= 1
                yield Action(Verb.ADOPT, server, "its node is the primary now")
            elif server.node == pool.node or not self._is_there(server):
                yield Action(Verb.RETIRE, server, "it is not to be ready there")
        yield from cut  # last: what is launched in their place would take the room of what is there

    def _is_cut_off(self, pool: Pool) -> bool:
        view = self.views[pool.settings.cluster]
        return any(node.node.name == pool.node and node.admin is Admin.MAINT for node in view.nodes)

    def _is_there(self, server: Server) -> bool:
        """Is a warm server's node still what it was, as far as one can say while another is being chosen?"""
        nodes = {node.node.name: node for node in self.views[server.pool.settings.cluster].nodes}
        node = nodes.get(server.node or "")
        if node is None or node.status is Status.DOWN or node.role is Role.FALSE_PRIMARY:
            return False
        return server.address in [(address, node.node.port) for address in node.addresses]

    def _place(self, pool: Pool) -> tuple[str, int] | None:
        """Tell a pool what the view says; return where its node is, be it down or not."""
        view = self.views.get(pool.settings.cluster)
        name, address, place = pool.settings.node, None, None
        if view is not None:
            name = name or view.primary
            node = next((node for node in view.nodes if node.node.name == name), None)
            is_taken_out = node is not None and node.admin is not Admin.READY and pool.settings.node is not None
            if node is not None and node.addresses and not is_taken_out:
                place = (node.addresses[0], node.node.port)
                address = place if node.status is not Status.DOWN else None
        if (name, address) != (pool.node, pool.address):
            pool.retry_at = 0
            pool.failure = None
        pool.node, pool.address = name, address
        pool.standbys = {
            node.node.name: (node.addresses[0], node.node.port)
            for node in (view.nodes if view is not None and pool.settings.node is None else ())
            if node.role is Role.STANDBY and node.status is Status.UP and node.addresses
        }
        pool.held = view is not None and view.held and pool.settings.node is None
        return place

    def demands(self, parked: Mapping[Share, int], only: Limit | None = None) -> Iterator[Demand]:
        """Yield what is used and wanted of each limit; *parked* says how many clients wait for which share."""
        waiting: dict[Limit, int] = {}  # less what idles: that can be given to others
        for pool in self.all:
            settings = pool.settings
            for limit in (
                Limit("pool", pool.database, settings.server_user),
                Limit("reserve", pool.database, settings.server_user),
                Limit("database", pool.database),
                Limit("user", "", settings.server_user),
            ):
                waiting[limit] = waiting.get(limit, 0) + len(pool.waiting) + len(pool.newcomers) - len(pool.idle())
        for limit, share in self.shares.items():
            budget = self.budgets[limit]
            if budget and only in (None, limit):
                wanted = waiting.get(limit, 0) + parked.get(share, 0)
                yield Demand(limit, budget, share.limit, share.used, max(share.used + wanted, 0))
        for limit, amount in self.granted.items():
            # Nobody has needed it here yet: acknowledge, so that others may have it.
            if limit not in self.shares and only in (None, limit):
                yield Demand(limit, 0, amount, 0, 0)

    def grant(self, limit: Limit, amount: int) -> None:
        """Take a share that the supervisor has decided on, perhaps before anybody needed it."""
        self.granted[limit] = amount
        if limit in self.shares and self.budgets[limit]:
            self.shares[limit].limit = amount

    def servers(self) -> Iterator[Server]:
        """Yield every server of every pool, the warm ones too."""
        for pool in self.all:
            yield from pool.servers
            yield from pool.warm

    def in_need(self) -> list[Pool]:
        """Return the pools in which clients wait, the one with the longest wait first."""
        pools = [pool for pool in self.all if pool.waiting or pool.newcomers]
        return sorted(pools, key=waits_since)

    def victims(self, now: int) -> list[Server]:
        """Return the servers that have to go: those above a share that shrank, and one of each share that is contended.

        A share is contended when it is full and a client of one of its pools has waited for a while; without this a
        pool that is always busy would keep the others out for ever. Idle ones go first, others when they are free.
        """
        doomed: list[Server] = []
        needy = [pool for pool in self.in_need() if now - waits_since(pool) >= _PATIENCE and not pool.connecting]
        for share in self.shares.values():
            excess = share.used - share.limit
            pools = [pool for pool in self.all if share is pool.share or share in pool.shares]
            first = next((pool for pool in needy if pool in pools), None)
            if excess == 0 and first is not None and len(pools) > 1:
                pools.remove(first)
                excess = 1
            if excess <= 0:
                continue
            servers = [server for pool in pools for server in pool.servers]
            excess -= len([server for server in servers if server.retiring or server.state == SERVER_CLOSING])
            richest_first = sorted(pools, key=lambda pool: -len(pool.servers))
            idle = [server for pool in richest_first for server in pool.idle()]
            busy = [server for pool in richest_first for server in pool.servers if server.state == SERVER_ACTIVE]
            doomed += [server for server in (*idle, *busy) if not server.retiring][: max(excess, 0)]
        return doomed


def waits_since(pool: Pool) -> int:
    """Return since when the client that has waited longest in a pool waits."""
    return min(client.waiting_since for client in [*list(pool.newcomers)[:1], *list(pool.waiting)[:1]])


def oldest_idle(pools: Iterable[Pool], limited: Pool) -> Server | None:
    """Return the server that has idled longest in a pool that shares an exhausted limit with *limited*."""
    full = [share for share in limited.shares if share.used >= share.limit]
    found: Server | None = None
    for pool in pools:
        if pool is limited or not any(share in full for share in pool.shares):
            continue
        for server in pool.idle()[:1]:
            if found is None or server.state_since < found.state_since:
                found = server
    return found
