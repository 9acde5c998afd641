from django.urls import path

from devstats.pages import LoginPage, LogoutPage, show_statistics

urlpatterns = [
    path("", show_statistics, name="dev-stats"),
    path("login/", LoginPage.as_view(), name="dev-stats-login"),
    path("logout/", LogoutPage.as_view(), name="dev-stats-logout"),
]
