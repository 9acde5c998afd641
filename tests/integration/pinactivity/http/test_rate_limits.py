"""Rate limits (design, section 13): what is refused, for how long, and who is not."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

import pytest
from django.conf import settings as django_settings
from django.db import connection
from django.db.models import Sum
from prometheus_client import REGISTRY

from pinactivity.core.errors import InvalidOptions
from pinactivity.core.ids import new_id
from pinactivity.http.options import RateLimitOptions
from pinactivity.http.rate_limits import heartbeats
from pinactivity.models import RateLimitWindow
from pinactivity.postgres.clock import statement_time
from pinactivity.tasks import forget_rate_limits
from sessions.models import Session
from tests.api import HEARTBEAT, LINK, OPEN, START, Call, problem, send, view_heartbeat
from tests.concurrency import COMMITTED, run_together
from tests.factories import make_session, make_view, silent_session
from tests.processes import environment
from tests.tokens import SECRET, bearer, development_token
from views.models import PropertyObjectView

pytestmark = pytest.mark.django_db

USER = UUID(int=0xA)
HERE, ELSEWHERE = "203.0.113.7", "203.0.113.8"
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _development_secret(settings: Any) -> Iterator[None]:
    settings.JWT_DEVELOPMENT_SECRET = SECRET
    yield
    heartbeats._counts.clear()


@pytest.fixture
def limits(settings: Any) -> Callable[..., None]:
    """Set limits; those not named are off."""

    def set_limits(**values: int) -> None:
        off = {"start_per_address": 0, "per_anonymous_id": 0, "per_address": 0, "heartbeats": 0}
        settings.RATE_LIMITS = RateLimitOptions(**off | values)

    return set_limits


def in_one_minute(act: Callable[[], T]) -> T:
    """Act; if the minute ended before the act did, act again from no counts."""
    while True:
        RateLimitWindow.objects.all().delete()
        heartbeats._counts.clear()
        before = minutes()
        result = act()
        if minutes() == before:
            return result


def minutes() -> tuple[object, int]:
    return statement_time().replace(second=0, microsecond=0), int(time.monotonic() // 60)


# -- the calls, each of which succeeds but for a limit -------------------------------------


def send_as(device: object, call: Call, **options: Any) -> Any:
    return send(call, anonymous_id=str(device), **{"address": HERE, **options})


def start(*, anonymous_id: object = None, **options: Any) -> Any:
    return send_as(anonymous_id or new_id(), Call("POST", START, None), **options)


def send_heartbeat(session: Session) -> Any:
    call = Call("POST", HEARTBEAT, {"SessionId": str(session.id)})
    return send_as(session.anonymous_id, call)


def send_view_heartbeat(view: PropertyObjectView) -> Any:
    call = Call("PUT", view_heartbeat(view.id), None)
    return send_as(view.session.anonymous_id, call)


def link(session: Session, **options: Any) -> Any:
    token = bearer(development_token(USER))
    return send_as(session.anonymous_id, Call("POST", LINK, None), headers=token, **options)


def open_view(session: Session, **options: Any) -> Any:
    body = {
        "SessionId": str(session.id),
        "PropertyObjectId": str(new_id()),
        "ViewSource": "Map",
    }
    return send_as(session.anonymous_id, Call("POST", OPEN, body), **options)


def is_limited(response: Any) -> bool:
    """Return whether an answer is a 429, and hold it to all that a 429 must have."""
    if response.status_code != 429:
        assert response.status_code in {200, 201}
        return False
    body = problem(response)
    assert body["code"] == "RATE_LIMITED"
    assert "errors" not in body
    assert 1 <= int(response.headers["Retry-After"]) <= 61
    return True


def limited(limit: str) -> float:
    labels = {"limit": limit}
    return REGISTRY.get_sample_value("activity_requests_limited_total", labels) or 0.0


# -- what counts against what --------------------------------------------------------------


def test_defaults_are_those_of_the_design() -> None:
    assert RateLimitOptions() == RateLimitOptions(
        start_per_address=30, per_anonymous_id=60, per_address=600, heartbeats=20
    )
    assert RateLimitOptions() == django_settings.RATE_LIMITS


@pytest.mark.parametrize("field", RateLimitOptions.__slots__)
@pytest.mark.parametrize("value", [-1, 1_000_001])
def test_limit_out_of_bounds_is_named(field: str, value: int) -> None:
    with pytest.raises(InvalidOptions) as raised:
        RateLimitOptions(**{field: value})
    assert list(raised.value.reasons) == [field]


def test_31st_start_of_an_address_in_a_minute_is_refused_and_other_addresses_go_on_c37() -> None:
    def flood() -> list[bool]:
        return [is_limited(start()) for _ in range(33)]

    before = limited("start-address")
    assert in_one_minute(flood) == [False] * 30 + [True] * 3
    assert limited("start-address") >= before + 3
    assert not is_limited(start(address=ELSEWHERE))


def test_refused_start_makes_no_session(limits: Callable[..., None]) -> None:
    limits(start_per_address=1)
    anonymous_id = new_id()

    in_one_minute(lambda: (start(), start(anonymous_id=anonymous_id)))

    assert not Session.objects.filter(anonymous_id=anonymous_id).exists()


def test_starts_that_restore_count_too(limits: Callable[..., None]) -> None:
    limits(start_per_address=2)
    device = make_session().anonymous_id
    answers = in_one_minute(lambda: [is_limited(start(anonymous_id=device)) for _ in range(3)])
    assert answers == [False, False, True]


@pytest.mark.parametrize("call", [link, open_view])
def test_61st_link_or_opening_of_a_device_is_refused_and_other_devices_go_on(
    call: Callable[..., Any],
) -> None:
    session, other = make_session(), make_session()

    def flood() -> list[bool]:
        """From many addresses: this limit is the device's."""
        return [
            is_limited(call(session, address=f"203.0.113.{number}")) for number in range(61)
        ] + [is_limited(call(other, address="203.0.113.1"))]

    assert in_one_minute(flood) == [False] * 60 + [True, False]


