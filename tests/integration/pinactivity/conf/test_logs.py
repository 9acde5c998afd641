"""What stands in a log line, and what never does: the text of an exception (section 13).

PostgreSQL's DETAIL quotes the row, so a real one is raised, and logged in every usual way.
"""

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from celery import Celery, shared_task
from django.conf import settings
from django.db import IntegrityError, connection, transaction
from django.test import RequestFactory
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from pinactivity.conf.logs import configure
from pinactivity.core.error_info import describe_error
from pinactivity.core.ids import new_id
from pinactivity.postgres.clock import statement_time
from pinactivity.telemetry.tracing import correlate
from sessions.closer import ActivityCloser
from sessions.options import ActivityCloserOptions
from tests.factories import make_session, silent_session
from tests.logs import formatted_lines

ADDRESS = "203.0.113.77"
USER_AGENT = "Mozilla/5.0 (secret device)"
MARKS = (ADDRESS, "secret device")


@pytest.fixture
def violation(db: None) -> IntegrityError:
    """PostgreSQL's refusal of a row, whose DETAIL quotes address and User-Agent."""
    make_session(ip_address=ADDRESS, user_agent=USER_AGENT)
    with (
        pytest.raises(IntegrityError) as raised,
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute("UPDATE sessions SET status = 'Inactive'")
    assert all(mark in str(raised.value) for mark in MARKS)  # else the tests here prove nothing
    return raised.value


@pytest.fixture(params=["json", "readable"])
def lines(request: pytest.FixtureRequest) -> Iterator[Callable[[], str]]:
    """Format everything that is logged as production or development would; return it."""
    with formatted_lines(readable=request.param == "readable") as lines:
        yield lines


def ours() -> Any:
    return structlog.get_logger("tests.ours")


LIBRARY = logging.getLogger("tests.library")


def raised_again(exc: BaseException, log: Callable[[], None]) -> None:
    """Log while the exception is being handled, with a second one on top of it."""
    try:
        try:
            raise exc
        except BaseException as first:
            raise RuntimeError(str(first)) from first
    except RuntimeError:
        log()


WAYS: dict[str, Callable[[BaseException], None]] = {
    "ours, the exception": lambda exc: ours().error("it failed", exc_info=exc),
    "ours, a tuple": lambda exc: ours().error(
        "it failed", exc_info=(type(exc), exc, exc.__traceback__)
    ),
    "ours, the current one": lambda exc: raised_again(
        exc, lambda: ours().error("it failed", exc_info=True)
    ),
    "ours, exception()": lambda exc: raised_again(exc, lambda: ours().exception("it failed")),
    "ours, a group": lambda exc: ours().error(
        "it failed",
        exc_info=BaseExceptionGroup("several", [exc]),
    ),
    "a library's, the exception": lambda exc: LIBRARY.error("it failed", exc_info=exc),
    "a library's, the current one": lambda exc: raised_again(
        exc, lambda: LIBRARY.warning("it failed", exc_info=True)
    ),
    "a library's, exception()": lambda exc: raised_again(
        exc, lambda: LIBRARY.exception("it failed")
    ),
    "a library's, extra fields": lambda exc: LIBRARY.error(
        "it failed", exc_info=exc, extra={"data": str(exc), "error": exc}
    ),
    "a library's, an argument": lambda exc: LIBRARY.error("it failed: %s", exc),
    "a library's, a named argument": lambda exc: LIBRARY.error("it failed: %(f)r", {"f": exc}),
    "a library's, the message": LIBRARY.error,
    "Django's, a request that failed": lambda exc: logging.getLogger("django.request").error(
        "%s: %s",
        "it failed",
        "/api",
        exc_info=exc,
        extra={
            "status_code": 500,
            "request": RequestFactory().get("/", headers={"User-Agent": USER_AGENT}),
        },
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_text_of_an_exception_reaches_no_line(
    way: Callable[[BaseException], None], violation: IntegrityError, lines: Callable[[], str]
) -> None:
    way(violation)

    assert lines().strip()
    assert [mark for mark in MARKS if mark in lines()] == []


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_line_of_a_failure_says_its_class(
    way: Callable[[BaseException], None], violation: IntegrityError, lines: Callable[[], str]
) -> None:
    way(violation)
    assert any(name in lines() for name in ("IntegrityError", "RuntimeError", "ExceptionGroup"))


def test_task_that_fails_puts_no_text_into_celerys_lines(
    violation: IntegrityError, lines: Callable[[], str]
) -> None:
    """Celery writes the exception's text into the message itself."""

    @shared_task(name=f"tests.fails_{new_id().hex}")
    def fails() -> None:
        raise violation

    assert fails.apply().failed()

    assert [mark for mark in MARKS if mark in lines()] == []


def test_failed_task_is_logged_by_name_and_class(
    violation: IntegrityError, lines: Callable[[], str]
) -> None:
    name = f"tests.fails_{new_id().hex}"

    @shared_task(name=name)
    def fails() -> None:
        raise violation

    assert fails.apply().failed()

    assert name in lines()
    assert "IntegrityError" in lines()


def test_celery_leaves_logging_alone() -> None:
    from pinactivity.celery import app  # noqa: PLC0415 - needs settings

    assert isinstance(app, Celery)
    before = list(logging.getLogger().handlers)
    app.log.setup(loglevel=logging.DEBUG)
    assert logging.getLogger().handlers == before


# -- what does stand there -----------------------------------------------------------------


@pytest.mark.parametrize("lines", ["json"], indirect=True)
def test_line_in_production_is_one_json_object_with_class_codes_and_places(
    violation: IntegrityError, lines: Callable[[], str]
) -> None:
    request_id = new_id()
    with correlate(request_id):
        ours().error("it failed", jobRunId="7", exc_info=violation)

    (line,) = lines().splitlines()
    event = json.loads(line)
    assert event | {"timestamp": "", "frames": []} == {
        "event": "it failed",
        "level": "error",
        "logger": "tests.ours",
        "timestamp": "",
        "correlationId": str(request_id),
        "jobRunId": "7",
        "errorClass": "IntegrityError",
        "sqlstate": "23514",
        "constraint": "chk_sessions_status_fields",
        "frames": [],
    }
    assert event["timestamp"].endswith("Z")
    assert any(place.startswith("violation (") for place in event["frames"])


@pytest.mark.parametrize("lines", ["json"], indirect=True)
def test_librarys_line_is_one_json_object_too(lines: Callable[[], str]) -> None:
    LIBRARY.warning("%d of %s\nare lost", 2, "them")

    (line,) = lines().splitlines()
    event = json.loads(line)
    assert event | {"timestamp": ""} == {
        "event": "2 of them\nare lost",
        "level": "warning",
        "logger": "tests.library",
        "timestamp": "",
    }


@pytest.mark.parametrize("lines", ["readable"], indirect=True)
def test_line_in_development_is_readable(
    violation: IntegrityError, lines: Callable[[], str]
) -> None:
    ours().error("it failed", jobRunId="7", exc_info=violation)
    for part in ("it failed", "jobRunId=7", "errorClass=IntegrityError", "sqlstate=23514"):
        assert part in lines()


def test_error_of_the_database_is_described_by_class_code_and_constraint(
    violation: IntegrityError,
) -> None:
    described = {
        "errorClass": "IntegrityError",
        "sqlstate": "23514",
        "constraint": "chk_sessions_status_fields",
    }
    assert describe_error(violation) == described
    assert violation.__cause__ is not None
    assert describe_error(violation.__cause__) == described | {"errorClass": "CheckViolation"}


def test_other_errors_are_described_by_their_class() -> None:
    assert describe_error(ValueError(ADDRESS)) == {"errorClass": "ValueError"}


def test_text_of_an_exception_reaches_no_span(db: None, spans: InMemorySpanExporter) -> None:
    """A span that an exception leaves records it by default."""
    silent_session(minutes=13, ip_address=ADDRESS, user_agent=USER_AGENT)
    with connection.cursor() as cursor:  # the closing now fails, and quotes the row
        cursor.execute("ALTER TABLE sessions ADD CONSTRAINT chk_test CHECK (status = 'Active')")

    result = ActivityCloser(ActivityCloserOptions()).run(now=statement_time())

    found = "".join(span.to_json() for span in spans.get_finished_spans())
    assert result.failures > 0
    assert "activity-closer" in found
    assert [mark for mark in MARKS if mark in found] == []


def test_logging_set_up_again_keeps_the_loggers_that_are_in_use() -> None:
    """Django's set-up may come twice to a process; a logger keeps what it met at its first line."""
    log = structlog.get_logger("tests.set_up_again")
    log.info("before")
    configure(settings.LOGGING)
    with capture_logs() as lines:
        log.info("after")
    assert [line["event"] for line in lines] == ["after"]
