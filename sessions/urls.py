from django.urls import path

from sessions.api import SessionHeartbeatView, SessionsView

urlpatterns = [
    path("sessions", SessionsView.as_view()),
    path("sessions/heartbeat", SessionHeartbeatView.as_view()),
]