@pytest.mark.parametrize("call", [link, open_view])
def test_links_and_openings_of_an_address_are_limited_together_for_its_devices(
    limits: Callable[..., None], call: Callable[..., Any]
) -> None:
    limits(per_address=3)
    devices = [make_session() for _ in range(4)]

    def flood() -> list[bool]:
        return [is_limited(call(device)) for device in devices] + [
            is_limited(call(devices[3], address=ELSEWHERE))
        ]

    assert in_one_minute(flood) == [False, False, False, True, False]


def test_openings_that_restart_count_as_starts_and_write_nothing_past_the_limit(
    limits: Callable[..., None],
) -> None:
    limits(start_per_address=2)
    devices = [silent_session(minutes=60) for _ in range(3)]

    answers = in_one_minute(lambda: [is_limited(open_view(device)) for device in devices])

    assert answers == [False, False, True]
    assert Session.objects.active().count() == 3  # two restarted, the third is as it was
    assert Session.objects.count() == 5
    assert PropertyObjectView.objects.count() == 2


def test_starts_links_and_openings_are_counted_apart(limits: Callable[..., None]) -> None:
    limits(start_per_address=1, per_anonymous_id=1, per_address=1)
    session = make_session()

    def each_twice() -> list[bool]:
        calls: list[Callable[[], Any]] = [
            lambda: start(anonymous_id=session.anonymous_id),
            lambda: link(session),
            lambda: open_view(session),
        ]
        return [is_limited(call()) for call in calls * 2]

    assert in_one_minute(each_twice) == [False] * 3 + [True] * 3


