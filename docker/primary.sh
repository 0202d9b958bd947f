#!/bin/bash
# Run once by the image's entrypoint on a fresh data directory: let the standbys in, and keep WAL for one that was away.
set -euo pipefail
echo "host replication postgres samenet scram-sha-256" >> "$PGDATA/pg_hba.conf"
psql --username=postgres --set=ON_ERROR_STOP=1 <<'SQL'
alter system set wal_keep_size = '1GB';
alter system set wal_log_hints = on;
SQL
