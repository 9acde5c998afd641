-- Two owners of one object from the same moment on: which of them was told later.

ALTER TABLE $database.property_objects $on_cluster
    ADD COLUMN IF NOT EXISTS Revision UInt32,
    MODIFY ORDER BY (PropertyObjectId, UpdatedAt, Revision);