def test_21st_heartbeat_of_a_device_is_refused_and_other_devices_go_on_c37() -> None:
    session, other = make_session(), make_session()

    def flood() -> list[bool]:
        return [is_limited(send_heartbeat(session)) for _ in range(21)] + [
            is_limited(send_heartbeat(other))
        ]

    before = limited("heartbeat")
    assert in_one_minute(flood) == [False] * 20 + [True, False]
    assert limited("heartbeat") >= before + 1


def test_20_loops_that_send_heartbeats_as_20_devices_are_each_within_the_limit_c37() -> None:
    devices = [make_session() for _ in range(20)]

    def loops() -> list[bool]:
        return [is_limited(send_heartbeat(device)) for _ in range(5) for device in devices]

    assert not any(in_one_minute(loops))


def test_heartbeats_of_each_view_and_of_the_session_are_counted_apart(
    limits: Callable[..., None],
) -> None:
    limits(heartbeats=2)
    first = make_view()
    second = make_view(session=first.session)

    def heartbeats_of_all() -> list[bool]:
        calls: list[Callable[[], Any]] = [
            lambda: send_heartbeat(first.session),
            lambda: send_view_heartbeat(first),
            lambda: send_view_heartbeat(second),
        ]
        return [is_limited(call()) for call in calls * 3]

    assert in_one_minute(heartbeats_of_all) == [False] * 6 + [True] * 3


def test_refused_heartbeat_extends_nothing(limits: Callable[..., None]) -> None:
    limits(heartbeats=1)
    view = make_view()

    def each_twice() -> tuple[Any, Any]:
        send_heartbeat(view.session)
        send_view_heartbeat(view)
        before = Session.objects.get().last_activity_at
        assert is_limited(send_heartbeat(view.session))
        assert is_limited(send_view_heartbeat(view))
        return before, Session.objects.get().last_activity_at

    before, after = in_one_minute(each_twice)
    assert before == after


def test_spelling_of_a_device_id_gets_no_limit_of_its_own(limits: Callable[..., None]) -> None:
    limits(heartbeats=1)
    session = make_session()

    def each_twice() -> list[bool]:
        call = Call("POST", HEARTBEAT, {"SessionId": str(session.id)})
        ids = [session.anonymous_id, str(session.anonymous_id).upper(), session.anonymous_id.hex]
        return [is_limited(send_as(spelled, call)) for spelled in ids]

    assert in_one_minute(each_twice) == [False, True, True]


# -- addresses -----------------------------------------------------------------------------


def starts_from(*addresses: str) -> list[bool]:
    return in_one_minute(lambda: [is_limited(start(address=address)) for address in addresses])


def test_ipv6_is_limited_by_its_64_bit_network(limits: Callable[..., None]) -> None:
    limits(start_per_address=2)
    assert starts_from(
        "2001:db8:0:1::1",
        "2001:db8:0:1:ffff:ffff:ffff:ffff",
        "2001:DB8::1:0:0:0:9",
        "2001:db8:0:2::1",
    ) == [False, False, True, False]


def test_ipv4_in_ipv6_is_the_ipv4_address(limits: Callable[..., None]) -> None:
    limits(start_per_address=1)
    mapped = [f"::ffff:{HERE}", f"::ffff:{ELSEWHERE}", HERE]
    assert starts_from(*mapped) == [False, False, True]


def test_devices_whose_address_cannot_be_read_do_not_share_a_limit(
    limits: Callable[..., None],
) -> None:
    limits(start_per_address=1, per_address=1)
    assert starts_from("", "unix:", "") == [False] * 3


def test_entries_that_anybody_may_write_do_not_evade_the_limit(
    settings: Any, limits: Callable[..., None]
) -> None:
    limits(start_per_address=1)
    settings.TRUSTED_PROXY_COUNT = 1

    def flood() -> list[bool]:
        return [
            is_limited(start(headers={"X-Forwarded-For": entries}))
            for entries in (
                f"198.51.100.1, {HERE}:1",
                f"198.51.100.2, {HERE}:2",
                f"{HERE}, {ELSEWHERE}",
            )
        ]

    assert in_one_minute(flood) == [False, True, False]


