"""Times as support staff compare them with logs and events: ISO, with seconds, in UTC."""

DATETIME_FORMAT = "Y-m-d H:i:s"
