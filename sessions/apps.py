from django.apps import AppConfig


class SessionsConfig(AppConfig):
    name = "sessions"
    label = "activity_sessions"  # "sessions" is the label of django.contrib.sessions
    verbose_name = "Sessions"
