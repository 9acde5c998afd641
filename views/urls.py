from django.urls import path

from views.api import (
    OwnPropertyObjectViewsView,
    PropertyObjectViewHeartbeatView,
    PropertyObjectViewsView,
    ViewStatsView,
)

urlpatterns = [
    path("property-object-views", PropertyObjectViewsView.as_view()),
    path(
        "property-object-views/<str:view_id>/heartbeat", PropertyObjectViewHeartbeatView.as_view()
    ),
    path("me/property-object-views", OwnPropertyObjectViewsView.as_view()),
    path("property-objects/<str:property_object_id>/view-stats", ViewStatsView.as_view()),
]
