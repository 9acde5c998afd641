"""Django settings of pinactivity, all of them from the environment (README, Configuration).

The only module that reads the environment, and it reads it at import: a process with a fault
in its environment does not start, whichever entry point it came through.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

from celery.schedules import BaseSchedule, crontab, schedule
from environs import validate
from kombu import Queue

from devstats.options import DevStatsOptions
from outbox.options import OutboxOptions
from pinactivity.conf.env import Environment
from pinactivity.conf.logs import logging_config
from pinactivity.http.options import RateLimitOptions
from pinactivity.kafka.options import ConsumerOptions
from sessions.options import ActivityCloserOptions, ActivityRetentionOptions
from views.options import ViewStatsOptions

BASE_DIR = Path(__file__).resolve().parent.parent

env = Environment()
REQUIRED: Any = ...  # environs' own sign for "no default"
FILLED = validate.Length(min=1, error="Must not be empty.")

# -- what kind of process this is ----------------------------------------------------------

DEVELOPMENT = env.bool("PINACTIVITY_DEVELOPMENT", default=False)
DEBUG = False  # an error page with settings and SQL is no answer, in development neither
SECRET_KEY = env.str(
    "SECRET_KEY",
    default="development-only-0123456789-abcdefghijklmnopqrstuvwxyz" if DEVELOPMENT else REQUIRED,
    validate=FILLED,
)
ALLOWED_HOSTS = env.list(
    "ALLOWED_HOSTS",
    default=["localhost", "127.0.0.1", "[::1]"] if DEVELOPMENT else REQUIRED,
    validate=FILLED,
)
CSRF_TRUSTED_ORIGINS: list[str] = env.list("CSRF_TRUSTED_ORIGINS", default=[])
TRUSTED_PROXY_COUNT = env.integer("TRUSTED_PROXY_COUNT", 0, least=0, most=10)
METRICS_HOST = env.str("METRICS_HOST", default="127.0.0.1")
METRICS_PORT = env.integer("METRICS_PORT", 0, least=0, most=65_535)
"""Port on which a Celery process or a consumer serves /metrics; 0 serves none. The web has its
own path. A consumer serves /healthz there too."""
OTLP_ENDPOINT = env.str("OTEL_EXPORTER_OTLP_ENDPOINT", default="")

# -- the service's own options -------------------------------------------------------------

ACTIVITY_CLOSER = env.options(
    "ACTIVITY_CLOSER",
    ActivityCloserOptions,
    inactivity_threshold=env.time_span("ACTIVITY_CLOSER_INACTIVITY_THRESHOLD"),
    polling_interval=env.time_span("ACTIVITY_CLOSER_POLLING_INTERVAL"),
    batch_size=env.int("ACTIVITY_CLOSER_BATCH_SIZE", default=None),
    max_run_duration=env.time_span("ACTIVITY_CLOSER_MAX_RUN_DURATION"),
    sessions_per_transaction=env.int("ACTIVITY_CLOSER_SESSIONS_PER_TRANSACTION", default=None),
    single_instance=env.bool("ACTIVITY_CLOSER_SINGLE_INSTANCE", default=None),
)
ACTIVITY_RETENTION = env.options(
    "ACTIVITY_RETENTION",
    ActivityRetentionOptions,
    age=env.time_span("ACTIVITY_RETENTION_AGE"),
    max_run_duration=env.time_span("ACTIVITY_RETENTION_MAX_RUN_DURATION"),
)
OUTBOX = env.options(
    "OUTBOX",
    OutboxOptions,
    batch_size=env.int("OUTBOX_BATCH_SIZE", default=None),
    polling_interval=env.time_span("OUTBOX_POLLING_INTERVAL"),
    delivery_timeout=env.time_span("OUTBOX_DELIVERY_TIMEOUT"),
    shards=env.int("OUTBOX_SHARDS", default=None),
    published_kept=env.time_span("OUTBOX_PUBLISHED_KEPT"),
)
VIEW_STATS = env.options(
    "VIEW_STATS", ViewStatsOptions, seen_kept=env.time_span("VIEW_STATS_SEEN_KEPT")
)

DEV_STATS = env.options(
    "DEV_STATS",
    DevStatsOptions,
    batch_size=env.int("DEV_STATS_BATCH_SIZE", default=None),
    flush_interval=env.time_span("DEV_STATS_FLUSH_INTERVAL"),
    storage_timeout=env.time_span("DEV_STATS_STORAGE_TIMEOUT"),
    reconciled=env.time_span("DEV_STATS_RECONCILED"),
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
JWT_JWKS_URL = env.str("JWT_JWKS_URL", default="")
JWT_PUBLIC_KEY = env.str("JWT_PUBLIC_KEY", default="")
JWT_DEVELOPMENT_SECRET = env.str("JWT_DEVELOPMENT_SECRET", default="")
if JWT_DEVELOPMENT_SECRET and not DEVELOPMENT:
    env.fault("JWT_DEVELOPMENT_SECRET", "Is for development only.")
if JWT_DEVELOPMENT_SECRET and len(JWT_DEVELOPMENT_SECRET) < 32:
    env.fault("JWT_DEVELOPMENT_SECRET", "Must have at least 32 characters.")
if sum(map(bool, (JWT_JWKS_URL, JWT_PUBLIC_KEY, JWT_DEVELOPMENT_SECRET))) > 1:
    env.fault("JWT_JWKS_URL", "Set one source of keys: JWT_JWKS_URL or JWT_PUBLIC_KEY.")
if not (DEVELOPMENT or JWT_JWKS_URL or JWT_PUBLIC_KEY):
    env.fault("JWT_JWKS_URL", "Set it, or JWT_PUBLIC_KEY.")
if JWT_JWKS_URL and not JWT_JWKS_URL.startswith("https://" if not DEVELOPMENT else "http"):
    env.fault("JWT_JWKS_URL", "Must be https://..")

# -- PostgreSQL: it alone decides ----------------------------------------------------------

DATABASE_SCHEMA = "user_activity"

DATABASES = {
    "default": env.database(
        "DATABASE_URL",
        session={
            "search_path": f"{DATABASE_SCHEMA},public",
            "lock_timeout": env.wait("DATABASE_LOCK_TIMEOUT", timedelta(seconds=5)),
            "statement_timeout": env.wait("DATABASE_STATEMENT_TIMEOUT", timedelta(seconds=30)),
            "idle_in_transaction_session_timeout": env.wait(
                "DATABASE_IDLE_IN_TRANSACTION_TIMEOUT", timedelta(minutes=1)
            ),
        },
    )
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# -- Kafka ---------------------------------------------------------------------------------

KAFKA_BOOTSTRAP_SERVERS: list[str] = env.list("KAFKA_BOOTSTRAP_SERVERS", validate=FILLED)
KAFKA_TOPIC_PARTITIONS = env.integer("KAFKA_TOPIC_PARTITIONS", 6, least=1, most=1000)
KAFKA_TOPIC_REPLICATION = env.integer("KAFKA_TOPIC_REPLICATION", 1, least=1, most=10)
KAFKA_TOPIC_RETENTION = env.time_span(
    "KAFKA_TOPIC_RETENTION", timedelta(days=30), least=timedelta(days=30)
)

CONSUMER = env.options(
    "CONSUMER",
    ConsumerOptions,
    poison_limit=env.int("CONSUMER_POISON_LIMIT", default=None),
    max_poll_interval=env.time_span("CONSUMER_MAX_POLL_INTERVAL"),
    session_timeout=env.time_span("CONSUMER_SESSION_TIMEOUT"),
)

# -- ClickHouse: facts that a lost or repeated message cannot spoil -----------------------------

CLICKHOUSE_URL = env.http_address("CLICKHOUSE_URL")
# An insert is tried twice by its client, and nothing polls meanwhile.
if 3 * DEV_STATS.storage_timeout > CONSUMER.max_poll_interval:
    env.fault("DEV_STATS_STORAGE_TIMEOUT", "Must be at most a third of CONSUMER_MAX_POLL_INTERVAL.")

# -- Celery: Redis is its broker and nothing else ------------------------------------------

CELERY_BROKER_URL = env.str("REDIS_URL", validate=FILLED)
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
    """Whole minutes that divide the hour keep to the wall clock, across restarts of beat."""
    minutes, rest = divmod(interval, timedelta(minutes=1))
    if rest or 60 % (minutes or 7):
        return schedule(interval)
    return crontab(minute=f"*/{minutes}")


def _tick(task: str, interval: timedelta) -> dict[str, Any]:
    """One entry of the beat.

    No `expires`: Celery compares it, made by beat's clock, with the worker's, so a few seconds
    between two hosts would stop the relay. A worker throws away what has piled up while it was
    stopped (`--purge`), since all ticks are equal (docs/adr/0006).
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
PROMETHEUS_EXPORT_MIGRATIONS = False
# Django bounds index names to 30 characters for Oracle's sake; the names here are the
# specification's, and PostgreSQL takes 63.
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

