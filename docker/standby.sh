#!/bin/bash
# Entry point of a standby: copy the primary unless that was done before, then run PostgreSQL as the image does.
set -euo pipefail
if [ ! -d "$PGDATA" ]; then
    copy="$PGDATA.copy" # renamed when it is whole, so that a copy cut short is never started
    rm -rf "$copy"
    pg_basebackup --pgdata="$copy" --write-recovery-conf --checkpoint=fast \
        --dbname="host=pg1 user=postgres password=$POSTGRES_PASSWORD application_name=$HOSTNAME"
    mv "$copy" "$PGDATA"
fi
exec docker-entrypoint.sh postgres