# -- off, and what is not counted ----------------------------------------------------------


def test_0_is_off_and_costs_no_statement(
    limits: Callable[..., None], count_statements: Callable[[], Any]
) -> None:
    limits()
    view = make_view()
    assert not any(is_limited(start()) for _ in range(31))
    for call in (link, open_view):
        assert not any(is_limited(call(view.session)) for _ in range(61))
    assert not any(is_limited(send_heartbeat(view.session)) for _ in range(21))
    assert not any(is_limited(send_view_heartbeat(view)) for _ in range(21))
    assert not RateLimitWindow.objects.exists()

    with count_statements() as statements:
        start()
    assert len(statements) == 1


@pytest.mark.parametrize(
    ("call", "cost"),
    [(start, 1), (lambda: send_heartbeat(make_session()), 0)],
    ids=["start", "heartbeat"],
)
def test_limit_costs_one_statement_and_a_heartbeats_none(
    limits: Callable[..., None],
    count_statements: Callable[[], Any],
    call: Callable[[], Any],
    cost: int,
) -> None:
    limits(start_per_address=1000, heartbeats=1000)
    with count_statements() as statements:
        call()
    counted = [row["sql"] for row in statements if "rate_limit_windows" in row["sql"]]
    assert len(counted) == cost


def test_link_and_opening_count_against_both_limits_in_one_statement(
    count_statements: Callable[[], Any],
) -> None:
    session = make_session()
    for call in (link, open_view):
        with count_statements() as statements:
            call(session)
        counted = [row["sql"] for row in statements if "rate_limit_windows" in row["sql"]]
        assert len(counted) == 1
    assert RateLimitWindow.objects.count() == 4


def test_requests_that_are_not_valid_are_not_counted() -> None:
    session = make_session()
    send_as("undefined", Call("POST", START, None))
    send_as(session.anonymous_id, Call("POST", OPEN, {}))
    send_as(session.anonymous_id, Call("POST", LINK, None))
    for _ in range(30):
        assert send_as(session.anonymous_id, Call("POST", HEARTBEAT, {})).status_code == 400
    assert not RateLimitWindow.objects.exists()
    assert not is_limited(send_heartbeat(session))


# -- windows -------------------------------------------------------------------------------


def spend(key: str, *, minutes_ago: int, count: int = 1_000) -> None:
    """Write a window as a flood of an earlier minute left it."""
    window_start = statement_time().replace(second=0, microsecond=0)
    RateLimitWindow.objects.create(
        key=key, window_start=window_start - timedelta(minutes=minutes_ago), count=count
    )


def test_limit_is_forgiven_when_the_minute_ends() -> None:
    spend(f"start:address:{HERE}", minutes_ago=1)
    assert not is_limited(start())


def test_retry_after_is_the_rest_of_the_minute(limits: Callable[..., None]) -> None:
    limits(start_per_address=1, heartbeats=1)
    session = make_session()

    def refusals() -> tuple[int, int, int, float]:
        start()
        send_heartbeat(session)
        started, refused = start(), send_heartbeat(session)
        rest = 60 - statement_time().second
        return (
            int(started.headers["Retry-After"]),
            rest,
            int(refused.headers["Retry-After"]),
            60 - time.monotonic() % 60,
        )

    start_wait, rest, heartbeat_wait, rest_of_heartbeats = in_one_minute(refusals)
    assert rest <= start_wait <= 60
    assert rest_of_heartbeats <= heartbeat_wait <= 61


def test_windows_that_have_ended_are_forgotten_and_this_minutes_is_not() -> None:
    for ago in (0, 3, 60):
        spend("start:address:x", minutes_ago=ago)
        spend("link:device:y", minutes_ago=ago)

    forget_rate_limits()
    forget_rate_limits()

    assert sorted(RateLimitWindow.objects.values_list("key", flat=True)) == [
        "link:device:y",
        "start:address:x",
    ]