# Browsers call from the marketplace's own origins, without cookies.
CORS_ALLOWED_ORIGINS: list[str] = env.list("CORS_ALLOWED_ORIGINS", default=[])
CORS_URLS_REGEX = r"^/api/"
CORS_ALLOW_METHODS = ["GET", "POST", "PUT", "OPTIONS"]
CORS_ALLOW_HEADERS = ["authorization", "content-type", "traceparent", "x-anonymous-id"]
CORS_EXPOSE_HEADERS = ["Retry-After"]
CORS_ALLOW_CREDENTIALS = False

# -- production is behind TLS --------------------------------------------------------------

SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = not DEVELOPMENT
SECURE_SSL_REDIRECT = env.bool("SECURE_SSL_REDIRECT", default=not DEVELOPMENT)
SECURE_REDIRECT_EXEMPT = [r"^health/", r"^metrics$"]  # asked from inside, without TLS
SECURE_HSTS_SECONDS = 0 if DEVELOPMENT else 31_536_000
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = not DEVELOPMENT
if TRUSTED_PROXY_COUNT:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")

LOGGING_CONFIG = "pinactivity.conf.logs.configure"
LOGGING = logging_config(
    level=env.choice("LOG_LEVEL", "INFO", among=["DEBUG", "INFO", "WARNING", "ERROR"]),
    readable=DEVELOPMENT,
)

env.finish()
