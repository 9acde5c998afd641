from django.urls import path

from views.api import PropertyObjectViewHeartbeatView, PropertyObjectViewsView

urlpatterns = [
    path("property-object-views", PropertyObjectViewsView.as_view()),
    path(
        "property-object-views/<str:view_id>/heartbeat", PropertyObjectViewHeartbeatView.as_view()
    ),
]