def test_windows_are_forgotten_on_a_schedule() -> None:
    tasks = [entry["task"] for entry in django_settings.CELERY_BEAT_SCHEDULE.values()]
    assert forget_rate_limits.name in tasks


def test_counts_are_unlogged() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relpersistence FROM pg_class WHERE oid = 'rate_limit_windows'::regclass"
        )
        assert cursor.fetchone() == ("u",)


# -- many at once --------------------------------------------------------------------------


@COMMITTED
def test_connections_share_a_limit(limits: Callable[..., None]) -> None:
    limits(start_per_address=10)
    answers = in_one_minute(lambda: run_together([lambda: is_limited(start())] * 30))
    assert answers.count(False) == 10
    assert Session.objects.count() >= 10


SPEND = """
import django
django.setup()
from pinactivity.core.errors import RateLimited
from pinactivity.http.rate_limits import limit_start
for _ in range(6):
    try:
        limit_start(address="203.0.113.7")
        print("served")
    except RateLimited:
        print("refused")
"""


@COMMITTED
def test_processes_share_a_limit(limits: Callable[..., None]) -> None:
    limits(start_per_address=5)

    def both() -> tuple[list[str], bool, bool]:
        assert not is_limited(start())
        other = subprocess.run(
            [sys.executable, "-c", SPEND],
            cwd=django_settings.BASE_DIR,
            env=environment(
                DJANGO_SETTINGS_MODULE="pinactivity.settings", RATE_LIMIT_START_PER_ADDRESS="5"
            ),
            capture_output=True,
            text=True,
            check=True,
        )
        return other.stdout.split(), is_limited(start()), is_limited(start(address=ELSEWHERE))

    answers, here, elsewhere = in_one_minute(both)
    assert answers == ["served"] * 4 + ["refused"] * 2
    assert (here, elsewhere) == (True, False)


@COMMITTED
def test_30_parallel_requests_with_the_same_two_keys_do_not_deadlock(
    postgres_log: Callable[[], list[str]],
) -> None:
    session = make_session()
    for call in (link, open_view):

        def both(call: Callable[..., Any] = call) -> list[bool]:
            return run_together([lambda: is_limited(call(session))] * 30)

        assert not any(in_one_minute(both))
        counts = RateLimitWindow.objects.values_list("count", flat=True)
        assert list(counts) == [30, 30]
    assert postgres_log() == []


@COMMITTED
def test_parallel_requests_with_crossing_keys_do_not_deadlock(
    postgres_log: Callable[[], list[str]],
) -> None:
    """Devices sort before and after addresses, so that an unsorted upsert would cross."""
    devices = [make_session() for _ in range(3)]
    addresses = [HERE, ELSEWHERE, "2001:db8::1"]

    def crossing() -> list[bool]:
        calls = [
            lambda d=device, a=address, c=call: is_limited(c(d, address=a))
            for device in devices
            for address in addresses
            for call in (link, open_view)
        ]
        return run_together(calls * 2)

    assert not any(in_one_minute(crossing))
    assert postgres_log() == []


@COMMITTED
def test_keys_in_either_order_are_counted_in_one_order(
    postgres_log: Callable[[], list[str]],
) -> None:
    def count(keys: list[str]) -> None:
        for _ in range(100):
            RateLimitWindow.objects.count_request(keys)

    orders = [["a", "b"], ["b", "a"]]
    run_together([partial(count, keys) for keys in orders * 4])

    totals = RateLimitWindow.objects.values_list("key").annotate(Sum("count")).order_by("key")
    assert list(totals) == [("a", 800), ("b", 800)]
    assert postgres_log() == []


@COMMITTED
def test_heartbeats_of_threads_are_counted_together(limits: Callable[..., None]) -> None:
    limits(heartbeats=10)
    session = make_session()
    answers = in_one_minute(
        lambda: run_together([lambda: is_limited(send_heartbeat(session))] * 30)
    )
    assert answers.count(False) == 10
