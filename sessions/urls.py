from django.urls import path

from sessions.api import OwnSessionsView, SessionHeartbeatView, SessionLinkView, SessionsView

urlpatterns = [
    path("sessions", SessionsView.as_view()),
    path("sessions/heartbeat", SessionHeartbeatView.as_view()),
    path("sessions/link", SessionLinkView.as_view()),
    path("me/sessions", OwnSessionsView.as_view()),
]
