from django.urls import path

from devstats.api import PropertyObjectsSummaryView, SessionsSummaryView

urlpatterns = [
    path("sessions/summary", SessionsSummaryView.as_view()),
    path("property-objects/summary", PropertyObjectsSummaryView.as_view()),
]
