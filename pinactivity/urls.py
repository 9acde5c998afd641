from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerView

from pinactivity.http import problems
from pinactivity.monitoring import web
from pinactivity.monitoring.scrape import metrics

urlpatterns = [
    path("", RedirectView.as_view(url="/admin/")),
    path("admin/", admin.site.urls),
    path("api/user-activity/", include("sessions.urls")),
    path("api/user-activity/", include("views.urls")),
    path("api/dev-stats/", include("devstats.urls")),
    path("dev-stats/", include("devstats.page_urls")),
    path("api/schema", SpectacularAPIView.as_view(), name="schema"),
    path("api/docs/", SpectacularSwaggerView.as_view(url_name="schema")),
    path("health/live", web.live),
    path("health/ready", web.ready),
    path("metrics", metrics),
]

handler400 = problems.bad_request
handler404 = problems.not_found
handler500 = problems.server_error
