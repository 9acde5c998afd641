-- The facts and the dimension (design, section 11). How this becomes SQL: devstats/migrating.py.
-- Every statement is harmless twice and beside itself.

CREATE TABLE IF NOT EXISTS $database.session_facts$local $on_cluster
(
    FactId String,
    SessionId UUID,
    AnonymousId UUID,
    UserId Nullable(UUID),
    StartedAt DateTime64(6, 'UTC'),
    EventTime DateTime64(6, 'UTC'),
    LastActivityAt DateTime64(6, 'UTC'),
    DurationSeconds UInt32,
    TenantId String,
    BrandId Nullable(UUID),
    DeveloperId Nullable(UUID),
    ViewerKind Enum8('Guest' = 1, 'User' = 2),
    IngestionTime DateTime64(6, 'UTC') DEFAULT now64(6, 'UTC'),
    CONSTRAINT chk_session_facts_activity_order CHECK LastActivityAt >= StartedAt
)
ENGINE = ${replicated}ReplacingMergeTree(${path}IngestionTime)
PARTITION BY toYYYYMM(EventTime)
ORDER BY (TenantId, SessionId, FactId)
SETTINGS ${window} = 1000;

CREATE TABLE IF NOT EXISTS $database.property_object_view_facts$local $on_cluster
(
    FactId String,
    PropertyObjectViewId UUID,
    PropertyObjectId UUID,
    SessionId UUID,
    AnonymousId UUID,
    UserId Nullable(UUID),
    ViewSource LowCardinality(String),
    EventTime DateTime64(6, 'UTC'),
    LastActivityAt DateTime64(6, 'UTC'),
    DurationSeconds UInt32,
    FilterSnapshot String,
    TenantId String,
    BrandId Nullable(UUID),
    DeveloperId UUID,
    ViewerKind Enum8('Guest' = 1, 'Investor' = 2, 'Agent' = 3),
    IngestionTime DateTime64(6, 'UTC') DEFAULT now64(6, 'UTC'),
    CONSTRAINT chk_view_facts_activity_order CHECK LastActivityAt >= EventTime
)
ENGINE = ${replicated}ReplacingMergeTree(${path}IngestionTime)
PARTITION BY toYYYYMM(EventTime)
ORDER BY (DeveloperId, PropertyObjectViewId, FactId)
SETTINGS ${window} = 1000;

-- Every version of an object is kept: a view belongs to whoever owned it then.
CREATE TABLE IF NOT EXISTS $database.property_objects $on_cluster
(
    PropertyObjectId UUID,
    DeveloperId UUID,
    BrandId Nullable(UUID),
    UpdatedAt DateTime64(6, 'UTC')
)
ENGINE = ${replicated}ReplacingMergeTree(${path_everywhere}UpdatedAt)
ORDER BY (PropertyObjectId, UpdatedAt)
SETTINGS ${window} = 1000;

-- cluster only: what is asked and written is all shards, a session and its views on one.
CREATE TABLE IF NOT EXISTS $database.session_facts $on_cluster
AS $database.session_facts_local
ENGINE = Distributed('$cluster', '$database', 'session_facts_local', cityHash64(SessionId));

-- cluster only
CREATE TABLE IF NOT EXISTS $database.property_object_view_facts $on_cluster
AS $database.property_object_view_facts_local
ENGINE = Distributed('$cluster', '$database', 'property_object_view_facts_local', cityHash64(SessionId));
