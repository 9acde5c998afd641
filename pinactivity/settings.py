"""Django settings of pinactivity, all of them from the environment (docs/configuration.md).

This is the only module that reads the environment, and it does so at import: a process whose
environment is not valid does not start, whichever entry point it came through.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

from celery.schedules import BaseSchedule, crontab, schedule
from kombu import Queue

from devstats.options import DevStatsOptions
from outbox.options import OutboxOptions
from pinactivity.conf.env import Environment, between, filled, http_url, one_of
from pinactivity.conf.logs import logging_config
from pinactivity.http.options import RateLimitOptions
from pinactivity.kafka.options import ConsumerOptions
from pinactivity.postgres.session_settings import add_session_settings
from sessions.options import ActivityCloserOptions, ActivityRetentionOptions
from views.options import ViewStatsOptions

BASE_DIR = Path(__file__).resolve().parent.parent

env = Environment()
REQUIRED: Any = ...  # environs' sign for "no default"

# -- the process ---------------------------------------------------------------------------

DEVELOPMENT = env.bool("PINACTIVITY_DEVELOPMENT", default=False)
DEBUG = False  # in development too: Django's error page shows settings and SQL
SECRET_KEY = env.str(
    "SECRET_KEY",
    default="development-only-0123456789-abcdefghijklmnopqrstuvwxyz" if DEVELOPMENT else REQUIRED,
    validate=filled,
)
ALLOWED_HOSTS = env.list(
    "ALLOWED_HOSTS",
    default=["localhost", "127.0.0.1", "[::1]"] if DEVELOPMENT else REQUIRED,
    validate=filled,
)
CSRF_TRUSTED_ORIGINS: list[str] = env.list("CSRF_TRUSTED_ORIGINS", default=[])
TRUSTED_PROXY_COUNT = env.int("TRUSTED_PROXY_COUNT", default=0, validate=between(0, 10))

# -- observability -------------------------------------------------------------------------

METRICS_HOST = env.str("METRICS_HOST", default="127.0.0.1")
METRICS_PORT = env.int("METRICS_PORT", default=0, validate=between(0, 65_535))
"""Where a Celery process or a consumer serves /metrics and /healthz; 0 serves neither. The web
process serves its own paths."""
OTLP_ENDPOINT = env.str("OTEL_EXPORTER_OTLP_ENDPOINT", default="")
LOGGING_CONFIG = "pinactivity.conf.logs.configure"
LOGGING = logging_config(
    level=env.str(
        "LOG_LEVEL", default="INFO", validate=one_of("DEBUG", "INFO", "WARNING", "ERROR")
    ),
    readable=DEVELOPMENT,
)
PROMETHEUS_EXPORT_MIGRATIONS = False

# -- the service's own options -------------------------------------------------------------

ACTIVITY_CLOSER = env.options(
    "ACTIVITY_CLOSER",
    ActivityCloserOptions,
    inactivity_threshold=env.time_span("ACTIVITY_CLOSER_INACTIVITY_THRESHOLD", default=None),
    polling_interval=env.time_span("ACTIVITY_CLOSER_POLLING_INTERVAL", default=None),
    batch_size=env.int("ACTIVITY_CLOSER_BATCH_SIZE", default=None),
    max_run_duration=env.time_span("ACTIVITY_CLOSER_MAX_RUN_DURATION", default=None),
    sessions_per_transaction=env.int("ACTIVITY_CLOSER_SESSIONS_PER_TRANSACTION", default=None),
    single_instance=env.bool("ACTIVITY_CLOSER_SINGLE_INSTANCE", default=None),
)
ACTIVITY_RETENTION = env.options(
    "ACTIVITY_RETENTION",
    ActivityRetentionOptions,
    age=env.time_span("ACTIVITY_RETENTION_AGE", default=None),
    max_run_duration=env.time_span("ACTIVITY_RETENTION_MAX_RUN_DURATION", default=None),
)
OUTBOX = env.options(
    "OUTBOX",
    OutboxOptions,
    batch_size=env.int("OUTBOX_BATCH_SIZE", default=None),
    polling_interval=env.time_span("OUTBOX_POLLING_INTERVAL", default=None),
    delivery_timeout=env.time_span("OUTBOX_DELIVERY_TIMEOUT", default=None),
    shards=env.int("OUTBOX_SHARDS", default=None),
    published_kept=env.time_span("OUTBOX_PUBLISHED_KEPT", default=None),
)
VIEW_STATS = env.options(
    "VIEW_STATS", ViewStatsOptions, seen_kept=env.time_span("VIEW_STATS_SEEN_KEPT", default=None)
)

DEV_STATS = env.options(
    "DEV_STATS",
    DevStatsOptions,
    batch_size=env.int("DEV_STATS_BATCH_SIZE", default=None),
    flush_interval=env.time_span("DEV_STATS_FLUSH_INTERVAL", default=None),
    storage_timeout=env.time_span("DEV_STATS_STORAGE_TIMEOUT", default=None),
    reconciled=env.time_span("DEV_STATS_RECONCILED", default=None),
    cluster=env.str("DEV_STATS_CLUSTER", default=None),
)

RATE_LIMITS = env.options(
    "RATE_LIMIT",
    RateLimitOptions,
    start_per_address=env.int("RATE_LIMIT_START_PER_ADDRESS", default=None),
    per_anonymous_id=env.int("RATE_LIMIT_PER_ANONYMOUS_ID", default=None),
    per_address=env.int("RATE_LIMIT_PER_ADDRESS", default=None),
    heartbeats=env.int("RATE_LIMIT_HEARTBEATS", default=None),
)

# -- tokens of identity --------------------------------------------------------------------

JWT_ISSUER = env.str("JWT_ISSUER", default="pin-identity" if DEVELOPMENT else REQUIRED)
JWT_AUDIENCE = env.str("JWT_AUDIENCE", default="pinactivity" if DEVELOPMENT else REQUIRED)
JWT_MAX_LIFETIME = env.time_span(
    "JWT_MAX_LIFETIME",
    default=timedelta(days=1),
    validate=between(timedelta(minutes=1), timedelta(days=366)),
)
JWT_JWKS_URL = env.str("JWT_JWKS_URL", default="")
JWT_PUBLIC_KEY = env.str("JWT_PUBLIC_KEY", default="")
JWT_DEVELOPMENT_SECRET = env.str("JWT_DEVELOPMENT_SECRET", default="")
if JWT_DEVELOPMENT_SECRET and not DEVELOPMENT:
    env.add_error("JWT_DEVELOPMENT_SECRET", "Is for development only.")
if JWT_DEVELOPMENT_SECRET and len(JWT_DEVELOPMENT_SECRET) < 32:
    env.add_error("JWT_DEVELOPMENT_SECRET", "Must have at least 32 characters.")
if sum(map(bool, (JWT_JWKS_URL, JWT_PUBLIC_KEY, JWT_DEVELOPMENT_SECRET))) > 1:
    env.add_error("JWT_JWKS_URL", "Set one source of keys: JWT_JWKS_URL or JWT_PUBLIC_KEY.")
if not (DEVELOPMENT or JWT_JWKS_URL or JWT_PUBLIC_KEY):
    env.add_error("JWT_JWKS_URL", "Set it, or JWT_PUBLIC_KEY.")
if JWT_JWKS_URL and not JWT_JWKS_URL.startswith("https://" if not DEVELOPMENT else "http"):
    env.add_error("JWT_JWKS_URL", "Must be https://..")

# -- PostgreSQL: it alone decides ----------------------------------------------------------

DATABASE_SCHEMA = "user_activity"

# PostgreSQL counts time-outs in 32 bits of milliseconds, and 0 would be none.
TIME_OUT = between(timedelta(seconds=1), timedelta(days=1))
DATABASES = {
    "default": add_session_settings(
        env.postgresql("DATABASE_URL") or {},
        {
            "search_path": f"{DATABASE_SCHEMA},public",
            "lock_timeout": env.time_span(
                "DATABASE_LOCK_TIMEOUT", default=timedelta(seconds=5), validate=TIME_OUT
            ),
            "statement_timeout": env.time_span(
                "DATABASE_STATEMENT_TIMEOUT", default=timedelta(seconds=30), validate=TIME_OUT
            ),
            "idle_in_transaction_session_timeout": env.time_span(
                "DATABASE_IDLE_IN_TRANSACTION_TIMEOUT",
                default=timedelta(minutes=1),
                validate=TIME_OUT,
            ),
        },
    )
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# -- Kafka ---------------------------------------------------------------------------------

KAFKA_BOOTSTRAP_SERVERS: list[str] = env.list("KAFKA_BOOTSTRAP_SERVERS", validate=filled)
KAFKA_TOPIC_PARTITIONS = env.int("KAFKA_TOPIC_PARTITIONS", default=6, validate=between(1, 1000))
KAFKA_TOPIC_REPLICATION = env.int("KAFKA_TOPIC_REPLICATION", default=1, validate=between(1, 10))
KAFKA_TOPIC_RETENTION = env.time_span(
    "KAFKA_TOPIC_RETENTION",
    default=timedelta(days=30),
    validate=between(timedelta(days=30), timedelta.max),
)

CONSUMER = env.options(
    "CONSUMER",
    ConsumerOptions,
    poison_limit=env.int("CONSUMER_POISON_LIMIT", default=None),
    max_poll_interval=env.time_span("CONSUMER_MAX_POLL_INTERVAL", default=None),
    session_timeout=env.time_span("CONSUMER_SESSION_TIMEOUT", default=None),
)

# -- ClickHouse: statistics ----------------------------------------------------------------

CLICKHOUSE_URL = env.str("CLICKHOUSE_URL", validate=http_url)
# The client tries an insert twice, and the consumer does not poll while it waits.
if 3 * DEV_STATS.storage_timeout > CONSUMER.max_poll_interval:
    env.add_error(
        "DEV_STATS_STORAGE_TIMEOUT", "Must be at most a third of CONSUMER_MAX_POLL_INTERVAL."
    )

# -- Celery: Redis is its broker and nothing else ------------------------------------------

CELERY_BROKER_URL = env.str("REDIS_URL", validate=filled)
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = False  # the next tick is the retry
CELERY_TASK_QUEUES = [Queue("closer"), Queue("relay"), Queue("maintenance")]
CELERY_TASK_DEFAULT_QUEUE = "maintenance"
CELERY_TASK_ROUTES = {
    "sessions.tasks.close_inactive": {"queue": "closer"},
    "outbox.tasks.relay": {"queue": "relay"},
}
CELERY_WORKER_POOL = "threads"  # worker_shutting_down reaches the tasks' own process
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_TIMEZONE = "UTC"


def _schedule(interval: timedelta) -> BaseSchedule:
    """Return a schedule; whole minutes that divide the hour keep to the clock.

    So that restarts of beat do not shift them.
    """
    minutes, rest = divmod(interval, timedelta(minutes=1))
    divides_the_hour = not rest and minutes > 0 and 60 % minutes == 0
    return crontab(minute=f"*/{minutes}") if divides_the_hour else schedule(interval)


def _tick(task: str, interval: timedelta) -> dict[str, Any]:
    """Return one entry of beat's schedule.

    It has no `expires`. Celery makes that time by beat's clock and compares it with the worker's,
    so a few seconds between two hosts would stop the relay. A worker discards the ticks that piled
    up while it was stopped (`--purge`), because all ticks are equal (docs/adr/0006).
    """
    return {"task": task, "schedule": _schedule(interval)}


CELERY_BEAT_SCHEDULE = {
    "close-inactive": _tick("sessions.tasks.close_inactive", ACTIVITY_CLOSER.polling_interval),
    "delete-old-activity": {
        "task": "sessions.tasks.delete_old_activity",
        "schedule": crontab(hour=3, minute=0),
    },
    "relay-outbox": _tick("outbox.tasks.relay", OUTBOX.polling_interval),
    "purge-outbox": _tick("outbox.tasks.purge_published", timedelta(minutes=5)),
    "purge-seen-views": _tick("views.tasks.purge_seen_views", timedelta(minutes=5)),
    "reconcile": {"task": "devstats.tasks.reconcile", "schedule": crontab(minute=30)},
    "forget-rate-limits": _tick("pinactivity.tasks.forget_rate_limits", timedelta(minutes=5)),
}

# -- Django --------------------------------------------------------------------------------

ROOT_URLCONF = "pinactivity.urls"
WSGI_APPLICATION = "pinactivity.wsgi.application"
INSTALLED_APPS = [
    "pinactivity",
    "sessions",
    "views",
    "outbox",
    "devstats",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "corsheaders",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "django_prometheus",
]
MIDDLEWARE = [
    "django_prometheus.middleware.PrometheusBeforeMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "pinactivity.telemetry.tracing.RequestContextMiddleware",
    "corsheaders.middleware.CorsMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_prometheus.middleware.PrometheusAfterMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("MinimumLengthValidator", "CommonPasswordValidator", "NumericPasswordValidator")
]
APPEND_SLASH = False  # the API's paths have none, and a redirect would lose a POST's body
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en-us"
FORMAT_MODULE_PATH = "pinactivity.conf.formats"
STATIC_URL = "/static/"
WHITENOISE_USE_FINDERS = True  # the admin's files straight from the packages: no collect step
DATA_UPLOAD_MAX_MEMORY_SIZE = 64 * 1024
# Django limits index names to 30 characters because Oracle does. These are the specification's
# names, and PostgreSQL takes 63 characters.
SILENCED_SYSTEM_CHECKS = ["models.E034"]

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "DEFAULT_PERMISSION_CLASSES": [],
    "DEFAULT_PARSER_CLASSES": [],
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "pinactivity.http.negotiation.OneRepresentation",
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "EXCEPTION_HANDLER": "pinactivity.http.problems.answer_exception",
    "UNAUTHENTICATED_USER": None,
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "pinactivity",
    "DESCRIPTION": "Sessions and property object views of a real-estate marketplace.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "SCHEMA_PATH_PREFIX": "/api/",
    "COMPONENT_SPLIT_REQUEST": True,
    "DISABLE_ERRORS_AND_WARNINGS": False,
    "APPEND_COMPONENTS": {
        "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}}
    },
    "ENUM_NAME_OVERRIDES": {
        "ViewSource": "views.lifecycle.ViewSource",
        "SessionStatus": "sessions.lifecycle.Status",
        "DeviceType": "sessions.device.DeviceType",
    },
}

# -- browsers: from the marketplace's own origins, without cookies -------------------------

CORS_ALLOWED_ORIGINS: list[str] = env.list("CORS_ALLOWED_ORIGINS", default=[])
CORS_URLS_REGEX = r"^/api/"
CORS_ALLOW_METHODS = ["GET", "POST", "PUT", "OPTIONS"]
CORS_ALLOW_HEADERS = ["authorization", "content-type", "traceparent", "x-anonymous-id"]
CORS_EXPOSE_HEADERS = ["Retry-After"]
CORS_ALLOW_CREDENTIALS = False

# -- TLS: in production a proxy ends it ----------------------------------------------------

SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = not DEVELOPMENT
SECURE_SSL_REDIRECT = env.bool("SECURE_SSL_REDIRECT", default=not DEVELOPMENT)
SECURE_REDIRECT_EXEMPT = [r"^health/", r"^metrics$"]  # reached from inside, without TLS
SECURE_HSTS_SECONDS = 0 if DEVELOPMENT else 31_536_000
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = not DEVELOPMENT
if TRUSTED_PROXY_COUNT:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")

env.finish()
