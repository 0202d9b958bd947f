"""The admin console: the databases `gateway` and `pgbouncer`, for psql, monitoring and the gateway's own commands."""
