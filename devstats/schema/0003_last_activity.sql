-- The sessions in which something was viewed within a period ended in it or later: reading one
-- passes over the months before, however many there are.

ALTER TABLE $database.session_facts$local $on_cluster
    ADD INDEX IF NOT EXISTS last_activity LastActivityAt TYPE minmax GRANULARITY 1;

ALTER TABLE $database.session_facts$local $on_cluster
    MATERIALIZE INDEX IF EXISTS last_activity;
